"""One command over those used most: `draftsmith eval --help` is `python eval/run.py --help`.

    draftsmith sample --target T --sources '[{kind: file, path: prompts.jsonl}]' --out S
    draftsmith doctor S --target T
    draftsmith train --config configs/distill/qwen3-8b-eagle3.yaml   # several GPUs: accelerate launch train/distill.py
    draftsmith eval --target T --methods ngram --tasks humaneval
    draftsmith ls families | tasks | recipes | engines

It is installed by `pip install -e .` or `pip install .`, and runs in the folder where it is called; assets/… and
configs/… are found from everywhere.
"""

import runpy
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common import files

CODE = Path(__file__).resolve().parents[1]
COMMANDS = {
    "sample": ("train/sample.py", "the target answers prompts"),
    "prompts": ("train/write_prompts.py", "a model writes prompts"),
    "doctor": ("train/doctor.py", "is the data sound?"),
    "train": ("train/distill.py", "train a draft on the answers"),
    "eval": ("eval/run.py", "measure acceptance, speed-up, losslessness"),
    "tune": ("eval/tune.py", "which K, tree and batch size?"),
    "advise": ("eval/advise.py", "is it worth serving, by the report?"),
    "rescore": ("eval/rescore.py", "an engine's /metrics by the same definitions"),
    "fidelity": ("eval/fidelity.py", "what does a dtype change of a target?"),
    "generate": ("decode/generate.py", "one prompt, each token coloured by its origin"),
    "check": ("scripts/check_draft.py", "would an engine read the draft's files right?"),
    "audit": ("scripts/audit.py", "served badly: what is read otherwise?"),
    "export": ("scripts/export.py", "other projects' formats, GGUF"),
    "publish": ("scripts/publish.py", "card, figures, serving lines; the Hub"),
}

OTHER_WORDS = {
    "medusa2": "Medusa heads, trained together with the target",
    "dflash2": "a DFlash 2 head that another trainer wrote; not trained here",
    "xpress": "an XPress head that another trainer wrote; not trained here",
    "domino": "a Domino head that another trainer wrote; not trained here",
    "dflare": "a DFlare head that another trainer wrote; not trained here",
    "ngram": "copies what followed the last tokens earlier in the text; not trained",
    "suffix": "the same, by how often a continuation was seen (SuffixDecoding); not trained",
    "grammar": "the tokens that a grammar forces; not trained",
    "early-exit": "the target's first layers; not trained",
    "swift": "the target without the sub-layers that a search skips (SWIFT); not trained",
}


def usage() -> str:
    lines = [__doc__ or ""]
    lines += [f"  {name:9} {about} ({file})" for name, (file, about) in COMMANDS.items()]
    return "\n".join([*lines, f"  {'ls':9} families, tasks, recipes or engines"])


def listed(what: str) -> list[str]:
    """What there is of a kind. SystemExit for another word, and for files that were not installed."""
    root = files.ROOT
    if what == "recipes":
        folder = root / "configs" / "distill"
        return found(str(file.relative_to(root)) for file in folder.glob("*.yaml"))
    if what == "tasks":
        return found(file.stem for file in (root / "assets" / "tasks").glob("*.yaml"))
    if what == "engines":
        from decode.serving.checker import ENGINES

        return [f"{name} {engine.version}" for name, engine in ENGINES.items()]
    if what == "families":
        from decode.common.command import import_plugins
        from train.families.registry import TRAINED_FAMILIES

        import_plugins()

        trained = {name: family.description for name, family in TRAINED_FAMILIES.items()}
        return [f"{name:10}  {about}" for name, about in (trained | OTHER_WORDS).items()]
    refuse("draftsmith ls families, tasks, recipes or engines")


def found(names: Iterable[str]) -> list[str]:
    """The names in order. SystemExit for none."""
    return sorted(names) or refuse(
        f"{files.ROOT} lacks them: install draftsmith from its repository"
    )


def refuse(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Runs the command that the first argument names."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print(version("draftsmith"))
    elif name == "ls":
        print("\n".join(listed(" ".join(words))))
    elif name in COMMANDS:
        file = str(CODE / COMMANDS[name][0])
        sys.argv = [file, *words]
        runpy.run_path(file, run_name="__main__")
    else:
        refuse(f"draftsmith {name}: no such command; {', '.join(COMMANDS)}, ls")


if __name__ == "__main__":
    main()
