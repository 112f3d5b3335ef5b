"""Sampling: the prompts of a run get answers, from our engine or a server, and a manifest."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console

from decode.common import damage, provenance, run_dir
from decode.common.errors import UserError
from decode.common.progress import ProgressBars, progress_bars
from decode.common.target_record import ModelFingerprint, difference
from decode.distributed.placement import load_target, run_placed
from decode.drafts.base import check_request
from decode.drafts.registry import pick_draft
from decode.engine.engine import SpeculativeEngine
from decode.engine.request_checks import check_draft_length
from decode.model.loading import (
    adopt_tokenizer,
    model_fingerprint,
    model_folder,
    unfollowed_settings,
)
from decode.model.names import recorded_name
from decode.serving.running import completions, vllm_client
from eval.reporting.formatting import Table, table_html, table_text
from train.data import manifest, sample_store
from train.data.conversations import join_turns
from train.data.prompt_pipeline import (
    TargetTokenizer,
    TokenizedPrompt,
    load_prompts,
    load_target_tokenizer,
)
from train.data.sources import ReadLog
from train.sampling import local_engine, server_engine
from train.sampling.config import SampleConfig
from train.sampling.engine_choice import (
    VLLM_DTYPE,
    check_engine,
    copies_of_target,
    settle_engine,
)
from train.sampling.rows import SKIPPED, ShardWriter
from train.trainer import collective

COMMAND = "train/sample.py"
OWNED_FILES = ("manifest.json", "shards/*.parquet", "images/*")
PLAIN_TOKENS, CHAT_TOKENS, THINKING_TOKENS = 256, 1024, 2048
THOUGHTS = ("<think>", "enable_thinking", "reasoning_content", "<|channel|>")
"""What a chat template has that writes thoughts before an answer."""
COMPARED_TEXTS = 64
"""Rows of texts of which it is asked, when a set goes on, whether they have the same tokens now."""
Engine = Callable[[Sequence[TokenizedPrompt], ProgressBars], Counter[str]]
"""Writes rows for prompts; returns {why prompts failed: how many}."""


@dataclass(frozen=True, repr=False)
class SampledSet:
    """A set that train/distill.py reads. It prints as the table of its counts, and so a notebook draws it."""

    folder: str
    counts: dict[str, int]
    """Of prompts: asked = answered + failed + answers_too_short + skipped, then those that were dropped before."""
    too_long: int
    """Prompts of this start that do not fit the context."""
    failures: dict[str, int]
    """Why prompts of this start failed."""
    served: bool
    """A server answered."""

    @property
    def table(self) -> Table:
        rows = [[name, f"{number:,}"] for name, number in self.counts.items()]
        return Table(self.folder, [self.folder, "prompts"], rows)

    def __repr__(self) -> str:
        return table_text(self.table)

    def _repr_html_(self) -> str:
        return table_html(self.table)


def write_texts(
    s: SampleConfig, texts: Sequence[TokenizedPrompt], bars: ProgressBars
) -> Counter[str]:
    """Writes tokenised texts and chats as shards, without generating anything."""
    bar = bars.add_task("writing", total=len(texts), speed="")
    with ShardWriter(s) as writer:
        for text in texts:
            writer.add(text, text.conversation, "")
            bars.advance(bar)
    return Counter()


def write_manifest(
    s: SampleConfig,
    reader: TargetTokenizer,
    counts: dict[str, int],
) -> None:
    sampling = {**asdict(s.sampling), "max_new_tokens": s.max_new_tokens}
    name, commit = recorded_name(reader.name)
    made = manifest.Manifest(
        target=name,
        revision=reader.revision or commit,
        tokenizer_hash=reader.fingerprint,
        chat_template_hash=reader.chat.hash,
        sampling=sampling if s.origin == "target" else {},
        seed=s.seed,
        counts=counts,
        git_sha=provenance.git_sha(),
        versions=provenance.versions(),
        engine=s.engine,
        encoder_decoder=reader.encoder_decoder,
        template=reader.template,
        row_templates=manifest.count_arguments(sample_store.row_arguments(Path(s.out))),
    )
    manifest.write_manifest(Path(s.out), made)


def unanswered_prompts(
    s: SampleConfig,
    state: PartialState,
    reader: TargetTokenizer,
    prompts: Sequence[TokenizedPrompt],
) -> list[TokenizedPrompt]:
    """The prompts that have no row in `out` yet. Every rank must call it.

    UserError if answers in `out` are of another target than those that are to come, or texts there have other tokens
    than they would get now, unless `allow_changed`.
    """
    out = Path(s.out)
    with collective.raise_on_all_ranks(state):
        if state.is_main_process:
            for then in sample_store.targets_in(out) if reader.identity else []:
                if then is None:
                    said = "name no target: whether it was this one is not checked"
                    damage.warn(f"shards in {s.out} {said}")
                elif found := difference(then, reader.identity or then):
                    what = f"the answers in {s.out} are of another target ({found})"
                    run_dir.refuse_change(what, s.allow_changed)
            sample_store.remove_partial(out)
            manifest.set_damaged_aside(out, {prompt.id for prompt in prompts})
            if s.origin == "text" and otherwise_tokenised(out, prompts):
                what = f"texts in {s.out} have other tokens than now: tokenizer or chat template is another"
                run_dir.refuse_change(what, s.allow_changed)
    done = sample_store.row_ends(out)
    state.wait_for_everyone()  # no rank writes a shard before every rank has read which prompts are done
    return [prompt for prompt in prompts if prompt.id not in done]


def otherwise_tokenised(out: Path, texts: Sequence[TokenizedPrompt]) -> bool:
    """Whether a text's row, among those of the first rows that are there, holds other tokens than the text has."""
    if not sample_store.shard_paths(out):
        return False
    now = {text.id: text.conversation for text in texts}
    rows = itertools.islice(sample_store.read_shards(out), COMPARED_TEXTS)
    held = [(row["input_ids"], now[row["id"]]) for row in rows if row["id"] in now]
    return not all(
        np.array_equal(ids, join_turns(text.prompt_segments, text.replies)[0]) for ids, text in held
    )


def count_answers(
    s: SampleConfig,
    prompts: Sequence[TokenizedPrompt],
    dropped: dict[str, int],
    failures: Counter[str],
) -> dict[str, int]:
    """The manifest's counts: asked = answered + failed + answers_too_short + skipped, and why prompts were dropped.

    Rows of prompts that earlier starts asked, and this one does not, count as well: the set has them.
    Only a server's answers can be skipped; their counts also say why. UserError if it has given no usable answer at
    all: then something is wrong with all of them.
    """
    ends = sample_store.row_ends(Path(s.out))
    asked = ends.keys() | {prompt.id for prompt in prompts}
    answered = sum(supervised for supervised, _ in ends.values())
    ended = Counter(reason for _, reason in ends.values())
    skipped = {reason: ended[reason] for reason in SKIPPED} if s.served else {}
    total = {"skipped": sum(skipped.values())} if s.served else {}
    if s.served and answered == 0:
        reasons = failures + Counter(skipped)
        why = ", ".join(f"{reason}: {count}" for reason, count in reasons.items())
        raise UserError(
            f"the server at {s.url or 'a port of this machine'} answered none of {len(asked)} prompts so that "
            f"training could use it ({why or 'all are too short or too long'})"
        )
    return {
        "asked": len(asked),
        "answered": answered,
        "failed": len(asked) - len(ends),
        "answers_too_short": len(ends) - answered - sum(skipped.values()),
        **skipped,
        **total,
        **dropped,
    }


def load_engine(
    s: SampleConfig, state: PartialState, reader: TargetTokenizer
) -> tuple[TargetTokenizer, Engine]:
    """(the target's tokenizer with what is known of what answers, what writes the rows)."""
    if s.origin == "text":
        return reader, partial(write_texts, s)
    if s.served:
        with collective.raise_on_all_ranks(state):
            server = replace(completions.connect(s), own=s.engine == "vllm")
        # Weights behind a server are known only where it was started for this run.
        identity = ModelFingerprint(served_as=server.model)
        if s.engine == "vllm":
            folder = model_folder(s.target, "target", s.revision)
            identity = model_fingerprint(folder, s.revision, VLLM_DTYPE + s.dtype)
        identity = replace(identity, chat_template=reader.chat.hash)
        context = min(reader.context, server.context or reader.context)
        reader = replace(reader, context=context, identity=identity)
        return reader, partial(server_engine.generate_answers, s, server, reader)
    device = str(state.device) if s.device == "auto" else s.device
    target = load_target(s.placement, s.target, device, s.dtype, s.revision)
    check_draft_length(target, s.k)
    draft = pick_draft(s.draft, target, dtype=s.dtype)
    if draft is not None:
        check_request(draft, s.k, s.sampling)
    engine = SpeculativeEngine(target, draft, k=s.k, sampling=s.sampling, mode=s.mode)
    identity = replace(target.identity, chat_template=reader.chat.hash)
    context, embedded = target.runner.context, target.runner.embedding_rows
    reader = replace(reader, context=context, eos=target.eos, identity=identity, embedded=embedded)
    return reader, partial(local_engine.generate_answers, s, engine, reader)


def load_reader(s: SampleConfig) -> TargetTokenizer:
    adopt_tokenizer(s.target, s.tokenizer, s.revision)
    return load_target_tokenizer(s.target, s.revision).with_template(s.template)


def usual_answer_length(reader: TargetTokenizer) -> int:
    """Tokens of the longest answer where the settings do not say it."""
    template = str(reader.tokenizer.chat_template or "")
    if not template:
        return PLAIN_TOKENS
    thinks = reader.template.get("enable_thinking", True) and any(x in template for x in THOUGHTS)
    return THINKING_TOKENS if thinks else CHAT_TOKENS


def answer(s: SampleConfig) -> SampledSet | None:
    """Answers the prompts, or writes texts as they stand. None in a process of several that is not the first."""
    s = settle_engine(s)
    check_engine(s)
    reader = load_reader(s)  # UserError for a template before weights are read or a server starts
    if not s.max_new_tokens and s.origin == "target":
        s = replace(s, max_new_tokens=usual_answer_length(reader))
    return run_placed(s.placement, partial(sample, s, reader))


def sample(s: SampleConfig, reader: TargetTokenizer) -> SampledSet | None:
    """Answers the prompts, or goes on where an earlier start stopped."""
    state = collective.join_processes()
    with ExitStack() as server:
        if s.engine == "vllm":
            url, copies = "", copies_of_target(s, state.num_processes)
            copied = ["--data-parallel-size", str(copies)] if copies > 1 else []
            with collective.raise_on_all_ranks(state):
                if state.is_main_process:
                    Console(stderr=True).print(f"vLLM starts to serve {s.target}")
                    started = vllm_client.target_server(
                        s.vllm_python,
                        s.target,
                        s.revision,
                        s.dtype,
                        rows=s.concurrency * state.num_processes // copies,
                        arguments=[*s.vllm_args, *copied],
                        seconds=s.start_timeout,
                    )
                    url = server.enter_context(started)
            at = replace(s, url=collective.broadcast(url))
            written = write_answers(s, state, *load_engine(at, state, reader))
            state.wait_for_everyone()  # the server ends with the main process's block
            return written
    return write_answers(s, state, *load_engine(s, state, reader))


def warn_of_unfollowed_settings(s: SampleConfig) -> None:
    """One line on stderr about what the target's generation_config.json says otherwise than this run."""
    followed = {**asdict(s.sampling), "max_new_tokens": s.max_new_tokens}
    if found := unfollowed_settings(s.target, s.revision, followed):
        named = (f"{k} {v}" if isinstance(v, int | float | str) else k for k, v in found.items())
        damage.warn(
            f"{s.target}: answers do not follow what its generation_config.json asks for ({', '.join(named)}): "
            "--sampling and --max_new_tokens alone say how they are drawn"
        )


def write_answers(
    s: SampleConfig, state: PartialState, reader: TargetTokenizer, engine: Engine
) -> SampledSet | None:
    """Lets the engine answer the prompts that have no row in `out` yet, and writes the manifest."""
    if s.origin == "target" and state.is_main_process:
        warn_of_unfollowed_settings(s)
    log = ReadLog(max_bad_rows=s.max_bad_rows)
    prompts, dropped = load_prompts(s, reader, log)
    longest = reader.context - (s.origin == "target")  # an answer needs room for one token
    fitting = [prompt for prompt in prompts if 0 < prompt.tokens() <= longest]
    if len(fitting) == 0:
        raise UserError(
            f"no prompt fits the context of {reader.name}, which holds {reader.context} tokens"
        )
    images = {name for prompt in fitting for name in prompt.images}
    if images and s.served:
        raise UserError(
            f"the prompts hold images, and servers are sent tokens: --engine draftsmith in place of {s.engine}"
        )
    evaluation = [s.decontaminate] if isinstance(s.decontaminate, str) else s.decontaminate
    reads = [s.target, s.draft, *evaluation, *(source.path for source in s.sources)]
    console = Console(stderr=True, quiet=not state.is_main_process)
    with collective.open_run(state, s, COMMAND, OWNED_FILES, reads):
        todo = unanswered_prompts(s, state, reader, fitting)
        for line in log.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"{len(prompts)} prompts ({dropped['dropped_as_evaluation']} dropped as evaluation prompts), "
            f"{len(todo)} to answer"
        )
        with collective.raise_on_all_ranks(state):
            if state.is_main_process and log.images is not None:
                log.images.store(Path(s.out), images)
        with (
            collective.raise_on_all_ranks(state),
            progress_bars(console, ("speed",), disable=not state.is_main_process) as bars,
        ):
            failures = engine(todo[state.process_index :: state.num_processes], bars)
        failures = sum(gather_object([failures]), Counter[str]())
        if not state.is_main_process:
            return None
        counts = count_answers(s, prompts, dropped, failures)
        write_manifest(s, reader, counts)
        too_long = len(prompts) - len(fitting)
        console.print(
            f"{counts['answered']} answered, {counts['failed']} failed ({too_long} too long for the context), "
            f"{counts['answers_too_short']} with too short an answer: {s.out}"
        )
        if s.engine == "openai" and reader.identity is not None:
            name = reader.identity.served_as
            console.print(f"which weights the server calls {name} is not known: the set names none")
    return SampledSet(s.out, counts, too_long, failures, s.served)
