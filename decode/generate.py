"""Continues one prompt and prints the text, each token coloured by where it came from.

    python decode/generate.py --prompt "def read_config(path):" --draft outputs/bundled/drafts/causal
    python decode/generate.py --prompt "Question: …" --draft ngram --sampling.temperature 1
    python decode/generate.py --prompt_file question.txt --draft outputs/draft --lookup ngram
    python decode/generate.py --prompt "What is this?" --image photo.jpg --target Qwen/Qwen2.5-VL-3B-Instruct
    python decode/generate.py --prompt "A user as JSON: " --draft grammar --json_schema user.schema.json

Green: drafted and accepted. Red, struck out: drafted and rejected. Blue: sampled from the target, instead of a
rejected token or as the bonus token after a fully accepted draft (Leviathan et al. 2023, figure 1). A character of
several tokens is printed when the last one completes it, in the colour of that one; of rejected tokens only whole
characters are shown.
"""

import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.control import strip_control_codes
from rich.segment import Segment, Segments
from rich.style import Style

from decode.common.chat_template import encode_prompt
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import read_text
from decode.common.ranges import Count, DraftLength, DtypeName, MatchLength, Seed, Share
from decode.common.target_settings import PlacedTargetSettings
from decode.common.template_choice import TemplateSetting, with_template
from decode.constraints.grammar import ConstraintConfig, build_matcher
from decode.distributed.placement import load_target, run_placed
from decode.drafts.adaptive import CONFIDENCE, AdaptiveConfig
from decode.drafts.mirror import MirrorConfig
from decode.drafts.registry import pick_draft
from decode.drafts.swift import open_search
from decode.drafts.swift_search import SwiftConfig
from decode.engine.active_request import check_draft_length
from decode.engine.composing import add_lookup, make_adaptive, make_mirror
from decode.engine.engine import speculate
from decode.engine.image_prompts import ImagePrompt, encode_image_prompt, load_processor
from decode.engine.records import DecodeRecord, RoundRecord, add_record
from decode.engine.text_stream import LabelledText, TextStream
from decode.engine.trained_template import use_template
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams

ACCEPTED_STYLE, REJECTED_STYLE, TARGET_STYLE = "green", "red strike", "bold blue"


@dataclass
class GenerateConfig(PlacedTargetSettings):
    COMMON: ClassVar[str] = (
        "target draft prompt prompt_file image k lookup max_new_tokens sampling.temperature dtype device"
    )

    prompt: str = ""
    """The text to continue, or to answer if the target has a chat template."""
    prompt_file: str = ""
    """A file to read the prompt from instead."""
    image: str | list[str] = ""
    """Image files that stand before the prompt, a path or a list [a.png, b.png]; for vision-language targets."""
    template: TemplateSetting | None = None
    """How the chat template renders prompts, as in train/sample.py: its arguments, such as '{enable_thinking: false}',
    or the name of one of several. null: as in the training of the draft; '{}': the tokenizer's own."""
    draft: str = "ngram"
    """Folder or Hub name of a draft; `ngram`: lookup in the text so far; `grammar`: only tokens that a grammar forces;
    `none`: plain decoding."""
    lookup: str = ""
    """`ngram` or `suffix`: where the text repeats itself, copy from it and do not ask the draft; empty: never."""
    min_match: MatchLength = 3
    """Tokens that `lookup` must find again."""
    swift: SwiftConfig = field(default_factory=SwiftConfig)
    """--draft swift: settings of the drafted chains and of the search for the sub-layers to skip."""
    state: str = ""
    """--draft swift: folder in which the search is kept from run to run; empty: each run begins anew."""
    draft_dtype: DtypeName = ""
    """What the draft computes in, such as bfloat16, w8a8 or int4 (weights in four bits, on a CPU); empty: the target's
    dtype. It never changes the output."""
    k: DraftLength = 4
    """Tokens drafted per round."""
    adaptive: str = ""
    """Draft at most `k`: `confidence` stops where the draft is unsure, `acceptance` takes the fastest length for what
    was accepted so far, `both`; empty: always `k`."""
    confidence: Share = CONFIDENCE
    """A chain of `adaptive` ends where the product of its tokens' probabilities falls below this."""
    mirror: MirrorConfig = field(default_factory=MirrorConfig)
    """Drafting while the target verifies; --mirror.exit_layer switches it on."""
    max_new_tokens: Count = 128
    """Tokens generated at most."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How tokens are sampled; temperature 0 is greedy."""
    json_schema: str = ""
    """The answer is JSON of this schema: a file, or the schema itself, {…}. Needs llguidance, as the next two do."""
    regex: str = ""
    """The answer matches this regular expression."""
    grammar: str = ""
    """The answer follows the Lark grammar in this file (llguidance's dialect; the rule `start` is the whole text)."""
    seed: Seed = 0
    """Seed of sampling; equal seeds give equal text."""
    rejected: bool = True
    """Show rejected tokens too. They are never shown outside a terminal."""


def styled_spans(record: RoundRecord, rejected: bool) -> list[tuple[list[int], str]]:
    """(ids, style) of a round in the order to print them: accepted, rejected (if wanted) and the target's tokens."""
    spans = [
        (record.tokens[: record.accepted], ACCEPTED_STYLE),
        (record.proposed[record.accepted :] if rejected else [], REJECTED_STYLE),
        (record.tokens[record.accepted :], TARGET_STYLE),
    ]
    return [(ids, style) for ids, style in spans if len(ids) > 0]


def summary_line(output: DecodeRecord, seconds: float) -> str:
    """One line with length, speed, number of rounds, τ and acceptance. `seconds` is the time for the whole text."""
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
    if output.forced:
        parts.append(f"{sum(output.forced)} forced by the grammar")
    return ", ".join([*parts, f"ended by {output.finish_reason}"])


def print_text(console: Console, text: str, style: str = "") -> None:
    """Prints `text` without a line break at the end: as it is to a file; in a terminal in a rich `style`, without
    control codes, which would move the cursor."""
    if not console.is_terminal:
        console.file.write(text)
        console.file.flush()
        return
    segment = Segment(strip_control_codes(text), Style.parse(style))
    console.print(Segments([segment]), end="", soft_wrap=True)


def read_prompt(target: Target, text: str, images: list[str]) -> ImagePrompt:
    """The prompt's ids, and the inputs of the images in these files. UserError for a target that reads text only."""
    if not images:
        return ImagePrompt(encode_prompt(target.tokenizer, text), {})
    if not target.runner.takes_images:
        raise UserError(
            f"target {target.name!r} reads text only: leave --image out, or choose a vision-language target"
        )
    processor = with_template(load_processor(target.name, target.revision), target.template)
    return encode_image_prompt(processor, text, images)


def main(s: GenerateConfig) -> None:
    run_placed(s.placement, partial(generate, s))


def generate(s: GenerateConfig) -> None:
    """Decodes the prompt and prints the text as it is generated. UserError for a missing prompt."""
    if s.prompt and s.prompt_file:
        raise UserError("give --prompt or --prompt_file, not both")
    if s.prompt_file:
        s.prompt = read_text(s.prompt_file)
    if s.prompt_file and not s.prompt:
        raise UserError(f"{s.prompt_file} is empty: write the prompt into it")
    if not s.prompt:
        raise UserError("give --prompt TEXT or --prompt_file FILE")
    if (s.swift != SwiftConfig() or s.state) and s.draft != "swift":
        raise UserError("swift and state are settings of --draft swift")
    loaded = load_target(s.placement, s.target, s.device, s.dtype, s.revision)
    target = use_template(loaded, s.template, [s.draft])
    check_draft_length(target, s.k)
    draft = (
        open_search(target, s.swift, s.state)
        if s.draft == "swift"
        else pick_draft(s.draft, target, s.draft_dtype or s.dtype)
    )
    if s.lookup:
        draft = add_lookup(draft, s.lookup, s.min_match, target)
    if s.adaptive:
        draft = make_adaptive(draft, AdaptiveConfig(s.adaptive, s.confidence))
    if s.mirror.exit_layer:
        draft = make_mirror(draft, s.mirror, target)
    matcher = build_matcher(ConstraintConfig(s.json_schema, s.regex, s.grammar), target)
    paths = [s.image] if isinstance(s.image, str) else s.image
    prompt = read_prompt(target, s.prompt, [path for path in paths if path])
    ids = prompt.ids
    console = Console()
    # An encoder-decoder's answer does not continue the prompt.
    stream = TextStream(target.tokenizer, () if target.is_encoder_decoder else ids)
    answer = LabelledText(stream)
    output = DecodeRecord(ids)
    start = time.perf_counter()
    for record in speculate(
        target,
        draft,
        [ids],
        k=s.k,
        sampling=s.sampling,
        max_new_tokens=s.max_new_tokens,
        seed=s.seed,
        matchers=None if matcher is None else [matcher],
        images=[prompt.inputs] if prompt.inputs else None,
    ):
        # not before the first token: nothing is printed of what is refused
        if not output.output_ids:
            print_text(console, s.prompt + ("\n" if target.is_encoder_decoder else ""))
        add_record(output, record)
        # Without colour, as in a file, rejected tokens would look like text.
        for tokens, style in styled_spans(record, s.rejected and console.is_terminal):
            if style == REJECTED_STYLE:
                print_text(console, stream.preview(tokens), style)
                continue
            for text, own_style in answer.add(tokens, style):
                print_text(console, text, own_style)
    for text, own_style in answer.end():
        print_text(console, text, own_style)
    seconds = time.perf_counter() - start
    console.print()
    Console(stderr=True).print(summary_line(output, seconds), style="dim", highlight=False)


if __name__ == "__main__":
    run_command(main, GenerateConfig, __doc__)
