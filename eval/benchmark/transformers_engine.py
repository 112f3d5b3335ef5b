"""transformers' generate, its assisted generation and prompt lookup, on the same target, prompt by prompt."""

import time
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from decode.common.errors import first_line
from decode.drafts.causal import CausalDraft
from decode.drafts.lookup import NgramDraft
from decode.model.loading import Target, load_model
from decode.model.seq2seq import (
    generated_ids,
    generation_settings,
    prepare_generate,
)
from decode.verification.sampling import SamplingParams
from eval.benchmark.config import EvalConfig
from eval.benchmark.methods import Method
from eval.benchmark.timing import synchronize
from eval.benchmark.turns import EngineAnswer
from eval.tasks.loading import TaskPrompt
from eval.tasks.stop_strings import StopMatcher, trim_at_stop


class TransformersEngine:
    """transformers' generate, assisted by the method's draft, or by its prompt lookup for the method ngram."""

    def __init__(
        self,
        s: EvalConfig,
        target: Target,
        model: Any,
        method: Method | None,
        sampling: SamplingParams,
    ):
        self.s, self.target, self.model = s, target, model
        self.method, self.sampling = method, sampling
        prepare_generate(model)
        self.assistant: dict[str, Any] = {}
        self.passes = 0
        """Forward passes of the target for the current prompt."""
        self.lookup = method.k if method is not None and isinstance(method.draft, NgramDraft) else 0
        if method is not None and not self.lookup:
            assert isinstance(method.draft, CausalDraft)
            own = next(m for m in s.methods if m.name == method.name)
            assistant = load_model(own.draft, "draft", str(model.device), own.dtype or s.dtype)
            prepare_generate(assistant)
            config = assistant.generation_config
            config.num_assistant_tokens = method.k
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0  # as many drafts as ours
            self.assistant = {"assistant_model": assistant}

    def answer(self, item: TaskPrompt) -> EngineAnswer:
        """{ids, seconds, rounds, accepted}, or {error}; rounds are counted by a hook on the target."""
        ids = torch.tensor([item.prompt_ids], device=self.model.device)
        torch.manual_seed(self.s.seed)
        self.passes = 0
        counting = self.model.register_forward_hook(self._count_pass)
        synchronize(ids.device)
        start = time.perf_counter()
        try:
            out = self._generate(ids, item)
        except Exception as error:  # named in the report, like our own failures
            return {"error": f"{type(error).__name__}: {first_line(error)}"}
        finally:
            counting.remove()
        synchronize(ids.device)
        seconds = time.perf_counter() - start
        found = generated_ids(self.model, out[0], ids.shape[1])
        answer = trim_at_stop(found, item.stop, self.target.tokenizer)
        rounds = self.passes - (self.method is None)  # assisted, the first pass verifies drafts too
        return {"ids": answer, "seconds": seconds, "rounds": rounds, "accepted": None}

    def _generate(self, ids: torch.Tensor, item: TaskPrompt) -> torch.Tensor:
        room = self.target.runner.context - len(item.prompt_ids)
        settings = generation_settings(
            self.model,
            self.target.eos,
            min(self.s.max_new_tokens, room),
            **vars(self.sampling),
            prompt_lookup_num_tokens=self.lookup or None,
        )
        start = 1 if self.model.config.is_encoder_decoder else len(item.prompt_ids)
        stopping = StopStringCriteria(item, self.target.tokenizer, start)
        out: torch.Tensor = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([stopping]),
            **self.assistant,
        )
        return out

    def _count_pass(self, *_: Any) -> None:
        self.passes += 1


class StopStringCriteria(StoppingCriteria):
    """Ends `generate` where stop strings end our own answers, so that it is not timed on tokens that are cut off."""

    def __init__(self, item: TaskPrompt, tokenizer: Any, start: int):
        """`start`: where the answer begins in what `generate` has written."""
        self.matcher, self.seen = StopMatcher(item.stop, tokenizer), start

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        end = self.matcher.add(input_ids[0, self.seen :].tolist())
        self.seen = input_ids.shape[1]
        return torch.tensor([end is not None], device=input_ids.device)
