"""Answers of a server that speaks OpenAI's API, many requests at the same time.

Prompts are sent to /completions as token ids, so that the target's own template and tokenizer alone decide what the
model reads. Settings that change the distribution are always sent: a server's own top_k or penalty would sample another
one than was asked for.

A prompt whose request fails gets no row, so that the next start asks it again. A reply that cannot be used gives a row
without loss spans, so that it is not asked again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from decode.common.command import DeferredStop, stop
from decode.common.damage import warn
from decode.common.progress import ProgressBars
from decode.engine.records import DecodeRecord
from decode.serving.running.completions import Completions, PromptFailedError, Server, open_client
from train.data.conversations import Conversation
from train.data.prompt_pipeline import TargetTokenizer, TokenizedPrompt
from train.sampling.config import SampleConfig
from train.sampling.rows import ConversationState, ShardWriter, reply_seed
from train.sampling.server_answers import Reply, UnusableReplyError, read_reply

WARNINGS = 5
"""Failed prompts that get a line of their own."""


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
        async with open_client() as http:
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
                if self.failures.total() <= WARNINGS:
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
