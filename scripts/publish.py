"""Makes the folder that publishes a draft, or a sampled set, on the Hugging Face Hub; sends it with --push.

    python scripts/publish.py --draft outputs/quickstart/drafts/eagle3 --report outputs/quickstart/report/report.json \
      --repo me/my-draft
    python scripts/publish.py --samples outputs/quickstart/samples --repo me/my-samples --push --private

Without --push nothing leaves this machine: the folder is written and shown. The card says what draftsmith.json and the
report say, no more. A draft whose report is of other weights, whose greedy output was changed, or whose files hold a
token, a local path or a pickle is refused. An upload that broke off goes on with the same command. The last line is
JSON.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.filesize import decimal
from rich.markdown import Markdown
from rich.text import Text
from rich.tree import Tree

from decode.common import files
from decode.common.cli import run_command
from decode.common.errors import UserError
from decode.drafts.base import read_metadata
from scripts.engine_compat.checker import check_draft_files
from train.hub import publish, upload
from train.hub.upload import HubLabels

CHECKED_ENGINES = {
    "vLLM": "vllm",
    "SGLang": "sglang",
    "TensorRT-LLM": "trtllm",
    "transformers": "transformers",
}
"""Engines of the card that scripts/check_draft.py has rules of."""


@dataclass
class PublishConfig:
    draft: str = ""
    """A draft's folder, as train/distill.py wrote it."""
    report: str = ""
    """report.json of eval/run.py; without one the card says that nothing was measured."""
    referee: str = ""
    """JSON that scripts/referee.py --out wrote: the draft served by vLLM."""
    tuned: str = ""
    """tuned.json of eval/tune.py on this draft: serving files and the card get the draft length that it found."""
    samples: str = ""
    """Instead of a draft: a sampled set."""
    repo: str = ""
    """Its name on the Hub, as me/my-draft."""
    private: bool = False
    """Only you and your organisation see it."""
    push: bool = False
    """Send it; else only write and show the folder."""
    labels: HubLabels = field(default_factory=HubLabels)
    out: str = ""
    """The folder to write; outputs/publish/NAME if empty."""


def main(s: PublishConfig) -> None:
    if (s.draft == "") == (s.samples == ""):
        raise UserError("give either --draft or --samples, a folder")
    upload.check_repo_id(s.repo)
    if s.push:
        upload.check_upload_possible(s.repo)
    out = Path(s.out or f"outputs/publish/{s.repo.rpartition('/')[2]}")
    if s.samples:
        folder = publish.build_dataset_folder(Path(s.samples), s.repo, s.labels, out)
    else:
        report = files.read_json(Path(s.report)) if s.report else None
        referee = files.read_json(Path(s.referee)) if s.referee else None
        tuned = files.read_json(Path(s.tuned)) if s.tuned else None
        draft = Path(s.draft)
        publish.check_draft(draft, report, referee, tuned)  # before rules are held against it
        folder = publish.build_draft_folder(
            draft, report, referee, s.repo, s.labels, out, check_engines(s.draft), tuned
        )
    print_folder(folder)
    sent = upload.push(folder, s.repo, s.private) if s.push else None
    print(
        json.dumps(
            {"folder": str(folder.path), "repo": s.repo, "kind": folder.kind, "pushed": sent}
        )
    )


def check_engines(draft: str) -> dict[str, list[str]]:
    """What the rules of each engine find wrong with the draft's files, of its target what they say themselves."""
    target = read_metadata(draft).get("target", {}).get("name", "")
    here = target if Path(target, "config.json").is_file() else ""
    return {
        name: [f"{f.effect}: {f.what}" for f in check_draft_files(draft, engine, target=here)]
        for name, engine in CHECKED_ENGINES.items()
    }


def print_folder(folder: upload.PublishFolder) -> None:
    """The folder as a tree with sizes, what was left out, and the card."""
    console = Console()
    tree = Tree(Text(f"{folder.path}/"))
    _add_to_tree(tree, folder.path)
    console.print(tree)
    if len(folder.left_out) > 0:
        console.print(Text(f"left out: {', '.join(folder.left_out)}", style="dim"))
    text = (folder.path / "README.md").read_text(encoding="utf-8")
    console.print(Markdown(text.split("\n---\n", 1)[1]))


def _add_to_tree(tree: Tree, folder: Path) -> None:
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir():
            _add_to_tree(tree.add(Text(f"{path.name}/")), path)
        else:
            tree.add(Text.assemble(path.name, (f"  {decimal(path.stat().st_size)}", "dim")))


if __name__ == "__main__":
    flags = ("--push", "--private")  # may stand without their `true`
    pairs = zip(sys.argv, [*sys.argv[1:], "--"], strict=True)
    sys.argv = [f"{a}=true" if a in flags and b.startswith("--") else a for a, b in pairs]
    run_command(main, PublishConfig, __doc__)
