"""One prompt continued: each token in the colour of its origin, while it is decoded and afterwards."""

import html
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.control import strip_control_codes
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from decode.checkpoints.draft_folder import trained_templates
from decode.common.chat.choice import with_template
from decode.common.errors import UserError
from decode.common.files import read_text
from decode.common.target_settings import ConstraintConfig
from decode.constraints.grammar import build_matcher
from decode.distributed.placement import load_target
from decode.drafts.base import Draft
from decode.drafts.registry import pick_draft
from decode.drafts.settings import DecodingSettings, GenerateConfig, LoadingSettings, SwiftConfig
from decode.drafts.swift import open_search
from decode.engine.composing import add_confidence, add_learning, add_lookup, make_mirror
from decode.engine.engine import speculate
from decode.engine.image_prompts import ImagePrompt, encode_image_prompt, load_processor
from decode.engine.modes import pick_mode
from decode.engine.records import DecodeRecord, RoundRecord, add_record
from decode.engine.request_checks import check_draft_length
from decode.engine.text_stream import LabelledText, TextStream, TraceSegment, split_by_origin
from decode.model.loading import Target, adopt_tokenizer, usual_dtype

ACCEPTED_STYLE, REJECTED_STYLE, TARGET_STYLE = "green", "red strike", "bold blue"
TRACE_STYLES = {"accepted": ACCEPTED_STYLE, "own": TARGET_STYLE}
TRACE_CSS = {"accepted": "background: #2ea04340", "own": "background: #1f6feb50; font-weight: 700"}
"""By the kind of a TraceSegment. Letters keep the page's colour: a notebook may be light or dark."""


@dataclass(frozen=True, repr=False)
class Answer:
    """What a prompt was continued with. It prints as the text, coloured in a terminal, and its figures; a notebook
    draws it."""

    prompt: str
    """As it was given; of token ids their text."""
    target: Target
    record: DecodeRecord
    """Token ids, and what each round drafted and accepted."""
    seconds: float
    """Of the whole answer, prefill included."""

    @property
    def text(self) -> str:
        """The answer without special tokens."""
        return "".join(segment.text for segment in self.segments)

    @property
    def tau(self) -> float | None:
        """Tokens per round after the first token, which prefill gives; None without a round."""
        rounds = len(self.record.rounds)
        return (self.record.output_tokens - 1) / rounds if rounds else None

    @property
    def summary(self) -> str:
        return summary_line(self.record, self.seconds)

    @property
    def segments(self) -> list[TraceSegment]:
        """The text by the origin of its tokens."""
        record, forced = self.record, self.record.forced or [0] * len(self.record.rounds)
        rounds = [(d + f, a + f) for (d, a), f in zip(record.rounds, forced, strict=True)]
        before = () if self.target.is_encoder_decoder else record.prompt_ids
        return split_by_origin(record.output_ids, rounds, self.target.tokenizer, before)

    def __repr__(self) -> str:
        styled = [(one.text, TRACE_STYLES[one.kind]) for one in self.segments]
        text = Text.assemble((self.prompt, "dim"), gap(self.target), *styled, f"\n{self.summary}")
        console = Console(soft_wrap=True, highlight=False)
        with console.capture() as shown:
            console.print(text)
        return shown.get().removesuffix("\n")

    def _repr_html_(self) -> str:
        parts = [f'<span style="opacity: .65">{html.escape(self.prompt + gap(self.target))}</span>']
        for one in self.segments:
            if one.rejected:
                parts.append(f'<sub style="color: #d1242f">−{one.rejected}</sub>')
            parts.append(f'<span style="{TRACE_CSS[one.kind]}">{html.escape(one.text)}</span>')
        legend = f"""<p style="opacity: .65"><span style="{TRACE_CSS["accepted"]}">drafted and accepted</span>
<span style="{TRACE_CSS["own"]}">from the target</span> −n: so many drafted tokens were rejected. {self.summary}</p>"""
        return f'<pre style="white-space: pre-wrap">{"".join(parts)}</pre>{legend}'


def gap(target: Target) -> str:
    """What stands between a prompt and its answer: a line break where the answer does not continue the prompt."""
    return "\n" if target.is_encoder_decoder else ""


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


def read_prompt(
    target: Target, prompt: str | Sequence[int], image: str | Sequence[str] = ""
) -> ImagePrompt:
    """The ids of a prompt, which may be given as such, and the inputs of the files `image`. UserError for images and a
    target that reads text only."""
    images = [path for path in ([image] if isinstance(image, str) else image) if path]
    if images and not target.runner.takes_images:
        raise UserError(
            f"target {target.name!r} reads text only: leave --image out, or choose a vision-language target"
        )
    if not isinstance(prompt, str):
        return ImagePrompt([*prompt], {})
    if not images:
        return ImagePrompt(target.chat.encode(prompt), {})
    processor = with_template(load_processor(target.name, target.revision), target.template)
    return encode_image_prompt(processor, prompt, images)


def open_target(s: LoadingSettings, drafts: Sequence[str] = ()) -> Target:
    """The target, whose chats are rendered as in the training of `drafts` where the settings do not say how."""
    adopt_tokenizer(s.target, s.tokenizer, s.revision)
    dtype = usual_dtype(s.target, s.device, s.revision) if s.dtype == "auto" else s.dtype
    target = load_target(s.placement, s.target, s.device, dtype, s.revision)
    return target.with_template(s.template, trained_templates(drafts))


def answer_prompt(
    target: Target,
    draft: Draft | None,
    text: str,
    prompt: ImagePrompt,
    s: DecodingSettings,
    show: Callable[[RoundRecord], None] | None = None,
) -> Answer:
    """The answer to the prompt, which shows as `text`; `show` gets each round once it was read. UserError for settings
    that target or draft do not allow."""
    if s.learn:
        draft = add_learning(draft, s.learn_rate, target)
    if s.lookup:
        draft = add_lookup(draft, s.lookup, s.min_match, target)
    if s.confidence:
        draft = add_confidence(draft, s.confidence)
    if s.mirror.exit_layer:
        draft = make_mirror(draft, s.mirror, target)
    matcher = build_matcher(ConstraintConfig(s.json_schema, s.regex, s.grammar), target)
    record = DecodeRecord(prompt.ids)
    start = time.perf_counter()
    for round_ in speculate(
        target,
        draft,
        [prompt.ids],
        k=s.k,
        sampling=s.sampling,
        mode=pick_mode("auto", target, [draft], "grammars" if matcher else "", compiles=False),
        max_new_tokens=s.max_new_tokens,
        seed=s.seed,
        matchers=None if matcher is None else [matcher],
        images=[prompt.inputs] if prompt.inputs else None,
    ):
        add_record(record, round_)
        if show is not None:
            show(round_)
    return Answer(text, target, record, time.perf_counter() - start)


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
    if (s.swift != SwiftConfig() or (s.state and not s.learn)) and s.draft != "swift":
        raise UserError("swift and state are settings of --draft swift, and state of --learn true")
    target = open_target(s, [s.draft])
    check_draft_length(target, s.k)
    if s.draft == "swift":
        draft: Draft | None = open_search(target, s.swift, s.state)
    else:
        draft = pick_draft(s.draft, target, s.draft_dtype or target.dtype or "float32")
    learning = add_learning(draft, s.learn_rate, target) if s.learn else None
    if learning is not None and s.state:
        learning.load(s.state)
    prompt = read_prompt(target, s.prompt, s.image)
    console = Console()
    # An encoder-decoder's answer does not continue the prompt.
    stream = TextStream(target.tokenizer, () if target.is_encoder_decoder else prompt.ids)
    text, unprinted = LabelledText(stream), [s.prompt + gap(target)]

    def show(record: RoundRecord) -> None:
        # not before the first token: nothing is printed of what is refused
        while unprinted:
            print_text(console, unprinted.pop())
        # Without colour, as in a file, rejected tokens would look like text.
        for tokens, style in styled_spans(record, s.rejected and console.is_terminal):
            if style == REJECTED_STYLE:
                print_text(console, stream.preview(tokens), style)
                continue
            for piece, own_style in text.add(tokens, style):
                print_text(console, piece, own_style)

    answer = answer_prompt(target, learning or draft, s.prompt, prompt, s, show)
    if learning is not None and s.state:
        learning.save(s.state)
    for piece, own_style in text.end():
        print_text(console, piece, own_style)
    console.print()
    Console(stderr=True).print(answer.summary, style="dim", highlight=False)
