"""What decode/generate.py does: one prompt is continued, and each token printed in the colour of its origin."""

import time

from rich.console import Console
from rich.control import strip_control_codes
from rich.segment import Segment, Segments
from rich.style import Style

from decode.checkpoints.draft_folder import trained_templates
from decode.common.chat.choice import with_template
from decode.common.errors import UserError
from decode.common.files import read_text
from decode.common.target_settings import ConstraintConfig
from decode.constraints.grammar import build_matcher
from decode.distributed.placement import load_target
from decode.drafts.registry import pick_draft
from decode.drafts.settings import GenerateConfig, SwiftConfig
from decode.drafts.swift import open_search
from decode.engine.composing import add_confidence, add_lookup, make_mirror
from decode.engine.engine import speculate
from decode.engine.image_prompts import ImagePrompt, encode_image_prompt, load_processor
from decode.engine.modes import pick_mode
from decode.engine.records import DecodeRecord, RoundRecord, add_record
from decode.engine.request_checks import check_draft_length
from decode.engine.text_stream import LabelledText, TextStream
from decode.model.loading import Target, adopt_tokenizer, usual_dtype

ACCEPTED_STYLE, REJECTED_STYLE, TARGET_STYLE = "green", "red strike", "bold blue"


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
        return ImagePrompt(target.chat.encode(text), {})
    if not target.runner.takes_images:
        raise UserError(
            f"target {target.name!r} reads text only: leave --image out, or choose a vision-language target"
        )
    processor = with_template(load_processor(target.name, target.revision), target.template)
    return encode_image_prompt(processor, text, images)


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
    adopt_tokenizer(s.target, s.tokenizer, s.revision)
    dtype = usual_dtype(s.target, s.device, s.revision) if s.dtype == "auto" else s.dtype
    loaded = load_target(s.placement, s.target, s.device, dtype, s.revision)
    target = loaded.with_template(s.template, trained_templates([s.draft]))
    check_draft_length(target, s.k)
    draft = (
        open_search(target, s.swift, s.state)
        if s.draft == "swift"
        else pick_draft(s.draft, target, s.draft_dtype or dtype)
    )
    if s.lookup:
        draft = add_lookup(draft, s.lookup, s.min_match, target)
    if s.confidence:
        draft = add_confidence(draft, s.confidence)
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
        mode=pick_mode("auto", target, [draft], "grammars" if matcher else "", compiles=False),
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
