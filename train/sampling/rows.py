"""A conversation while its replies are generated, and the rows and shards that finished ones become."""

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from decode.common.target_record import ModelFingerprint
from decode.engine.records import DecodeRecord
from train.data import sample_store
from train.data.conversations import Conversation, join_turns, skip_repeated_turn_end
from train.data.prompt_pipeline import TokenizedPrompt
from train.sampling.config import SampleConfig


def reply_seed(reply_id: str, seed: int) -> int:
    """The random seed of one reply, the same in every batch, process and attempt."""
    return int(hashlib.sha256(f"{seed}:{reply_id}".encode()).hexdigest()[:15], 16)


SKIPPED = ("skipped_round_trip", "skipped_end")
"""finish_reason of a row whose reply cannot be used: its text does not give back the tokens that were sampled, or the
token that ended it is unknown."""


class ConversationState:
    """A conversation while its replies are generated turn by turn."""

    def __init__(self, prompt: TokenizedPrompt):
        segments = list(prompt.conversation.prompt_segments)
        self.prompt, self.prompt_segments, self.pending_turns = prompt, segments[:1], segments[1:]
        self.replies: list[list[int]] = []
        self.finish_reason = ""

    def prompt_ids(self) -> list[int]:
        """All token ids before the next reply: prompt segments and replies so far."""
        return [*join_turns(self.prompt_segments, self.replies)[0], *self.prompt_segments[-1]]

    def add_reply(self, output: DecodeRecord, context: int) -> bool:
        """Appends a generated reply; True if another reply follows.

        A chat ends early after a reply that did not end with EOS, or when the next turn does not fit the context.
        """
        self.replies.append(output.output_ids)
        self.finish_reason = output.finish_reason
        if not self.pending_turns or output.finish_reason != "eos":
            return False
        self.prompt_segments.append(
            skip_repeated_turn_end(output.output_ids, self.pending_turns.pop(0))
        )
        if len(self.prompt_ids()) < context:
            return True
        self.prompt_segments.pop()
        return False

    def seed_key(self) -> str:
        """The id of the next reply, from which its random seed is made."""
        return f"{self.prompt.id}/{len(self.replies)}" if self.replies else self.prompt.id

    def conversation(self) -> Conversation:
        return Conversation(self.prompt_segments, self.replies)


KEEP_SECONDS = 60.0
"""How long a finished row may wait for its shard to be full."""


class ShardWriter:
    """Collects finished rows and writes a shard whenever `shard_rows` of them are there, or the first has waited for
    KEEP_SECONDS.

    As a context manager it writes the rest at the end, also when the command is stopped.
    """

    def __init__(self, s: SampleConfig, target: ModelFingerprint | None = None):
        self.s, self.target = s, target
        self.rows: list[sample_store.SampleRow] = []
        self.first_at = 0.0
        """When the first of the `rows` was finished."""

    def add(self, prompt: TokenizedPrompt, conversation: Conversation, finish_reason: str) -> None:
        self.first_at = self.first_at if self.rows else time.monotonic()
        self.rows.append(make_row(self.s, prompt, conversation, finish_reason))
        if len(self.rows) >= self.s.shard_rows:
            self.__exit__()

    def keep_waiting(self) -> None:
        """Writes the rows that have waited long enough. To be called again and again while others are answered."""
        if self.rows and time.monotonic() - self.first_at >= KEEP_SECONDS:
            self.__exit__()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        if self.rows:
            # the shard of these very ids is there if a signal came after it was written
            with contextlib.suppress(FileExistsError):
                sample_store.write_shard(Path(self.s.out), self.rows, target=self.target)
        self.rows = []


def up_to_image_token(reply: Sequence[int], placeholders: Collection[int]) -> Sequence[int]:
    """A reply up to where the target writes the token of an image, which no image stands behind."""
    return list(itertools.takewhile(lambda token: token not in placeholders, reply))


def make_row(
    s: SampleConfig, prompt: TokenizedPrompt, conversation: Conversation, finish_reason: str
) -> sample_store.SampleRow:
    """A finished conversation as a row of the sampled set; replies that are too short get no loss spans."""
    replies = conversation.replies
    if prompt.images:
        placeholders = {conversation.prompt_segments[0][start] for start, _ in prompt.image_spans}
        replies = [up_to_image_token(reply, placeholders) for reply in replies]
        if sum(map(len, replies)) < sum(map(len, conversation.replies)):
            finish_reason = "length"
    ids, spans = join_turns(conversation.prompt_segments, replies)
    long_enough = sum(map(len, replies)) >= s.filters.min_answer
    row: sample_store.SampleRow = {
        "id": prompt.id,
        "source": prompt.source,
        "origin": s.origin,
        "input_ids": ids,
        "loss_spans": spans if long_enough else [],
        "finish_reason": finish_reason or "text",
    }
    if prompt.arguments:
        row["chat_template_kwargs"] = json.dumps(prompt.arguments, ensure_ascii=False)
    if prompt.shared:
        row["shared_prefix"] = prompt.shared
    if prompt.images:
        row["images"], row["image_spans"] = list(prompt.images), prompt.image_spans
    return row
