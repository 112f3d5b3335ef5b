"""A draft that learns while it serves: what verification computes of the target trains the draft's LM head.

    draft = LearningDraft(load_draft(path, target), target)
    for prompt in prompts:
        decode(target, draft, [prompt], k=4)

Verification gives the target's distribution p after each drafted token. Up to the first rejected token these are
positions of the true text. There the gradient of the cross-entropy of q against p, by the weights of the LM head, is
the outer product of q - p and the state that the head read. So one step of gradient descent adds the errors p - q to
the logits of a later state, each weighed by how alike that state and its own are. The weights themselves stay (they may
be packed, rounded or tied): states and errors of the last positions are kept, which are a low-rank change of the head.

The change moves between rounds only, and q of a proposal has it already: what a token was drawn from is what it is
verified with, so the text keeps the target's law.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from decode.common.errors import UserError, one_line
from decode.common.files import write_atomically
from decode.drafts.base import Draft, DraftContext, Proposal
from decode.drafts.causal import CausalDraft
from decode.drafts.eagle import EagleDraft
from decode.drafts.eagle_model import Eagle3Model
from decode.drafts.settings import LEARN_RATE
from decode.drafts.wrappers import DraftWrapper
from decode.model.hidden_states import LogitTransform
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams, warp

CAPACITY = 512
"""Positions of which states and errors are kept; a new one takes the place of the oldest."""
ERROR_TOKENS = 8
"""Tokens of a position whose errors are kept, the largest ones."""
SHARPNESS = 4
"""The power of the cosine of two states by which they are alike: states of one model all have much in common."""
ROUND_POSITIONS = 64
"""Positions that are learned of a round at most, however many rows it has."""
WINDOW, MARGIN = 2048, 0.01
"""Positions after which learning is judged, and what it must gain there of the overlap of p and q, which is the
probability that a token is accepted, to go on."""

# ---- the change of an LM head ----


class HeadUpdate(torch.nn.Module):
    """A change of the logits [n, V] of an LM head that reads states [n, H]: the sum of what positions have taught."""

    directions: Tensor
    tokens: Tensor
    errors: Tensor
    learned: Tensor

    def __init__(self, head: Any, device: torch.device):
        super().__init__()
        self.columns: int = head.out_features
        count = min(ERROR_TOKENS, self.columns)
        for name, shape, dtype in (
            ("directions", (CAPACITY, head.in_features), torch.float32),  # states of length 1
            ("tokens", (CAPACITY, count), torch.long),
            ("errors", (CAPACITY, count), torch.float32),
            ("learned", (), torch.long),  # positions so far
        ):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))

    def forward(self, states: Tensor) -> Tensor:
        """[n, V] in fp32: what is added to the logits of states [n, H]."""
        used = min(int(self.learned), CAPACITY)
        alike = likeness(F.normalize(states, dim=-1), self.directions[:used])
        parts = (alike[..., None] * self.errors[:used]).flatten(1)
        change = torch.zeros(len(states), self.columns, device=states.device)
        return change.scatter_add_(1, self.tokens[:used].flatten().expand_as(parts), parts)

    def learn(self, states: Tensor, errors: Tensor, rate: float) -> None:
        """A step of size `rate` at each of the states [n, H], n at most CAPACITY, whose errors are p - q [n, V].

        States that are alike share a step: each by itself would take it, and together they would go too far.
        """
        directions = F.normalize(states, dim=-1)
        steps = rate * errors / likeness(directions, directions).sum(1, keepdim=True)
        tokens = steps.abs().topk(self.tokens.shape[1]).indices
        at = (self.learned + torch.arange(len(states), device=states.device)) % CAPACITY
        self.directions[at], self.tokens[at] = directions, tokens
        self.errors[at] = steps.gather(1, tokens)
        self.learned += len(states)


def likeness(directions: Tensor, others: Tensor) -> Tensor:
    """[n, m] of unit vectors [n, H] and [m, H]: 1 for equal ones, 0 for those that have nothing in common."""
    return (directions @ others.T).clamp_min(0) ** SHARPNESS


# ---- the draft ----


@dataclass(frozen=True)
class OwnHead:
    """The LM head that belongs to a draft alone."""

    module: Any
    ids: Tensor | None  # [Vd] the target's tokens that it has; None: the first ones, or all
    transform: LogitTransform  # of its output


def own_head(draft: Draft) -> OwnHead:
    """The LM head of a small language model or an EAGLE-3 head. UserError for any other draft."""
    if type(draft) is EagleDraft and isinstance(draft.net, Eagle3Model):
        return OwnHead(draft.net.lm_head, draft.net.ids, LogitTransform(draft.net))
    if type(draft) is CausalDraft:
        model = draft.runner.model
        return OwnHead(model.get_output_embeddings(), draft.runner.ids, LogitTransform(model))
    raise UserError(
        f"draft {draft.name!r} cannot learn while it serves: EAGLE-3 heads can, and small language models with "
        "attention alone and the target's tokenizer, both on the target's device; leave learn out"
    )


class LearningDraft(DraftWrapper):
    """`inner`, whose LM head learns from what verification computes of `target`.

    What it has learned stays from request to request, so a row's sampled text depends on what was decoded before it;
    its law does not. Each WINDOW of positions is judged before they are learned: unless the change has made q overlap
    more with p there, it is dropped, and the draft learns no more. Rounds are eager, and the host reads each of them.
    """

    def __init__(self, inner: Draft, target: Target, rate: float = LEARN_RATE):
        """UserError for a draft without an LM head of its own."""
        super().__init__(inner)
        self.head = own_head(inner)
        self.runs, self.reads = "pass", replace(inner.reads, target=target)
        self.target, self.runner, self.rate = target, target.runner, rate
        self.forget()

    def forget(self) -> None:
        """Makes it the draft that it was before it learned anything."""
        self.update: HeadUpdate | None = None
        self.is_learning = True
        self.judged, self.gained = 0, 0.0
        self._clear_round()

    def save(self, folder: str) -> None:
        """Keeps in `folder` what it has learned of its target, if anything."""
        if self.update is not None:
            write_atomically(self._file(folder), safetensors.torch.save(self.update.state_dict()))

    def load(self, folder: str) -> None:
        """Goes on from what was kept in `folder`, if anything of its target. UserError if that is damaged."""
        file = self._file(folder)
        if file.is_file():
            self.update = HeadUpdate(self.head.module, self.runner.device)
            try:
                self.update.load_state_dict(safetensors.torch.load(file.read_bytes()))
            except (SafetensorError, RuntimeError) as error:
                raise UserError(f"{file} is damaged ({one_line(error)}): remove it") from error

    def _file(self, folder: str) -> Path:
        """Another file for each target and each draft of another kind or size."""
        head, weights = self.head.module, self.target.identity.weights
        size = f"{head.in_features}x{head.out_features}"
        return Path(folder) / f"learned-{self.name}-{size}-{weights}.safetensors"

    def _clear_round(self) -> None:
        # of each drafted token: states [B, H] and outputs [B, Vd] of the head, its own and with the change
        self.drafted: list[tuple[Tensor, Tensor, Tensor]] = []
        self.verified: Tensor | None = None  # [B, N + 1, V] the target's logits
        self.counts: dict[int, int] = {}  # positions on the true text, of rows that were decoded

    def begin_batch(self, request: DraftContext) -> None:
        """Hooks stay in the target and in the draft until the requests end. UserError for trees, and for grammars,
        whose forced tokens would count as drafted ones."""
        self.refuse_trees("learns from chains")
        if request.constraint is not None:
            raise UserError(
                f"draft {self.name!r} follows no grammar while it learns: leave out learn, or the grammar"
            )
        self.request, self.is_drafting = request, False
        self._clear_round()
        self.inner.begin_batch(request)
        request.closing.callback(self._clear_round)
        if self.is_learning:
            for module, hook in (
                (self.head.module, self._after_head),
                (self.runner.model, self._after_target),
            ):
                request.closing.callback(module.register_forward_hook(hook).remove)

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        self._learn()  # before `on_commit` brings these prompts
        super().prefill(row, prompts, length, features)

    def on_commit(self, row: int, tokens: list[int]) -> None:
        if self.drafted:
            self.counts[row] = min(len(tokens), self.room[row])
        super().on_commit(row, tokens)

    def skip(self, history: Tensor, length: Tensor, k: int, proposed: bool = False) -> None:
        if proposed:
            self._clear_round()  # other tokens may be verified
        else:
            self._learn()
        super().skip(history, length, k, proposed)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        self._learn()
        context = self.reads.context
        limit = torch.full_like(length, k) if context is None else context + 1 - length
        self.room: list[int] = limit.clamp(0, k).tolist()  # states behind what the draft can read
        self.is_drafting = True
        proposal = super().propose(history, length, k)
        self.is_drafting = False
        return proposal

    def _after_head(self, module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """The output [B, T, Vd] of the head with the change, and nothing else, in passes of `propose`."""
        if not self.is_drafting:
            return None
        states, changed = args[0][:, -1].float(), output
        if self.update is not None:
            change = self.update(states) / self.head.transform.scale
            changed = output + change.to(output.dtype)[:, None]
        self.drafted.append((states, output[:, -1], changed[:, -1]))
        return changed

    def _after_target(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        """Keeps the logits of the pass that verifies a proposal."""
        if self.drafted and self.verified is None and not self.is_drafting:
            self.verified = self.runner.widen_logits(output.logits)

    def _learn(self) -> None:
        """Learns the positions of the last round, if the draft was asked in it, after it has judged by them."""
        drafted, logits, counts = self.drafted, self.verified, self.counts
        self._clear_round()
        if logits is None or not self.is_learning:
            return
        width = min(len(drafted), logits.shape[1])
        places = [(row, i) for row, count in counts.items() for i in range(min(count, width))]
        if not places:
            return
        few = places[:: 1 + len(places) // ROUND_POSITIONS]
        row, at = torch.tensor(few, device=logits.device).unbind(1)
        states, own, changed = (
            torch.stack(x, 1)[row, at].float() for x in zip(*drafted, strict=True)
        )
        target, after = logits[row, at].float(), self.head.transform(changed)
        if self.update is not None:
            self._judge(target, self.head.transform(own), after)
        if self.is_learning:
            if self.update is None:
                self.update = HeadUpdate(self.head.module, states.device)
            p = self._columns(target.softmax(-1), after.shape[1])
            self.update.learn(states, p - p.sum(-1, keepdim=True) * after.softmax(-1), self.rate)

    def _judge(self, target: Tensor, before: Tensor, after: Tensor) -> None:
        """Counts what the change gains at positions that it has not learned, by logits [n, V] of the target and [n, Vd]
        of the draft without and with it; drops it where it did not pay over a WINDOW of them."""
        sampling = self.request.sampling
        p = self._columns(law(target, sampling), before.shape[1])
        with_it, without = (torch.minimum(p, law(x, sampling)).sum() for x in (after, before))
        self.judged, self.gained = self.judged + len(p), self.gained + float(with_it - without)
        if self.judged < WINDOW:
            return
        if self.gained < MARGIN * self.judged:
            self.forget()
            self.is_learning = False
        self.judged, self.gained = 0, 0.0

    def _columns(self, p: Tensor, count: int) -> Tensor:
        """[n, Vd] of the target's probabilities [n, V]: those of the `count` tokens that the head has."""
        ids = self.head.ids
        return F.pad(p, (0, count - p.shape[1])) if ids is None else p[:, ids]


def law(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """[n, V] the distribution that tokens are drawn from; 1 at the most probable one for greedy decoding."""
    if sampling.greedy:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return warp(logits, sampling)
