"""decode/ as a library: what a program that imports it needs."""

from pathlib import Path

from tests import worlds
from tests.test_boundaries import import_graph
from tests.worlds import ROOT, World


def test_decoding_needs_no_command_line() -> None:
    """Catches UserError, loading or decoding that import the parser of commands."""
    graph, seen = import_graph(ROOT), set[str]()
    left = ["common.errors", "drafts.registry", "engine.engine", "model.loading"]
    names = [f"decode.{name}" for name in left]
    while names:
        name = names.pop()
        names += graph[name] - seen
        seen.add(name)
    assert len(seen) > 50
    assert "decode.common.settings" not in seen


EAGER = """
import sys
from decode.drafts.registry import create_draft
from decode.engine.engine import decode
from decode.model.loading import load_target

target = load_target(sys.argv[1])
(record,) = decode(target, create_draft("ngram", target), [[20, 21, 20, 21]], max_new_tokens=8)
print(len(record.output_ids), "torch._inductor.lowering" in sys.modules)
"""


def test_only_what_compiles_imports_inductor(world: World, tmp_path: Path) -> None:
    """Bug: every command takes a second longer to start, for a compiler that it does not use. Some of inductor's
    modules come with transformers. The process has imported training and sampling as well (worlds.FORKS)."""
    file = tmp_path / "eager.py"
    file.write_text(EAGER)
    count, compiles = worlds.fork(file, world.target).ok().out.split()
    assert int(count) > 0
    assert compiles == "False"
