"""EAGLE-1 and EAGLE-3 heads in training: losses and training-time test (Li et al. 2024, 2025)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from decode.checkpoints import eagle_layouts, layouts
from decode.common.errors import UserError
from decode.drafts import eagle
from decode.drafts.eagle import EagleDraft
from decode.drafts.eagle_model import Eagle1Model, Eagle3Model, EagleModel, llama_config
from decode.model.hidden_states import HiddenStateSpec, LMHead
from decode.model.masks import recomputed, run_now
from train.data import batching, vocab_mapping
from train.data.batching import Batch
from train.families.alignment import Alignment
from train.families.base import (
    Config,
    FamilyContext,
    TrainableDraft,
    TrainableHead,
    check_trained_layers,
    check_widths,
    load_saved_config,
    random_init,
    vocabulary_facts,
)
from train.families.head_loss import SupervisedRows, loss_and_metrics, step_weights
from train.families.settings.base import DEFAULT_VOCAB, vocab_size
from train.families.settings.eagle import Eagle1Settings, Eagle3Settings, EagleNetSettings
from train.families.settings.heads import MtpSettings
from train.families.ttt_attention import TestTimeAttention
from train.losses import chunked_sums, divergences
from train.teacher.live import TeacherOutput


def build_eagle1(context: FamilyContext, s: Eagle1Settings) -> TrainableDraft:
    target, device = context.target, context.device
    check_widths(target)
    if s.init:
        config = load_saved_config(s.init, s.family)
        net = eagle.load(s.init, target, device, "float32").net
    else:
        config = eagle_layouts.eagle1_config(target.runner.config, target.runner.vocab_size)
        new = Eagle1Model(llama_config(config), LMHead(target.runner.model))
        net = random_init(new).to(device)
    return TrainableHead(context, s, net, config, EagleTrainer, EagleDraft)


def build_eagle3(context: FamilyContext, s: Eagle3Settings) -> TrainableDraft:
    counts = vocab_mapping.count_tokens(context.rows, context.target.runner.vocab_size)
    net, config = init_eagle3(context, s, counts)
    draft = TrainableHead(context, s, net, config, EagleTrainer, EagleDraft)
    draft.metadata = {"norms": eagle_layouts.saved_norms(config)} | vocabulary_facts(
        net.ids, counts
    )
    return draft


class EagleTrainer(nn.Module):
    """The loss of an EAGLE net that runs `steps` times over each slot, from the second time on its own states.

    This is EAGLE-3's training-time test. EAGLE-1 is trained on one step, and on the target's next final hidden state
    (the feature) besides its distribution.
    """

    def __init__(
        self,
        net: EagleModel,
        head: Callable[[Tensor], Tensor],
        embedding: Tensor,
        context: FamilyContext,
        s: Eagle1Settings | Eagle3Settings | MtpSettings,
    ):
        super().__init__()
        self.net, self.head, self.steps = net, head, s.steps
        self.run = recomputed if s.activation_checkpointing else run_now
        self.criterion, self.weights = context.criterion(), context.config.weights
        self.embedding = embedding  # no buffer: it is the target's, and not to be synchronised

    def forward(self, batch: Batch, output: TeacherOutput) -> dict[str, Tensor]:
        places = Alignment(batch.input_ids, batch.loss_mask, self.steps, batch.documents)
        rows = SupervisedRows(places, self.steps)
        states = self.step_states(batch, output.features, places, rows)
        ids, size = self.net.ids, chunked_sums.max_chunk_rows(len(self.embedding))

        def step_logits(states: Tensor) -> list[Tensor]:
            return [self.net.logits(states[:, j]) for j in range(self.steps)]

        def chunk_loss(
            teacher: Tensor, states: Tensor, valid: Tensor, weight: Tensor, feature: Tensor
        ) -> dict[str, Tensor]:
            p_logits = self.head(teacher)
            logits = step_logits(states)
            sums = loss_and_metrics(self.criterion, p_logits, logits, valid, weight, ids)
            if isinstance(self.net, Eagle1Model):
                distance = divergences.smooth_l1(states[:, 0], feature)[valid[:, 0]].sum()
                divergence = self.weights.divergence * sums["loss"]
                sums["loss"] = self.weights.feature * distance + divergence
                sums["feature"] = distance.detach()
            return sums

        label = output.features if isinstance(self.net, Eagle1Model) else output.features[..., :0]
        teacher = rows.take(output.head_inputs)
        weight = step_weights(
            self.weights, rows, step_logits, states, ids, size, self.head, teacher
        )
        inputs = [teacher, states, rows.valid, weight, rows.take(label)]
        return chunked_sums.sums_in_chunks(chunk_loss, inputs, size)

    def step_states(
        self, batch: Batch, features: Tensor, places: Alignment, rows: SupervisedRows
    ) -> Tensor:
        """[N, J, h]: the states of the supervised `rows` after each step."""
        first = places.step(0)
        dtype = self.net.fc.weight.dtype
        start = self.net.init_state(features.to(dtype))
        embeds = self.net.embed(first.token, self.embedding).to(dtype)
        # Only supervised slots go through the layer; of the others only keys and values are needed.
        keys, values = self.run(self.net.keys_values, start, embeds, first.position)
        slots = valid_slot_indices(first.valid)
        row = torch.arange(len(slots), device=slots.device)[:, None]
        attention = TestTimeAttention(keys, values, slots, batch.documents)
        index = torch.zeros_like(first.position)  # of each slot among the supervised ones
        index[row, slots] = torch.arange(slots.shape[1], device=slots.device)
        state = start[row, slots]
        states = []
        for j in range(self.steps):
            at = places.step(j)
            embeds = self.net.embed(at.token[row, slots], self.embedding).to(dtype)
            position, attend = at.position[row, slots], attention.step(j)
            state = self.run(self.net.step, state, embeds, position, attend)
            states.append(state[rows.batch, rows.values_at_slots(index, j)])
        return torch.stack(states, 1)


def valid_slot_indices(valid: Tensor) -> Tensor:
    """[B, M] int64: the indices in each row where valid [B, T] is True, rising; M is their largest number, at least 1.

    Rows with fewer are filled up with indices where it is False.
    """
    count = max(1, int(valid.sum(1).max()))
    return (~valid).long().argsort(dim=1, stable=True)[:, :count]


def init_eagle3(
    context: FamilyContext, s: EagleNetSettings, counts: Tensor, mask_token: int | None = None
) -> tuple[EagleModel, Config]:
    """(net, its config.json). A new one drafts the most frequent tokens of `counts`, with the target's LM head rows.

    With a `mask_token` it is P-EAGLE.
    """
    target, device = context.target, context.device
    check_widths(target)
    depth, vocab = target.runner.config.num_hidden_layers, target.runner.vocab_size
    if s.taps != sorted(set(s.taps)):
        raise UserError(f"draft.taps {s.taps}: name layers in rising order, each once")
    if s.init:
        config = load_saved_config(s.init, s.family)
        s.continued(config, depth)
        layers = config.get("num_hidden_layers", 1)
        found = [f"{layers} layers"] * (layers > 1) + ["Qwen3's layers"] * bool(
            config.get("qk_norm")
        )
        check_trained_layers(s.init, config, found)
        return eagle.load_net(s.init, target, device, "float32")[0], config
    layers = tuple(s.taps) or layouts.default_aux_layers(depth)
    ids = vocab_mapping.build(counts, vocab_size(s.vocab, vocab, DEFAULT_VOCAB), sorted(target.eos))
    size = vocab if ids is None else len(ids)
    config = eagle_layouts.eagle3_config(
        target.runner.config, vocab, size, layers, s.width, s.norms
    )
    if mask_token is not None:
        config = eagle_layouts.peagle_config(config, mask_token)
    net = random_init(Eagle3Model(llama_config(config), HiddenStateSpec(layers), ids))
    start = target.runner.model.get_output_embeddings().weight.detach().cpu()
    with torch.no_grad():
        if net.fc_norm is None and net.input_norm is None:
            size_of_states = hidden_state_rms(context, net.aux_layers)
            net.fc.weight /= size_of_states
            if mask_token is not None:
                net.mask_hidden.mul_(size_of_states)
        if start.shape[1] == config["hidden_size"]:
            net.lm_head.weight.copy_(start if ids is None else start[ids])
    return net.to(device), config


def hidden_state_rms(context: FamilyContext, taps: HiddenStateSpec) -> float:
    """Root mean square of the tapped hidden states over the first samples.

    Hidden states inside a target are large, 10 and more, and grow with depth. A new layer that adds numbers of size 1
    to them changes little and learns slowly, so the fused states are scaled to size 1.
    """
    samples = [context.rows[i] for i in range(min(4, len(context.rows)))]
    batch = batching.collate(samples, pad_id=0).to(context.target.runner.device)
    features = context.running_teacher(taps).get_output(batch).features.float()
    supervised = batch.loss_mask[..., None].expand_as(features)
    return float(features[supervised].square().mean().sqrt())
