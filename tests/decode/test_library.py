"""decode/ as a library: what a program that imports it needs."""

from tests.test_boundaries import import_graph
from tests.worlds import ROOT


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
