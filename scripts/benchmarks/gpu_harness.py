"""Wide models in their places: rounds that can be run again and again, transformers beside them, weights swapped."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.drafts.base import Draft, DraftContext
from decode.drafts.causal import CausalDraft
from decode.drafts.ngram import NgramDraft
from decode.engine.compile import compile_function
from decode.engine.cuda_graph import WARM_UPS, CudaGraphRunner
from decode.engine.engine import RequestOutput, SpeculativeEngine, collect_outputs
from decode.engine.round import BatchState, StepConfig, run_round
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import CounterRNG, SamplingParams
from decode.verification.tree import DynamicTree, optimal_static_tree
from scripts.benchmarks.gpu_timers import summary, time_ms, wall_ms
from scripts.benchmarks.widen_llama import LlamaShape, randomise_

TimedFn = Callable[[], torch.Tensor]
SLOT_MULTIPLE = 128  # buffers hold a multiple of this many a row
TREE_NODES = 16
STATIC_TREE = optimal_static_tree(
    [[0.6, 0.15, 0.07, 0.04]] * 5, TREE_NODES
)  # accuracies as drafts of this kind have


# ---- rounds ----


@dataclass
class BenchBatch:
    """Rows of random text at one length, ready for any number of rounds."""

    target: Target
    draft: Draft | None
    state: BatchState
    rules: StepConfig
    length: torch.Tensor  # [B] to go back to

    @torch.inference_mode()
    def rewind(self) -> None:
        """As after `seated`: what was committed since is forgotten."""
        self.state.length.copy_(self.length)
        self.state.done.fill_(False)

    def round(self, compiled: bool) -> torch.Tensor:
        """One round's report. Plays on the lengths as they are."""
        return run_round(self.target, self.draft, self.state, self.rules, compiled=compiled)

    def changed(self) -> list[torch.Tensor]:
        """What a round changes and a graph's warm-up must put back."""
        dice: Any = self.rules.choose
        return [self.state.history, self.state.length, self.state.done, dice.draws]


def prefilled_batch(
    target: Target,
    draft: Draft | None,
    rows: int,
    context: int,
    k: int,
    size: int,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
) -> BenchBatch:
    """`rows` rows whose next round reads a context of `context` tokens, in buffers of `size` slots.

    Made as the engine makes them, inference tensors where it has them, so that both share compiled code.
    """
    decoder, device = target.decoder, target.decoder.device
    dice = CounterRNG(torch.zeros(rows, dtype=torch.long, device=device))
    rules = StepConfig(k, sampling, dice)
    decoder.allocate(rows, size)
    decoder.capture_hidden_states(None if draft is None else draft.taps)
    state = BatchState.empty(rows, size, device)
    if draft is not None:
        draft.begin_batch(DraftContext(rows, size, k, sampling, dice))
    generator = torch.Generator(device).manual_seed(0)
    with torch.inference_mode():
        row, length = torch.arange(rows, device=device), torch.full_like(state.length, context - 1)
        tokens = torch.randint(
            decoder.vocab_size, (rows, context - 1), generator=generator, device=device
        )
        first = decoder.prefill(tokens, length, row).argmax(-1)
        if draft is not None:
            features = None if draft.taps is None else decoder.features
            draft.prefill(row, tokens, length, features)
        state.reset_rows(row, tokens, length, first, torch.full_like(length, size), target.eos_ids)
        rig = BenchBatch(target, draft, state, rules, state.length.clone())
    rig.rewind()
    return rig


def buffer_slots(context: int, advance: int, rounds: int, reach: int) -> int:
    """Slots that `rounds` rounds from `context` on may need, a multiple of SLOTS."""
    return -(-(context + advance * rounds + 2 * reach + 2) // SLOT_MULTIPLE) * SLOT_MULTIPLE


def wrap_for_mode(
    run: Callable[[bool], torch.Tensor], mode: str, changed: list[torch.Tensor]
) -> TimedFn:
    """`run(compiled)` as that mode of MODES does it."""
    compiled = mode in ("compiled", "graph")
    if mode in ("captured", "graph"):
        return CudaGraphRunner(lambda: run(compiled), changed)
    return lambda: run(compiled)


def target_pass(decoder: ModelRunner, tokens: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of one verification, and nothing else."""
    return decoder.step(tokens, base)


def draft_passes(
    decoder: ModelRunner, tokens: torch.Tensor, length: torch.Tensor, k: int
) -> torch.Tensor:
    """Logits [B, k, V] of the passes in which a chain of k is drafted, and nothing else; they do not wait for each
    other's token."""
    logits = [decoder.step(tokens, length - 2)[:, -1]]
    logits += [decoder.step(tokens[:, :1], length + i)[:, -1] for i in range(k - 1)]
    return torch.stack(logits, 1)


@torch.inference_mode()
def first_logit_column(
    function: Callable[..., torch.Tensor], compiled: bool, decoder: ModelRunner, *rest: Any
) -> torch.Tensor:
    """The first column of the logits that `function` gives; cut outside what is compiled, which gives them all."""
    run = compile_function(function, decoder.device.type) if compiled else function
    return run(decoder, *rest)[..., :1]


# ---- models ----


def hf_copy(model: Any) -> Any:
    """A model over the very same weights that runs transformers' own attention."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        other: Any = LlamaForCausalLM._from_config(
            config, dtype=model.dtype, attn_implementation="sdpa"
        )
    other.load_state_dict(model.state_dict(), assign=True)
    other.tie_weights()
    other.model.rotary_emb = LlamaRotaryEmbedding(config).to(model.device)
    return other.eval()


@torch.no_grad()
def copy_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of all weights."""
    return [value.clone() for value in model.parameters()]


@torch.no_grad()
def restore_weights_(model: torch.nn.Module, values: Sequence[torch.Tensor]) -> None:
    """Writes them back in place, so that whatever knows the weights by address still does."""
    for value, kept in zip(model.parameters(), values, strict=True):
        value.copy_(kept)


@dataclass(frozen=True)
class BenchSizes:
    """What is measured at: tokens, rows, repeats."""

    context: int
    contexts: list[int]
    widths: list[int]
    batches: list[int]
    ks: list[int]
    k: int
    max_new_tokens: int
    few: int  # new tokens of the shorter of two runs of transformers' generate
    many: int
    repeats: int
    inner: int
    copy_bytes: int
    bandwidth: float  # bytes a second


@dataclass
class GpuHarness:
    """Wide models, what small ones say, and where the weights stand."""

    sizes: BenchSizes
    target: Target
    assistant: ModelRunner
    shape: LlamaShape
    prompts: list[list[int]]
    small: list[list[int]]
    """The small target's own greedy texts."""
    compiled: bool
    weights: str = "widened"
    bandwidth: float = 0.0
    """Bytes a second, once measured."""
    texts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.models = [self.target.decoder.model, self.assistant.model]
        self.saved = [copy_weights(model) for model in self.models]

    @property
    def device(self) -> torch.device:
        return self.target.decoder.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def still(self) -> str:
        """The mode without compilation in which kernels follow each other closest."""
        return "captured" if self.cuda else "eager"

    def put(self, weights: str) -> None:
        """Widened or random weights, in place."""
        if weights != self.weights:
            for seed, (model, values) in enumerate(zip(self.models, self.saved, strict=True)):
                if weights == "random":
                    randomise_(model, seed)
                else:
                    restore_weights_(model, values)
        self.weights = weights

    def methods(self) -> dict[str, tuple[Draft | None, int]]:
        """{name: (draft, K)}"""
        chain, k = CausalDraft(self.assistant), self.sizes.k
        return {
            "plain": (None, 1),
            **{f"causal k={k}": (chain, k) for k in self.sizes.ks},
            f"ngram k={k}": (NgramDraft(), k),
            f"static tree {TREE_NODES}": (
                CausalDraft(self.assistant, shape=STATIC_TREE),
                STATIC_TREE.depth,
            ),
            f"dynamic tree {TREE_NODES}": (
                CausalDraft(self.assistant, shape=DynamicTree(4, TREE_NODES)),
                k,
            ),
        }

    def make_batch(
        self,
        name: str,
        rows: int,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    ) -> BenchBatch:
        """Rows for a method at the usual context."""
        draft, k = self.methods()[name]
        context, reach = self.sizes.context, 1 if draft is None else draft.reach(k)
        size = buffer_slots(context, k + 1, self.sizes.inner + WARM_UPS, reach)
        return prefilled_batch(self.target, draft, rows, context, k, size, sampling)

    def time(self, run: TimedFn, rig: BenchBatch | None = None) -> dict[str, float]:
        """Milliseconds a run; with a rig, from its first length on each time."""
        before = None if rig is None else rig.rewind
        return time_ms(run, self.device, self.sizes.repeats, self.sizes.inner, before)

    def plain(self) -> list[list[int]]:
        """The wide target's own greedy texts; asked for while its weights are widened."""
        if not self.texts:
            self.texts = [
                o.output_ids for o in self.decode(SpeculativeEngine(self.target), self.prompts)
            ]
        return self.texts

    def decode(
        self, engine: SpeculativeEngine, prompts: Sequence[list[int]], **how: Any
    ) -> list[RequestOutput]:
        """Greedy texts and rounds of an engine."""
        how = {"max_new_tokens": self.sizes.max_new_tokens} | how
        return collect_outputs(list(prompts), engine.speculate(list(prompts), **how))


class HFGenerate:
    """transformers' own generate over the same weights, batch 1, greedy."""

    def __init__(self, lab: GpuHarness):
        self.lab, (self.model, self.draft) = lab, map(hf_copy, lab.models)
        config = self.draft.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = lab.sizes.k, "constant"
        config.assistant_confidence_threshold = 0.0  # as many drafts as ours
        self.target_passes = 0  # of the target
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.target_passes += 1

    def assisted(self) -> dict[str, Any]:
        return {"assistant_model": self.draft}

    def tokens(self, prompt: list[int], new: int, **how: Any) -> list[int]:
        """The new tokens."""
        ids = torch.tensor([prompt], device=self.lab.device)
        how |= {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        out = self.model.generate(ids, max_new_tokens=new, **how)
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def time_without_prefill(
        self, prompt: list[int], **how: Any
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Milliseconds a token and a pass of the target behind the prefill: a long run less a short one."""
        a_token, a_pass = [], []
        for _ in range(1 + max(2, self.lab.sizes.repeats // 3)):
            ends = []
            for new in (self.lab.sizes.many, self.lab.sizes.few):
                self.target_passes = 0
                run = partial(self.tokens, prompt, new, **how)
                got, ms = wall_ms(run, self.lab.device)
                ends.append((ms, len(got), self.target_passes))
            ms, tokens, passes = (a - b for a, b in zip(*ends, strict=True))
            a_token.append(ms / max(1, tokens))
            a_pass.append(ms / max(1, passes))
        return summary(a_token[1:]), summary(a_pass[1:])
