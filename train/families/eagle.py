"""TODO: train.families.registry.eagle."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from decode.checkpoints import layouts
from decode.common.errors import UserError
from decode.drafts import eagle
from decode.drafts.eagle import EagleDraft
from decode.drafts.eagle_model import Eagle1Model, Eagle3Model, EagleModel, llama_config
from decode.model.hidden_states import HiddenStateHooks, HiddenStateSpec, lm_head_function
from decode.model.loading import Target
from train.data import batching
from train.data.batching import Batch
from train.data.sample_store import SampleRow
from train.families import vocab_mapping
from train.families.alignment import Alignment
from train.families.base import (
    FamilyContext,
    TrainableDraft,
    make_loss_fn,
    matrix_parameters,
    model_dtype,
)
from train.families.config import DraftConfig
from train.families.head_init import (
    Config,
    check_against_saved,
    check_widths,
    load_saved_config,
    random_init,
)
from train.families.head_loss import LossWeights, SupervisedRows, loss_and_metrics, step_weights
from train.families.ttt_attention import TestTimeAttention
from train.losses import divergences
from train.losses.objective import Criterion
from train.teacher.live import LiveTeacher, TeacherOutput


def build_eagle1(job: FamilyContext) -> TrainableDraft:
    net, config = init_eagle1(job.s.draft, job.target, job.device)
    return _build_eagle(job, net, "eagle1", config, 1)


def build_eagle3(job: FamilyContext) -> TrainableDraft:
    s, target = job.s.draft, job.target
    counts = vocab_mapping.count_tokens(job.rows, target.decoder.vocab_size)
    net, config = init_eagle3(s, target, job.device, job.rows, counts)
    trainee = _build_eagle(job, net, "eagle3", config, s.steps)
    if net.ids is not None:
        trainee.facts["vocabulary"] = {
            "size": len(net.ids),
            "coverage": vocab_mapping.coverage(net.ids.cpu(), counts),
            "digest": vocab_mapping.digest(net.ids),
        }
    return trainee


def _build_eagle(
    job: FamilyContext, net: EagleModel, name: str, config: dict[str, Any], steps: int
) -> TrainableDraft:
    target = job.target
    HiddenStateHooks(target.decoder.model, net.taps).remove()  # refuses layers that are not there
    teacher = job.teacher(net.taps)
    embedding = target.decoder.model.get_input_embeddings().weight.detach()
    head, criterion = teacher.head, job.criterion()
    return TrainableDraft(
        model=EagleTrainer(net, head, embedding, criterion, job.s.weights, steps),
        objective=partial(make_loss_fn, teacher),
        draft=lambda: EagleDraft(net, target, name),
        muon_parameters=matrix_parameters(net.fc) + matrix_parameters(net.layers),
        save=lambda out: layouts.save_heads(out, config, net, model_dtype(target), net.ids),
        facts={},
        teacher=teacher,
    )


class EagleTrainer(nn.Module):
    """An EAGLE net run `steps` times over each slot, from the second time on its own states (training-time test).

    EAGLE-1 is trained on one step, and on the target's feature besides its law.
    """

    alignment: type[Alignment] = Alignment

    def __init__(
        self,
        net: EagleModel,
        head: Callable[[Tensor], Tensor],
        embedding: Tensor,
        criterion: Criterion,
        weights: LossWeights,
        steps: int,
    ):
        super().__init__()
        self.net, self.head, self.steps = net, head, steps
        self.criterion, self.weights = criterion, weights
        self.embedding = embedding  # no buffer: it is the target's, and not to be sent around

    def forward(self, batch: Batch, output: TeacherOutput) -> dict[str, Tensor]:
        places = self.alignment(batch.input_ids, batch.loss_mask, self.steps, batch.documents)
        rows = SupervisedRows(places, self.steps)
        first = places.step(0)
        dtype = self.net.fc.weight.dtype
        start = self.net.start(output.features.to(dtype))
        embeds = self.net.embed(first.token, self.embedding).to(dtype)
        # Only slots that are trained go through the layer; of the others its keys are all that is ever seen.
        keys, values = self.net.keys(start, embeds, first.position)
        slots = valid_slot_indices(first.valid)
        row = torch.arange(len(slots), device=slots.device)[:, None]
        numbers = batch.documents
        same = None if numbers is None else numbers[row, slots][..., None] == numbers[:, None]
        attend = TestTimeAttention(keys, values, slots, same)
        index = torch.zeros_like(first.position)  # of each slot among those that ask
        index[row, slots] = torch.arange(slots.shape[1], device=slots.device)
        state = start[row, slots]
        states = []
        for j in range(self.steps):
            at = places.step(j)
            embeds = self.net.embed(at.token[row, slots], self.embedding).to(dtype)
            state = self.net.step(state, embeds, at.position[row, slots], attend)
            states.append(state[rows.batch, rows.values_at_slots(index, j)])
        ids, size = self.net.ids, divergences.max_chunk_rows(len(self.embedding))

        def say(states: Tensor) -> list[Tensor]:
            return [self.net.logits(states[:, j]) for j in range(self.steps)]

        def sums(
            teacher: Tensor, states: Tensor, valid: Tensor, weight: Tensor, feature: Tensor
        ) -> dict[str, Tensor]:
            p_logits = self.head(teacher)
            valid = self.trained(p_logits, valid)
            found = loss_and_metrics(self.criterion, p_logits, say(states), valid, weight, ids)
            if isinstance(self.net, Eagle1Model):
                near = divergences.smooth_l1(states[:, 0], feature)[valid[:, 0]].sum()
                said_loss = self.weights.divergence * found["loss"]
                found["loss"] = self.weights.feature * near + said_loss
                found["feature"] = near.detach()
            return found

        label = output.features if isinstance(self.net, Eagle1Model) else output.features[..., :0]
        own = torch.stack(states, 1)  # [N, J, h]
        weight = step_weights(self.weights, rows, say, own, ids, size)
        inputs = [rows.take(output.head_inputs), own, rows.valid, weight, rows.take(label)]
        return divergences.sums_in_chunks(sums, inputs, size)

    def trained(self, p_logits: Tensor, valid: Tensor) -> Tensor:
        """[N, J] bool: which of the `valid` places the loss counts; all of them."""
        return valid


def valid_slot_indices(valid: Tensor) -> Tensor:
    """[B, M] int64: the places where valid [B, T] holds, rising; M is their largest number (at least 1).

    Rows with fewer go on with places where it does not hold.
    """
    count = max(1, int(valid.sum(1).max()))
    return (~valid).long().argsort(dim=1, stable=True)[:, :count]


def init_eagle1(s: DraftConfig, target: Target, device: str) -> tuple[EagleModel, Config]:
    """(net, its config.json)."""
    check_widths(target)
    if s.init:
        config = load_saved_config(s, "eagle1")
        return eagle.load(s.init, target, device, "float32").net, config
    config = layouts.eagle1_config(target.decoder.config, target.decoder.vocab_size)
    return random_init(
        Eagle1Model(llama_config(config), lm_head_function(target.decoder.model))
    ).to(device), config


def init_eagle3(
    s: DraftConfig, target: Target, device: str, rows: Sequence[SampleRow], counts: Tensor
) -> tuple[EagleModel, Config]:
    """(net, its config.json). A new one speaks the most frequent tokens of `counts`, with the target's own rows."""
    check_widths(target)
    depth, vocab = target.decoder.config.num_hidden_layers, target.decoder.vocab_size
    if s.taps != sorted(set(s.taps)):
        raise UserError(f"draft.taps {s.taps}: name layers in rising order, each once")
    if s.init:
        config = load_saved_config(s, "eagle3")
        size, taps = config["draft_vocab_size"], list(layouts.aux_layers(config, depth))
        check_against_saved(
            s, vocab=0 if size == vocab else size, width=config["hidden_size"], taps=taps
        )
        return eagle.load(s.init, target, device, "float32").net, config
    layers = tuple(s.taps) or layouts.default_aux_layers(depth)
    ids = vocab_mapping.build(counts, s.vocab or vocab, sorted(target.eos))
    size = vocab if ids is None else len(ids)
    config = layouts.eagle3_config(target.decoder.config, vocab, size, layers, s.width)
    net = random_init(Eagle3Model(llama_config(config), HiddenStateSpec(layers), ids))
    start = target.decoder.model.get_output_embeddings().weight.detach().cpu()
    with torch.no_grad():
        net.fc.weight /= _hidden_state_rms(target, net.taps, rows)
        if start.shape[1] == config["hidden_size"]:
            net.lm_head.weight.copy_(start if ids is None else start[ids])
    return net.to(device), config


def _hidden_state_rms(target: Target, taps: HiddenStateSpec, rows: Sequence[SampleRow]) -> float:
    """Root mean square of tapped states over a few samples.

    States inside a target are large, ten and more, and grow with depth. A layer that adds numbers of size 1 to
    them says nothing at first, and learns as slowly; fused states of size 1 leave it a say.
    """
    few = [rows[i] for i in range(min(4, len(rows)))]
    some = batching.collate(few, pad_id=0).to(target.decoder.device)
    features = LiveTeacher(target, taps).get_output(some).features.float()
    written = some.loss_mask[..., None].expand_as(features)  # of the text, not of padding
    return float(features[written].square().mean().sqrt())
