"""LayerSkip's own recipe (Elhoushi et al. 2024): the target itself is trained for early exit, by LoRA.

Every sample goes past some layers (layer dropout, rising with depth), and the shared norm and LM head read the state
behind several layers (early-exit loss). All exits, the last layer included, learn the distribution of the target with
its adapters off and without dropout, which keeps the new target close to the original. Decoding is exact for the new
target, which differs from the original: eval/checks/target_drift.py measures how far it moved. No adapter and no head
is added: what is saved is a whole target that drafts with its own first layers.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decode.common.target_record import TargetRecord
from decode.drafts.base import Draft
from decode.drafts.early_exit import EarlyExitDraft
from decode.model.layer_stack import check_exit, final_norm, layer_stack
from train.data.batching import Batch
from train.families.base import FamilyContext, TrainableDraft
from train.families.head_loss import loss_and_metrics
from train.families.lora_target import LoraTarget, adapt_target
from train.families.settings.heads import LayerSkip2Settings
from train.losses import chunked_sums
from train.losses.objective import Criterion


class TrainableLayerSkip2(TrainableDraft):
    """A target in training for early exit."""

    def __init__(self, context: FamilyContext, s: LayerSkip2Settings):
        target = context.target
        count = target.runner.config.num_hidden_layers
        self.target, self.layers = target, s.draft_layers(count)
        check_exit(self.layers, count)
        self.lora_target = adapt_target(context, s.family, s.target_lora_rank)
        self.model = LayerSkip2Trainer(self.lora_target, context.criterion(), s, self.layers)
        self.teacher = None
        self.muon_parameters = ()
        self.metadata = {
            "target": TargetRecord(context.config.out),
            "original_target": target.describe(),
        }

    def to_draft(self) -> Draft:
        return EarlyExitDraft(self.target, self.layers)

    def save(self, folder: Path) -> None:
        """Writes the new target; the adapters are merged into it for good. `exit_layer` stands in its config.json."""
        self.target.runner.model.config.exit_layer = self.layers
        self.lora_target.save(folder)


class LayerSkip2Trainer(nn.Module):
    """The weighted divergences of the enabled exits from the original target, as a module.

    In eval mode no layer is dropped.
    """

    def __init__(
        self, lora_target: LoraTarget, criterion: Criterion, s: LayerSkip2Settings, exit_layer: int
    ):
        super().__init__()
        self.adapters = nn.ParameterList(lora_target.parameters())
        self.lora_target = lora_target  # no module: its frozen weights do not belong to this one
        self.criterion, self.config, self.exit_layer = criterion, s, exit_layer
        model = lora_target.target.runner.model
        self.count = model.config.get_text_config(decoder=True).num_hidden_layers

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        s, model = self.config, self.lora_target.target.runner.model
        exits = enabled_exits(self.count, self.exit_layer, s.exit_period, batch.draw)
        weights = exit_weights(self.count, exits, s.exit_scale)
        with torch.no_grad(), self.lora_target.adapters_disabled():
            original = self.lora_target.states(batch)
        highest = s.layer_dropout if self.training else 0.0
        dropped = draw_dropped_layers(batch, dropout_rates(self.count, highest))
        with layers_dropped(model, dropped):
            states = self.lora_target.states(batch, tuple(exits[:-1]))  # [B, T, J * H]
        return self.exit_losses(original[batch.loss_mask], states[batch.loss_mask], exits, weights)

    def exit_losses(
        self, original: Tensor, states: Tensor, exits: list[int], weights: list[float]
    ) -> dict[str, Tensor]:
        """Sums over N rows, from the original's final states [N, H] and those of the new target [N, J * H], the last of
        which are behind the final norm: "loss", and the metrics of each exit under its number, as "alpha_8"."""
        head = self.lora_target.head
        norm = final_norm(self.lora_target.target.runner.model)

        def sums(original: Tensor, states: Tensor) -> dict[str, Tensor]:
            *inner, final = states.chunk(len(exits), -1)
            logits = [*(head(norm(state)) for state in inner), head(final)]
            valid = torch.ones(len(states), len(exits), dtype=torch.bool, device=states.device)
            weight = torch.tensor(weights, device=states.device).expand(len(states), -1)
            found = loss_and_metrics(self.criterion, head(original), logits, valid, weight, None)
            return {exit_metric(name, exits): value for name, value in found.items()}

        size = chunked_sums.max_chunk_rows(head.linear.weight.shape[0])
        return chunked_sums.sums_in_chunks(sums, [original, states], size)


def exit_metric(name: str, exits: list[int]) -> str:
    """ "alpha_8" from "alpha_2" where the second of `exits` is behind layer 8; a name without a number as it is."""
    kind, _, number = name.rpartition("_")
    return f"{kind}_{exits[int(number) - 1]}" if kind else name


def dropout_rates(layers: int, highest: float) -> list[float]:
    """The probability with which each layer is dropped: 2^((l - 1) / (L - 1)) - 1 of `highest` (as in the
    paper, without its curriculum over time): 0 for the first layer, `highest` for the last."""
    return [highest * (2 ** (i / max(1, layers - 1)) - 1) for i in range(layers)]


def enabled_exits(layers: int, exit_layer: int, period: int, step: int) -> list[int]:
    """The exits that `step` trains, rising: those E with E = step modulo `period` (the rotational curriculum), always
    `exit_layer`, which will draft, and the last layer."""
    rotating = {e for e in range(1, layers) if e % period == step % period}
    return sorted(rotating | {exit_layer, layers})


def exit_weights(layers: int, exits: list[int], scale: float) -> list[float]:
    """The weight of each of `exits` in the loss; they add up to 1.

    In proportion to `scale` * (1 + 2 + … + E) for E < L, and to L + `scale` * (1 + 2 + … + (L - 1)) for the last layer
    (as in the paper, whose layers count from 0).
    """
    raw = [scale * e * (e + 1) / 2 for e in exits]
    raw = [
        r if e < layers else layers + scale * layers * (layers - 1) / 2
        for e, r in zip(exits, raw, strict=True)
    ]
    return [r / sum(raw) for r in raw]


def draw_dropped_layers(batch: Batch, rates: list[float]) -> Tensor:
    """[L, B, T] bool, the same at all tokens of a sample: whether it goes past the layer.

    A function of the sample's id and `batch.draw`: packing, the number of processes and a resumed run change nothing.
    """
    shape = batch.input_ids.shape
    dropped = torch.zeros(len(rates), *shape, dtype=torch.bool)
    numbers = None if batch.documents is None else batch.documents.cpu()
    for i, (line, _) in enumerate(batch.starts):
        seed = zlib.crc32(f"{batch.ids[i]}:{batch.draw}:layers".encode())
        drawn = torch.rand(len(rates), generator=torch.Generator().manual_seed(seed))
        own = torch.ones(shape[1], dtype=torch.bool) if numbers is None else numbers[line] == i
        dropped[:, line] |= (drawn < torch.tensor(rates))[:, None] & own
    return dropped.to(batch.input_ids.device)


@contextmanager
def layers_dropped(model: Any, dropped: Tensor) -> Iterator[None]:
    """Inside this block a layer's output is its input where `dropped` [L, B, T] is True.

    The layer is computed for all samples all the same: dropout changes what is learned and saves no time here.
    """

    def past(number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            state = args[0] if args else kwargs["hidden_states"]
            if isinstance(out, tuple):
                return (torch.where(dropped[number][..., None], state, out[0]), *out[1:])
            return torch.where(dropped[number][..., None], state, out)

        return hook

    handles = [
        layer.register_forward_hook(past(number), with_kwargs=True)
        for number, layer in enumerate(layer_stack(model))
        if dropped[number].any()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
