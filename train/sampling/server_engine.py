"""Answers of a server that speaks OpenAI's API, many requests at the same time.

Prompts are sent to /completions as token ids, so that the target's own template and tokenizer alone decide what the
model reads. Settings that change the distribution are always sent: a server's own top_k or penalty would sample another
one than was asked for.

A prompt whose request fails gets no row, so that the next start asks it again. A reply that cannot be used gives a row
without loss spans, so that it is not asked again.

Servers that list the sampled ids are believed if these ids decode to the text beside them. Otherwise the text is
tokenised again, and used only if that gives back the same text, and the same tokens' texts or at least as many tokens
as the server says. What is then skipped is no random part of the answers; and where a server only counts its tokens, a
text that was sampled in other pieces, equally many, is not noticed.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from decode.common.command import DeferredStop, stop
from decode.common.damage import warn
from decode.common.progress import ProgressBars
from decode.engine.records import DecodeRecord
from decode.serving.running.completions import (
    Completions,
    ForeignReplyError,
    MalformedReplyError,
    PromptFailedError,
    Server,
    open_client,
)
from train.data.conversations import Conversation
from train.data.prompt_pipeline import TargetTokenizer, TokenizedPrompt
from train.sampling.config import SampleConfig
from train.sampling.rows import ConversationState, ShardWriter, reply_seed

UNDECODABLE = "\ufffd"
"""What stands in a text for bytes that are no character."""


def generate_answers(
    s: SampleConfig,
    server: Server,
    reader: TargetTokenizer,
    prompts: Sequence[TokenizedPrompt],
    bars: ProgressBars,
) -> Counter[str]:
    """Asks the server for the replies to `prompts` and writes them as shards; {why prompts failed: how many}.

    UserError if the server is gone or refuses the key or the model. A signal ends it after finished rows are written.
    """
    with DeferredStop() as signals, ShardWriter(s, reader.identity) as writer:
        sampling = ServerSampling(s, server, reader, writer, bars, len(prompts))
        asyncio.run(sampling.answer_all(prompts, signals))
    if signals.received:
        stop(signals.received)
    return sampling.failures


class ServerSampling:
    """The conversations of one process, `concurrency` of them at a time."""

    def __init__(
        self,
        s: SampleConfig,
        server: Server,
        reader: TargetTokenizer,
        writer: ShardWriter,
        bars: ProgressBars,
        total: int,
    ):
        self.s, self.server, self.reader, self.writer = s, server, reader, writer
        self.bars, self.bar = bars, bars.add_task("answering", total=total, speed="")
        self.failures = Counter[str]()
        self.tokens, self.start = 0, time.perf_counter()
        # If the server lists token ids, log-probabilities are not needed.
        self.lists_ids = False

    async def answer_all(self, prompts: Sequence[TokenizedPrompt], signals: DeferredStop) -> None:
        """Ends when all prompts are done, after a signal, or with the first error that is no prompt's own."""
        waiting = iter(prompts)
        async with open_client(self.server.url) as http:
            server = Completions(http, self.server, self.s)
            workers = min(self.s.concurrency, len(prompts))
            tasks = {asyncio.create_task(self._work(server, waiting)) for _ in range(workers)}
            pending = tasks
            try:
                while pending and not signals.received:
                    done, pending = await asyncio.wait(
                        pending, timeout=0.2, return_when=asyncio.FIRST_EXCEPTION
                    )
                    for task in done:
                        task.result()
                    self.writer.keep_waiting()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, server: Completions, waiting: Iterator[TokenizedPrompt]) -> None:
        """Answers prompts that wait, one after the other, as long as there are any."""
        for prompt in waiting:
            state = ConversationState(prompt)
            try:
                await self._answer(server, state)
            except UnusableReplyError as error:
                unanswered = Conversation([state.prompt_ids()], [[]])
                self.writer.add(state.prompt, unanswered, str(error))
            except PromptFailedError as error:
                self.failures[error.reason] += 1
                if self.failures.total() <= 5:
                    warn(f"prompt {state.prompt.id} failed ({error})")
            speed = self.tokens / (time.perf_counter() - self.start)
            self.bars.update(self.bar, speed=f"{speed:,.0f} tokens/s")
            self.bars.advance(self.bar)

    async def _answer(self, server: Completions, state: ConversationState) -> None:
        """Generates one reply after the other and adds the row of the finished conversation."""
        continues = True
        while continues:
            prompt_ids = state.prompt_ids()
            limit = min(self.s.max_new_tokens, self.reader.context - len(prompt_ids))
            body = self._body(prompt_ids, limit, reply_seed(state.seed_key(), self.s.seed))
            read = partial(read_reply, prompt_ids=prompt_ids, limit=limit, reader=self.reader)
            reply: Reply = await server.request(body, read)
            self.lists_ids = reply.listed
            self.tokens += len(reply.ids)
            record = DecodeRecord(prompt_ids, reply.ids, finish_reason=reply.finish_reason)
            continues = state.add_reply(record, self.reader.context)
        self.writer.add(state.prompt, state.conversation(), state.finish_reason)

    def _body(self, prompt_ids: list[int], limit: int, seed: int) -> dict[str, Any]:
        """The request for one reply. Servers ignore fields that they do not know."""
        sampling = self.s.sampling
        return {
            "model": self.server.model,
            "prompt": prompt_ids,
            "max_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,  # all tokens
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            # llama.cpp has a name of its own for it, and further samplers that its command line may have set.
            "repeat_penalty": 1.0,
            "samplers": ["temperature", "top_k", "top_p"],
            "mirostat": 0,
            "dynatemp_range": 0.0,
            "seed": seed % 2**31,
            "stop_token_ids": sorted(self.reader.eos),
            "skip_special_tokens": False,
            "return_token_ids": True,
            **({} if self.lists_ids else {"logprobs": 1}),
        }


class UnusableReplyError(Exception):
    """A complete reply whose tokens are not known; `str` is a key of `rows.SKIPPED`."""


@dataclass(frozen=True)
class Reply:
    """A reply as the local engine would have given it: its ids up to the first EOS, which is kept."""

    ids: list[int]
    finish_reason: str
    """eos or length."""
    listed: bool
    """The server lists `token_ids`, so that log-probabilities are not needed for them."""


def read_reply(data: Any, prompt_ids: list[int], limit: int, reader: TargetTokenizer) -> Reply:
    """The reply in a response to /completions for `prompt_ids`, of at most `limit` tokens.

    MalformedReplyError, ForeignReplyError, or UnusableReplyError if the tokens or the end of the reply are not known.
    """
    choice = _only_choice(data)
    text, finish = choice["text"], choice["finish_reason"]
    if choice.get("prompt_token_ids") not in (None, prompt_ids):
        raise ForeignReplyError("the server read other prompt tokens than were sent")
    listed = _listed_ids(choice)
    if listed is None:
        ids = _ids_of_text(data, choice, reader)
    else:
        ids = _up_to_eos(listed, reader.eos)
        _check_text(ids, text, reader)
    if finish == "stop" and not (ids and ids[-1] in reader.eos):
        ids = [*ids, _end_token(choice.get("stop_reason"), reader)]
    if not 0 < len(ids) <= limit:
        raise MalformedReplyError(f"{len(ids)} tokens, but 1 to {limit} were asked")
    ended = ids[-1] in reader.eos
    return Reply(ids, "eos" if ended else "length", choice.get("token_ids") is not None)


def _only_choice(data: Any) -> dict[str, Any]:
    """The one choice of a response, with a text and a known end."""
    choices = data.get("choices") if isinstance(data, dict) else None
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        raise MalformedReplyError("no response with one choice")
    choice: dict[str, Any] = choices[0]
    text = choice.get("text")
    if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise MalformedReplyError("a choice without text, or with half a character in it")
    if choice.get("finish_reason") not in ("stop", "length"):
        raise MalformedReplyError(f"finish_reason {choice.get('finish_reason')!r:.40}")
    return choice


def _listed_ids(choice: dict[str, Any]) -> list[int] | None:
    """The ids of the sampled tokens: `token_ids`, or the `id` of each log-probability (llama.cpp)."""
    ids = choice.get("token_ids")
    if ids is None:
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        if not isinstance(content, list) or not all(
            isinstance(token, dict) and "id" in token for token in content
        ):
            return None
        ids = [token["id"] for token in content]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise MalformedReplyError("token ids that are no numbers")
    return ids


def _ids_of_text(
    data: dict[str, Any], choice: dict[str, Any], reader: TargetTokenizer
) -> list[int]:
    """The text tokenised again. UnusableReplyError if it is seen that other tokens were sampled.

    The texts of the sampled tokens prove that they were these. Their number alone does not: the same text may have been
    sampled in other pieces, equally many. Both may include an EOS token that is not part of the text.
    """
    text, extra = choice["text"], (0, 1) if choice["finish_reason"] == "stop" else (0,)
    fast = reader.tokenizer.is_fast
    encoded = reader.tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"] if fast else []
    logprobs, usage = choice.get("logprobs"), data.get("usage")
    sampled = logprobs.get("tokens") if isinstance(logprobs, dict) else None
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if isinstance(sampled, list):
        pieces = [_decode(reader, [token]) for token in ids]
        slices = [text[start:end] for start, end in offsets]  # with their spaces
        ends = [sampled[: len(sampled) - more] for more in extra]
        same = pieces in ends or slices in ends
    else:
        same = type(count) is not int or count - len(ids) in extra
    if UNDECODABLE in text or _decode(reader, ids) != text or not same:
        raise UnusableReplyError("skipped_round_trip")
    return _up_to_eos(ids, reader.eos)


def _check_text(ids: list[int], text: str, reader: TargetTokenizer) -> None:
    """ForeignReplyError unless the ids mean `text` in the target's tokenizer, with or without special tokens.

    White space and halves of characters are not compared: servers that decode token by token treat them in other ways.
    """
    body = ids[:-1] if ids and ids[-1] in reader.eos else ids
    if any(token >= len(reader.tokenizer) for token in body):
        raise ForeignReplyError("tokens that the target's tokenizer does not have")
    meanings = (_decode(reader, ids), _decode(reader, body), _decode(reader, body, True))
    if _letters(text) not in map(_letters, meanings):
        raise ForeignReplyError("the server's tokens mean other texts in the target's tokenizer")


def _end_token(stop_reason: Any, reader: TargetTokenizer) -> int:
    """The EOS token of a reply that ended without listing it: the one that the server names, else the tokenizer's own,
    else the only one. UnusableReplyError if something else ended the reply, or it is not known which one."""
    only = next(iter(reader.eos)) if len(reader.eos) == 1 else None
    own = reader.tokenizer.eos_token_id
    usual = own if own in reader.eos else only
    token = usual if stop_reason is None else stop_reason
    if type(token) is int and token in reader.eos:
        return token
    raise UnusableReplyError("skipped_end")


def _up_to_eos(ids: list[int], eos: frozenset[int]) -> list[int]:
    """The ids up to the first EOS, which is kept: sampling would have ended there."""
    end = next((i for i, token in enumerate(ids) if token in eos), len(ids))
    return ids[: end + 1]


def _decode(reader: TargetTokenizer, ids: list[int], skip_special: bool = False) -> str:
    spaces = {"clean_up_tokenization_spaces": False}
    return str(reader.tokenizer.decode(ids, skip_special_tokens=skip_special, **spaces))


def _letters(text: str) -> str:
    return "".join(text.replace(UNDECODABLE, "").split())
