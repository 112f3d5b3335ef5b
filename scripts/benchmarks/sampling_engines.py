"""Engines that sample answers to prompts, for sample_bench.py: this project's and two of transformers.

Each takes token ids, decodes `rows` prompts at once at temperature 1 without top-k or top-p, and returns the answers in
the order of the prompts. An answer ends with its first EOS or at the limit; what an engine returns behind the EOS is
padding, which `answer_length` does not count.
"""

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from decode.common.errors import UserError
from decode.engine.engine import SpeculativeEngine, row_seeds
from decode.engine.records import collect_outputs
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams

PREFILL_TOKENS = 512
"""Tokens of one pass of transformers' continuous batching, which attends from each of them to those of all rows."""
PAGE = 256
"""Tokens of a page of its cache, as in its default configuration."""


@dataclass(frozen=True)
class SampledAnswers:
    """Answers in the order of the prompts, and the seconds that all of them took together."""

    ids: list[list[int]]
    seconds: float


class SamplingEngine(Protocol):
    """What sample_bench.py compares."""

    def sample(
        self, prompts: Sequence[list[int]], max_new_tokens: int, seed: int
    ) -> SampledAnswers:
        """An answer of at most `max_new_tokens` tokens to each prompt."""

    def close(self) -> None:
        """Frees what the engine holds besides the model."""


def answer_length(ids: Sequence[int], eos: Collection[int], limit: int) -> int:
    """Generated tokens of an answer: those up to its first EOS, which counts, and `limit` at most."""
    ends = (at for at, token in enumerate(ids[:limit], 1) if token in eos)
    return next(ends, min(len(ids), limit))


class RefillingSampler:
    """This project's engine as train/sample.py runs it: a row that is done takes the next prompt."""

    def __init__(self, target: Target, rows: int, mode: str = "eager"):
        self.rows = rows
        sampling = SamplingParams(temperature=1.0)
        self.engine = SpeculativeEngine(target, None, k=1, sampling=sampling, mode=mode)

    def sample(
        self, prompts: Sequence[list[int]], max_new_tokens: int, seed: int
    ) -> SampledAnswers:
        start = time.perf_counter()
        records = self.engine.speculate(
            list(prompts),
            rows=self.rows,
            max_new_tokens=max_new_tokens,
            seeds=row_seeds(seed, len(prompts)),
        )
        outputs = collect_outputs(prompts, records)
        return SampledAnswers([out.output_ids for out in outputs], time.perf_counter() - start)

    def close(self) -> None: ...


def sampling_config(eos: Sequence[int], max_new_tokens: int) -> GenerationConfig:
    """Plain sampling at temperature 1, as transformers' generate takes it."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=eos[0] if eos else 0,
    )


def pad_left(prompts: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention mask), both [B, T]: each prompt at the end of its row."""
    width = max(map(len, prompts))
    ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


class PaddedSampler:
    """transformers' generate: `rows` prompts after `rows` prompts, each batch until its longest answer is done.

    `model` gets a generation config without settings of its own, which would be mixed into those of a call.
    """

    def __init__(self, model: Any, eos: Sequence[int], rows: int):
        self.model, self.eos, self.rows = model, eos, rows
        model.generation_config = GenerationConfig()

    def sample(
        self, prompts: Sequence[list[int]], max_new_tokens: int, seed: int
    ) -> SampledAnswers:
        start = time.perf_counter()
        torch.manual_seed(seed)
        config = sampling_config(self.eos, max_new_tokens)
        answers = []
        for first in range(0, len(prompts), self.rows):
            ids, mask = pad_left(prompts[first : first + self.rows], config.pad_token_id)
            out = self.model.generate(ids, attention_mask=mask, generation_config=config)
            for row in out[:, ids.shape[1] :].tolist():
                answers.append(row[: answer_length(row, self.eos, max_new_tokens)])
        return SampledAnswers(answers, time.perf_counter() - start)

    def close(self) -> None: ...


class ContinuousSampler:
    """transformers' generate_batch: continuous batching with a paged cache, which has room for all rows.

    `model` gets a generation config without settings of its own. `longest` is the number of tokens of the longest
    prompt with its answer. The cache is allocated at the first call and kept.
    """

    def __init__(self, model: Any, eos: Sequence[int], rows: int, longest: int, seed: int):
        self.model, self.eos = model, eos
        model.generation_config = GenerationConfig()
        self.config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=rows * (-(-longest // PAGE) + 1),
            max_batch_tokens=max(rows, PREFILL_TOKENS),
            max_requests_per_batch=rows,
            allow_block_sharing=False,  # each turn has the same prompts
            seed=seed,
        )

    def sample(
        self, prompts: Sequence[list[int]], max_new_tokens: int, seed: int
    ) -> SampledAnswers:
        """The random numbers go on from call to call: `seed` is not used."""
        with _without_warnings():
            start = time.perf_counter()
            out = self.model.generate_batch(
                list(prompts),
                generation_config=sampling_config(self.eos, max_new_tokens),
                continuous_batching_config=self.config,
                persistent_manager=True,
                max_new_tokens=max_new_tokens,
            )
            seconds = time.perf_counter() - start
        errors = [one.error for one in out.values() if one.error is not None]
        if errors or len(out) != len(prompts):
            reason = errors[0] if errors else "its thread ended"
            raise UserError(f"generate_batch failed ({reason}): leave it out of --engines")
        return SampledAnswers([list(one.generated_tokens) for one in out.values()], seconds)

    def close(self) -> None:
        self.model.destroy_cached_continuous_batching_manager()


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """In the block transformers' continuous batching, which has a logger of its own, writes errors only."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
