"""Prompt in, text out, with every token coloured by how it came about.

    python decode/generate.py --prompt "def read_config(path):" --draft outputs/quickstart/drafts/causal
    python decode/generate.py --prompt "Question: …" --draft ngram --sampling.temperature 1

Green: drafted and accepted by the target. Red, struck out: drafted and rejected. Blue: the target's own token, which
corrects a rejected one or follows a fully accepted draft (Leviathan et al. 2023, figure 1).
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.text import Text

from decode.common.chat_template import encode_prompt
from decode.common.cli import run_command
from decode.common.errors import UserError
from decode.drafts.registry import pick_draft
from decode.engine.engine import RequestOutput, RoundRecord, add_record, speculate
from decode.model.loading import load_target
from decode.verification.sampling import SamplingParams

ACCEPTED_STYLE, REJECTED_STYLE, TARGET_STYLE = "green", "red strike", "bold blue"


@dataclass
class GenerateConfig:
    prompt: str = ""
    """The text to continue (or to answer, if the target has a chat template)."""
    prompt_file: str = ""
    """Read the prompt from this file instead."""
    target: str = "assets/target"
    """Folder or hub name."""
    revision: str | None = None
    """Commit, tag or branch of a hub target."""
    draft: str = "ngram"
    """Folder or hub name of a draft, `ngram` for lookup, `none` for plain decoding."""
    k: int = 4
    """Tokens drafted a round."""
    max_new_tokens: int = 128
    """Longest answer."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Temperature 0 is greedy."""
    seed: int = 0
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    rejected: bool = True
    """Show rejected drafts as well."""


def styled_spans(record: RoundRecord, rejected: bool) -> list[tuple[list[int], str]]:
    """(ids, style) in the order to print them: accepted drafts, rejected ones, the target's own token."""
    stays = record.tokens[: record.accepted]
    own = record.tokens[record.accepted :]
    falls = record.proposed[record.accepted :] if rejected else []
    return [
        (ids, style)
        for ids, style in ((stays, ACCEPTED_STYLE), (falls, REJECTED_STYLE), (own, TARGET_STYLE))
        if len(ids) > 0
    ]


def summary_line(output: RequestOutput, seconds: float) -> str:
    """One line: length, speed, τ and the acceptance rate."""
    emitted, rounds = len(output.output_ids) - 1, len(output.rounds)
    drafted = sum(d for d, _ in output.rounds)
    accepted = sum(a for _, a in output.rounds)
    parts = [
        f"{len(output.output_ids)} tokens in {seconds:.2f} s",
        f"{len(output.output_ids) / seconds:.1f} tokens/s",
        f"{rounds} rounds",
    ]
    if rounds > 0:
        parts.append(f"τ {emitted / rounds:.2f}")
    if drafted > 0:
        parts.append(f"{accepted} of {drafted} drafted tokens accepted")
    return ", ".join([*parts, f"ended by {output.finish_reason}"])


def print_tokens(console: Console, tokenizer: Any, ids: list[int], style: str) -> None:
    console.print(
        Text(tokenizer.decode(ids, skip_special_tokens=True), style=style),
        end="",
        soft_wrap=True,
        highlight=False,
    )


def main(s: GenerateConfig) -> None:
    if s.prompt_file:
        if not Path(s.prompt_file).is_file():
            raise UserError(f"prompt file {s.prompt_file!r} does not exist")
        s.prompt = Path(s.prompt_file).read_text()
    if not s.prompt:
        raise UserError("give --prompt TEXT or --prompt_file FILE")
    target = load_target(s.target, s.device, s.dtype, s.revision)
    draft = pick_draft(s.draft, target, dtype=s.dtype)
    ids = encode_prompt(target.tokenizer, s.prompt)
    console = Console()
    console.print(Text(s.prompt), end="", soft_wrap=True, highlight=False)
    output = RequestOutput(ids)
    start = time.perf_counter()
    for record in speculate(
        target,
        draft,
        [ids],
        k=s.k,
        sampling=s.sampling,
        max_new_tokens=s.max_new_tokens,
        seed=s.seed,
    ):
        add_record(output, record)
        # without colour, as in a file, rejected drafts could not be told from the text
        for tokens, style in styled_spans(record, s.rejected and console.is_terminal):
            print_tokens(console, target.tokenizer, tokens, style)
    seconds = time.perf_counter() - start
    console.print()
    Console(stderr=True).print(summary_line(output, seconds), style="dim", highlight=False)


if __name__ == "__main__":
    run_command(main, GenerateConfig, __doc__)
