"""Answers of this project's own engine, with the target loaded in each process."""

import time
from collections import Counter
from collections.abc import Sequence

from decode.common.progress import ProgressBars
from decode.drafts.base import Draft
from decode.engine.engine import speculate
from decode.engine.records import DecodeRecord, add_record
from decode.model.loading import Target
from train.data.prompt_pipeline import TokenizedPrompt
from train.sampling.config import SampleConfig
from train.sampling.rows import ConversationState, ShardWriter, reply_seed


def generate_answers(
    s: SampleConfig,
    target: Target,
    draft: Draft | None,
    prompts: Sequence[TokenizedPrompt],
    bars: ProgressBars,
) -> Counter[str]:
    """Generates the replies to `prompts` and writes them as shards; no prompt fails.

    Conversations of one turn are decoded first, in one stream in which finished rows are refilled. Those of several
    turns follow in groups of `shard_rows`; in a group all first turns are decoded before all second ones.
    """
    bar = bars.add_task("answering", total=len(prompts), speed="")
    tokens, start = 0, time.perf_counter()
    with ShardWriter(s) as writer:
        for group in group_by_turns(prompts, s.shard_rows):
            states = [ConversationState(prompt.prompt, prompt.conversation) for prompt in group]
            while states:
                outputs, continued = [DecodeRecord(state.prompt_ids()) for state in states], []
                for record in speculate(
                    target,
                    draft,
                    [output.prompt_ids for output in outputs],
                    k=s.k,
                    rows=s.batch_size,
                    sampling=s.sampling,
                    max_new_tokens=s.max_new_tokens,
                    seeds=[reply_seed(state.seed_key(), s.seed) for state in states],
                ):
                    state, output = states[record.prompt], outputs[record.prompt]
                    add_record(output, record)
                    tokens += len(record.tokens)
                    if record.finished is None:
                        continue
                    if state.add_reply(output, target.decoder.context):
                        continued.append(record.prompt)
                        continue
                    writer.add(state.prompt, state.conversation(), state.finish_reason)
                    speed = tokens / (time.perf_counter() - start)
                    bars.update(bar, speed=f"{speed:,.0f} tokens/s")
                    bars.advance(bar)
                states = [states[i] for i in sorted(continued)]
    return Counter()


def group_by_turns(
    prompts: Sequence[TokenizedPrompt], size: int
) -> list[Sequence[TokenizedPrompt]]:
    """All one-turn conversations, then those of several turns in groups of `size`.

    They are sorted by turns and by length of the first prompt, so that rows decoded together have similar lengths and
    buffers stay short.
    """

    def order(prompt: TokenizedPrompt) -> tuple[int, int, str]:
        segments = prompt.conversation.prompt_segments
        return len(segments), len(segments[0]), prompt.prompt.id

    ordered = sorted(prompts, key=order)
    single = [p for p in ordered if len(p.conversation.prompt_segments) == 1]
    several = ordered[len(single) :]
    groups = [several[i : i + size] for i in range(0, len(several), size)]
    return [group for group in (single, *groups) if group]
