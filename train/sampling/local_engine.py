"""Answers of this project's own engine, with the target loaded in each process."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from decode.common.damage import warn
from decode.common.errors import NotFiniteError, UserError
from decode.common.progress import ProgressBars
from decode.engine.engine import SpeculativeEngine
from decode.engine.records import DecodeRecord, add_record
from eval.tasks.images import FOLDER, PromptImages
from train.data import sample_store
from train.data.prompt_pipeline import TargetTokenizer, TokenizedPrompt
from train.sampling.config import SampleConfig
from train.sampling.rows import ConversationState, ShardWriter, reply_seed

NOT_FINITE = "NaN or infinite logits"
GROUP_BATCHES = 64
"""Batches in a group of one-turn prompts. Memory holds the answers of one group as lists; at its end rows run empty,
which takes 1 % or 2 % more steps than one stream of all prompts."""


def generate_answers(
    s: SampleConfig,
    engine: SpeculativeEngine,
    reader: TargetTokenizer,
    prompts: Sequence[TokenizedPrompt],
    bars: ProgressBars,
) -> Counter[str]:
    """Generates the replies to `prompts` and writes them as shards of the target that `reader` identifies. Images are
    those that are stored in `out` already.

    Returns {why prompts failed: how many}. A prompt for which the target gives NaN fails alone: the other prompts that
    were being decoded begin again, with the same answers. UserError if more than `max_bad_rows` of all prompts, and
    more than one, fail.

    Groups of prompts are decoded one after the other, each in one stream in which finished rows are refilled. In a
    group all first turns are decoded before all second ones.
    """
    bar = bars.add_task("answering", total=len(prompts), speed="")
    tokens, start = 0, time.perf_counter()
    failures = Counter[str]()
    with ShardWriter(s, reader.identity) as writer:
        for group in group_by_turns(prompts, GROUP_BATCHES * s.batch_size, s.shard_rows):
            waiting = [ConversationState(prompt) for prompt in group]
            while waiting:
                states, continued = dict(enumerate(waiting)), {}
                outputs = {i: DecodeRecord(state.prompt_ids()) for i, state in states.items()}
                images = [stored_images(s, state, reader) for state in states.values()]
                waiting = []
                try:
                    for record in engine.speculate(
                        [output.prompt_ids for output in outputs.values()],
                        rows=s.batch_size,
                        max_new_tokens=s.max_new_tokens,
                        seeds=[reply_seed(state.seed_key(), s.seed) for state in states.values()],
                        images=images if any(one is not None for one in images) else None,
                    ):
                        add_record(outputs[record.prompt], record)
                        tokens += len(record.tokens)
                        speed = tokens / (time.perf_counter() - start)
                        bars.update(bar, speed=f"{speed:,.0f} tokens/s")
                        writer.keep_waiting()
                        if record.finished is None:
                            continue
                        state, output = states.pop(record.prompt), outputs.pop(record.prompt)
                        if state.add_reply(output, engine.target.runner.context):
                            continued[record.prompt] = state
                            continue
                        writer.add(state.prompt, state.conversation(), state.finish_reason)
                        bars.advance(bar)
                except NotFiniteError as error:
                    if error.prompt is None:  # the draft's fault is of no single prompt
                        raise
                    failed = states.pop(error.prompt).prompt
                    failures[NOT_FINITE] += 1
                    if (number := failures[NOT_FINITE]) <= 3:
                        warn(
                            f"prompt {failed.id} of {failed.source} failed: target {engine.target.name!r} in {s.dtype} "
                            "gives NaN or infinite logits"
                        )
                    known = len(prompts) + len(sample_store.row_ends(Path(s.out)))
                    if number > max(1, s.max_bad_rows * known):
                        said = f"{number} prompts failed, the last one of {failed.source}"
                        raise UserError(f"{said}: {error}") from error
                    bars.advance(bar)
                    waiting = list(states.values())
                waiting += [continued[i] for i in sorted(continued)]
    return failures


def stored_images(
    s: SampleConfig, state: ConversationState, reader: TargetTokenizer
) -> PromptImages | None:
    """The images of a conversation's next prompt; None if it has none."""
    paths = [str(Path(s.out, FOLDER, name)) for name in state.prompt.images]
    return PromptImages(reader.images, state.prompt_ids(), paths) if paths else None


def group_by_turns(
    prompts: Sequence[TokenizedPrompt], one_turn: int, several_turns: int
) -> list[Sequence[TokenizedPrompt]]:
    """One-turn conversations in groups of `one_turn`, then those of several turns in groups of `several_turns`.

    They are sorted by turns and by length of the first prompt, so that rows decoded together have similar lengths and
    buffers stay short.
    """

    def order(prompt: TokenizedPrompt) -> tuple[int, int, str]:
        segments = prompt.conversation.prompt_segments
        return len(segments), len(segments[0]), prompt.id

    ordered = sorted(prompts, key=order)
    singles = sum(len(prompt.conversation.prompt_segments) == 1 for prompt in prompts)
    starts = [*range(0, singles, one_turn), *range(singles, len(ordered), several_turns)]
    return [ordered[start:end] for start, end in itertools.pairwise([*starts, len(ordered)])]
