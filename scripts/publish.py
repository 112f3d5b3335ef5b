"""Writes the folder that publishes a draft or a sampled set on the Hugging Face Hub; uploads it with --push.

    python scripts/publish.py --draft outputs/quickstart/drafts/eagle3 --report outputs/quickstart/report/report.json \
      --repo me/my-draft --labels.base_model OWNER/TARGET
    python scripts/publish.py --samples outputs/quickstart/samples --repo me/my-samples --push --private

Without --push nothing is sent: the folder is written and shown. Published are the fields of draftsmith.json, the report
and the manifest that their types name (decode/common/published.py), and the card contains nothing else. Of a local path
in them only the last part is published, unless it has two parts at most (a sampled set: one) or lies in assets/,
configs/ or outputs/ (then as seen from there); of a place in the Hub's cache its repository. --labels.base_model says
what a target from a folder is called on the Hub; without a name that others can find the command and the card say so. A
draft is refused if its report is of other weights, if its greedy output is not the target's, or if its weights, config
or tokenizer contain a secret, a pickle or a local path (which is cut out of tokenizer_config.json and
generation_config.json); samples are refused if a row contains a secret or the set holds images. A push leaves no file
of an earlier version that the folder lacks. The same command goes on with an interrupted upload. The last line is JSON.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.filesize import decimal
from rich.markdown import Markdown
from rich.text import Text
from rich.tree import Tree

from decode.common.command import Terminated, run_command
from decode.common.errors import UserError
from decode.common.files import find_bundled
from decode.common.run_dir import check_inputs_outside
from train.settings.training import HubLabels
from train.trainer.settings import DistillConfig


@dataclass
class PublishConfig:
    COMMON: ClassVar[str] = "draft report tuned repo out push private"

    draft: str = ""
    """A draft's folder, as train/distill.py wrote it."""
    report: str = ""
    """report.json of eval/run.py; empty: the card says that nothing was measured."""
    referee: str = ""
    """Greedy result of scripts/referee.py --out: the draft in a serving engine."""
    tuned: str = ""
    """tuned.json of eval/tune.py on this draft: the serving files and the card use its draft length."""
    samples: str = ""
    """Folder of a sampled set, instead of a draft."""
    target: str = ""
    """samples: the model whose tokenizer reads them, which are searched for secrets; empty: the manifest's target."""
    repo: str = ""
    """Name of the repository on the Hub, as me/my-draft; without an owner it is yours, by the Hub's login."""
    private: bool = False
    """Make the repository visible only to you and your organisation."""
    push: bool = False
    """Upload the folder; otherwise it is only written and shown."""
    labels: HubLabels = field(default_factory=HubLabels)
    """Metadata for the Hub that is in no file."""
    out: str = ""
    """The folder to write; empty: outputs/publish/NAME."""


def main(s: PublishConfig) -> None:
    """Writes the folder, shows it, and uploads it with `push`."""
    from train.hub import publish, upload  # these load torch: --help does without
    from train.hub.evidence import read_evidence

    if (s.draft == "") == (s.samples == ""):
        raise UserError("give either --draft or --samples, a folder")
    repo = upload.resolve_repo(s.repo, s.push)
    out = Path(s.out or f"outputs/publish/{repo.rpartition('/')[2]}")
    check_inputs_outside(out, [s.report, s.referee, s.tuned])
    if s.samples:
        folder = publish.build_dataset_folder(Path(s.samples), repo, s.labels, out, s.target)
    else:
        evidence = read_evidence(s.report, s.referee, s.tuned)
        draft = Path(s.draft)
        publish.check_draft(draft, evidence)  # before the engines' rules are checked
        folder = publish.build_draft_folder(
            draft, evidence, repo, s.labels, out, DistillConfig, check_engines(s.draft)
        )
    print_folder(folder.path, folder.left_out)
    try:
        sent = upload.push(folder, repo, s.private) if s.push else None
    except (KeyboardInterrupt, Terminated) as error:
        error.add_note(f"{out} is complete, and the same command continues the upload")
        raise
    about = {"folder": str(folder.path), "repo": repo, "kind": folder.kind, "pushed": sent}
    print(json.dumps(about))


def check_engines(draft: str) -> dict[str, list[str]]:
    """{engine: findings of its rules}; those on the target only if draftsmith.json's target is a local folder."""
    from decode.checkpoints.draft_folder import read_metadata
    from decode.serving.checker import ENGINES, check_draft_files

    target = read_metadata(draft).target
    folder = find_bundled("" if target is None else target.name)
    local_target = folder if Path(folder, "config.json").is_file() else ""
    found = {}
    for key, engine in ENGINES.items():
        findings = check_draft_files(draft, key, target=local_target)
        found[engine.name] = [f"{f.effect}: {f.what}" for f in findings]
    return found


def print_folder(folder: Path, left_out: Sequence[str]) -> None:
    """Prints the folder as a tree with sizes, the names that were left out, and the card."""
    console, tree = Console(), Tree(Text(f"{folder}/"))
    add_to_tree(tree, folder)
    console.print(tree)
    if len(left_out) > 0:
        console.print(Text(f"left out: {', '.join(left_out)}", style="dim"))
    text = (folder / "README.md").read_text(encoding="utf-8")
    console.print(Markdown(text.split("\n---\n", 1)[1]))


def add_to_tree(tree: Tree, folder: Path) -> None:
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir():
            add_to_tree(tree.add(Text(f"{path.name}/")), path)
        else:
            tree.add(Text.assemble(path.name, (f"  {decimal(path.stat().st_size)}", "dim")))


if __name__ == "__main__":
    flags = ("--push", "--private")  # may stand without their `true`
    pairs = zip(sys.argv, [*sys.argv[1:], "--"], strict=True)
    sys.argv = [f"{a}=true" if a in flags and b.startswith("--") else a for a, b in pairs]
    run_command(main, PublishConfig, __doc__)
