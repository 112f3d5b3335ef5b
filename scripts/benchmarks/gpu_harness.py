"""Models, rounds and baselines of the GPU benchmark: repeatable rounds, transformers' generate, weights to swap."""

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
from decode.drafts.lookups.ngram import NgramDraft
from decode.engine.compile import compile_function
from decode.engine.cuda_graph import WARM_UPS, CudaGraphRunner
from decode.engine.engine import SpeculativeEngine
from decode.engine.records import DecodeRecord, collect_outputs
from decode.engine.round import BatchState, StepConfig, run_round
from decode.model.loading import Target
from decode.model.runner import ModelRunner
from decode.verification.sampling import CounterRNG, SamplingParams
from decode.verification.tree import DynamicTree, optimal_static_tree
from scripts.benchmarks.gpu_timers import summary, time_ms, wall_ms
from scripts.benchmarks.widen_llama import LlamaShape, randomise_

TimedFn = Callable[[], torch.Tensor]
SLOT_MULTIPLE = 128  # buffers have a multiple of this many slots per row
TREE_NODES = 16
STATIC_TREE = optimal_static_tree(
    [[0.6, 0.15, 0.07, 0.04]] * 5, TREE_NODES
)  # typical accuracies by rank


# ---- rounds ----


@dataclass
class BenchBatch:
    """A batch of rows of random text that can run any number of rounds from the same length."""

    target: Target
    draft: Draft | None
    state: BatchState
    rules: StepConfig
    length: torch.Tensor  # [B], after prefill

    @torch.inference_mode()
    def rewind(self) -> None:
        """Back to the state after `prefilled_batch`: what was committed since is dropped."""
        self.state.length.copy_(self.length)
        self.state.done.fill_(False)

    def round(self, compiled: bool) -> torch.Tensor:
        """Runs a round from the current lengths and returns its report tensor."""
        return run_round(self.target, self.draft, self.state, self.rules, compiled=compiled)

    def mutated_tensors(self) -> list[torch.Tensor]:
        """The tensors that a round changes, and that must be restored after a CUDA graph's warm-up."""
        rng: Any = self.rules.choose
        return [self.state.history, self.state.length, self.state.done, rng.draws]


def prefilled_batch(
    target: Target,
    draft: Draft | None,
    rows: int,
    context: int,
    k: int,
    size: int,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
) -> BenchBatch:
    """A batch of `rows` rows whose next round reads a context of `context` tokens, in buffers of `size` slots.

    Set up as the engine does it, with inference tensors where the engine has them, so that both share compiled code.
    """
    decoder, device = target.decoder, target.decoder.device
    rng = CounterRNG(torch.zeros(rows, dtype=torch.long, device=device))
    rules = StepConfig(k, sampling, rng)
    decoder.allocate(rows, size)
    decoder.capture_hidden_states(None if draft is None else draft.taps)
    state = BatchState.empty(rows, size, device)
    if draft is not None:
        draft.begin_batch(DraftContext(rows, size, k, sampling, rng))
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
        batch = BenchBatch(target, draft, state, rules, state.length.clone())
    batch.rewind()
    return batch


def buffer_slots(context: int, advance: int, rounds: int, reach: int) -> int:
    """Slots that `rounds` rounds from `context` on may need, rounded up to a multiple of SLOT_MULTIPLE.

    `advance` is the most tokens that a round commits, `reach` the slots that the draft needs beyond a row's length.
    """
    return -(-(context + advance * rounds + 2 * reach + 2) // SLOT_MULTIPLE) * SLOT_MULTIPLE


def wrap_for_mode(
    run: Callable[[bool], torch.Tensor], mode: str, changed: list[torch.Tensor]
) -> TimedFn:
    """A function that runs `run(compiled)` in that mode (a key of gpu_timers.MODES)."""
    compiled = mode in ("compiled", "graph")
    if mode in ("captured", "graph"):
        return CudaGraphRunner(lambda: run(compiled), changed)
    return lambda: run(compiled)


def target_pass(decoder: ModelRunner, tokens: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of one verification pass and nothing else."""
    return decoder.step(tokens, base)


def draft_passes(
    decoder: ModelRunner, tokens: torch.Tensor, length: torch.Tensor, k: int
) -> torch.Tensor:
    """Logits [B, k, V] of the draft's passes for a chain of k tokens and nothing else. The passes read given tokens,
    not each other's."""
    logits = [decoder.step(tokens, length - 2)[:, -1]]
    logits += [decoder.step(tokens[:, :1], length + i)[:, -1] for i in range(k - 1)]
    return torch.stack(logits, 1)


@torch.inference_mode()
def first_logit_column(
    function: Callable[..., torch.Tensor], compiled: bool, decoder: ModelRunner, *rest: Any
) -> torch.Tensor:
    """The first column of the logits of `function`. The slice is outside the compiled code, which returns them all."""
    run = compile_function(function, decoder.device.type) if compiled else function
    return run(decoder, *rest)[..., :1]


# ---- models ----


def hf_copy(model: Any) -> Any:
    """A model that shares `model`'s weights and uses transformers' own attention."""
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
    """Writes `values` into the weights in place, so that captured graphs, which hold addresses, see them."""
    for value, kept in zip(model.parameters(), values, strict=True):
        value.copy_(kept)


@dataclass(frozen=True)
class BenchSizes:
    """Sizes of the measurements, in tokens and rows, and numbers of repetitions; see GpuBenchConfig."""

    context: int
    contexts: list[int]
    widths: list[int]
    batches: list[int]
    ks: list[int]
    k: int
    max_new_tokens: int
    short_run_tokens: int  # new tokens of the shorter of two timed runs of transformers' generate
    long_run_tokens: int
    repeats: int
    runs_per_sample: int
    copy_bytes: int
    bandwidth: float  # bytes per second


@dataclass
class GpuHarness:
    """The widened models, the reference texts of the small target, and which weights are in place."""

    sizes: BenchSizes
    target: Target
    assistant: ModelRunner
    shape: LlamaShape
    prompts: list[list[int]]
    reference_texts: list[list[int]]
    """Greedy texts of the small target, which the widened one must reproduce."""
    compiled: bool
    weights: str = "widened"
    bandwidth: float = 0.0
    """Bytes per second; 0 until measured."""
    texts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.models = [self.target.decoder.model, self.assistant.model]
        self.original_weights = [copy_weights(model) for model in self.models]

    @property
    def device(self) -> torch.device:
        return self.target.decoder.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def fastest_uncompiled_mode(self) -> str:
        """The fastest mode without compilation: one CUDA graph per round on a GPU, eager elsewhere."""
        return "captured" if self.cuda else "eager"

    def set_weights(self, weights: str) -> None:
        """Writes the "widened" or the "random" weights into both models in place."""
        if weights != self.weights:
            for seed, (model, values) in enumerate(
                zip(self.models, self.original_weights, strict=True)
            ):
                if weights == "random":
                    randomise_(model, seed)
                else:
                    restore_weights_(model, values)
        self.weights = weights

    def methods(self) -> dict[str, tuple[Draft | None, int]]:
        """{name: (draft, K)} of all methods; plain decoding has no draft."""
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
        """A batch for a method at the usual context."""
        draft, k = self.methods()[name]
        context, reach = self.sizes.context, 1 if draft is None else draft.max_slots(k)
        size = buffer_slots(context, k + 1, self.sizes.runs_per_sample + WARM_UPS, reach)
        return prefilled_batch(self.target, draft, rows, context, k, size, sampling)

    def time(self, run: TimedFn, batch: BenchBatch | None = None) -> dict[str, float]:
        """`summary` of milliseconds per run; each sample rewinds the batch first, if one is given."""
        before = None if batch is None else batch.rewind
        return time_ms(run, self.device, self.sizes.repeats, self.sizes.runs_per_sample, before)

    def plain_texts(self) -> list[list[int]]:
        """Greedy texts of the wide target; call it while the widened weights are in place."""
        if not self.texts:
            self.texts = [
                o.output_ids for o in self.decode(SpeculativeEngine(self.target), self.prompts)
            ]
        return self.texts

    def decode(
        self, engine: SpeculativeEngine, prompts: Sequence[list[int]], **how: Any
    ) -> list[DecodeRecord]:
        """Greedy texts and rounds of an engine, a record per prompt."""
        how = {"max_new_tokens": self.sizes.max_new_tokens} | how
        return collect_outputs(list(prompts), engine.speculate(list(prompts), **how))


class HFGenerate:
    """transformers' generate over the same weights, batch 1, greedy."""

    def __init__(self, harness: GpuHarness):
        self.harness, (self.model, self.draft) = harness, map(hf_copy, harness.models)
        config = self.draft.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = (
            harness.sizes.k,
            "constant",
        )
        config.assistant_confidence_threshold = 0.0  # always drafts K tokens
        self.target_passes = 0
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.target_passes += 1

    def assistant_args(self) -> dict[str, Any]:
        """The arguments of `generate` for assisted generation."""
        return {"assistant_model": self.draft}

    def tokens(self, prompt: list[int], new: int, **how: Any) -> list[int]:
        """The new token ids."""
        ids = torch.tensor([prompt], device=self.harness.device)
        how |= {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        out = self.model.generate(ids, max_new_tokens=new, **how)
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def time_without_prefill(
        self, prompt: list[int], **how: Any
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Milliseconds per token and per target pass without prefill: a long run minus a short one."""
        a_token, a_pass = [], []
        for _ in range(1 + max(2, self.harness.sizes.repeats // 3)):
            ends = []
            for new in (self.harness.sizes.long_run_tokens, self.harness.sizes.short_run_tokens):
                self.target_passes = 0
                run = partial(self.tokens, prompt, new, **how)
                got, ms = wall_ms(run, self.harness.device)
                ends.append((ms, len(got), self.target_passes))
            ms, tokens, passes = (a - b for a, b in zip(*ends, strict=True))
            a_token.append(ms / max(1, tokens))
            a_pass.append(ms / max(1, passes))
        return summary(a_token[1:]), summary(a_pass[1:])
