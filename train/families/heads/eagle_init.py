"""New and continued EAGLE heads: their weights, vocabulary and config.json."""

from typing import Any

import torch
from torch import Tensor

from decode.checkpoints import eagle_layouts, layouts
from decode.common.errors import UserError
from decode.drafts import eagle
from decode.drafts.eagle_model import Eagle1Model, Eagle3Model, EagleModel, llama_config
from decode.model.hidden_states import HiddenStateSpec, LMHead
from decode.model.loading import Target
from train.data import batching, vocab_mapping
from train.families.base import FamilyContext
from train.families.config import DraftConfig
from train.families.head_init import (
    Config,
    check_against_saved,
    check_widths,
    load_saved_config,
    random_init,
)

DEFAULT_VOCAB = 32_000
"""Size of an EAGLE-3 draft's vocabulary where draft.vocab does not say it: that of its authors."""


def vocabulary_facts(ids: Tensor | None, counts: Tensor) -> dict[str, Any]:
    """What draftsmith.json records of a reduced vocabulary `ids` [Vd]; {} for the whole one (None)."""
    return {} if ids is None else {"vocabulary": vocab_mapping.describe(ids.cpu(), counts)}


def init_eagle1(s: DraftConfig, target: Target, device: str) -> tuple[EagleModel, Config]:
    """(net, its config.json)."""
    check_widths(target)
    if s.init:
        config = load_saved_config(s, "eagle1")
        return eagle.load(s.init, target, device, "float32").net, config
    config = eagle_layouts.eagle1_config(target.runner.config, target.runner.vocab_size)
    return random_init(Eagle1Model(llama_config(config), LMHead(target.runner.model))).to(
        device
    ), config


def init_eagle3(
    context: FamilyContext, counts: Tensor, mask_token: int | None = None
) -> tuple[EagleModel, Config]:
    """(net, its config.json). A new one drafts the most frequent tokens of `counts`, with the target's LM head rows.

    With a `mask_token` it is P-EAGLE.
    """
    s, target, device = context.config.draft, context.target, context.device
    check_widths(target)
    depth, vocab = target.runner.config.num_hidden_layers, target.runner.vocab_size
    if s.taps != sorted(set(s.taps)):
        raise UserError(f"draft.taps {s.taps}: name layers in rising order, each once")
    if s.init:
        config = load_saved_config(s, s.family)
        size, taps = config["draft_vocab_size"], list(eagle_layouts.aux_layers(config, depth))
        check_against_saved(
            s,
            vocab=0 if size == vocab else size,
            width=config["hidden_size"],
            taps=taps,
            norms=eagle_layouts.saved_norms(config),
            mask_token=config.get("mask_token_id"),
        )
        return eagle.load_net(s.init, target, device, "float32")[0], config
    layers = tuple(s.taps) or layouts.default_aux_layers(depth)
    ids = vocab_mapping.build(counts, s.vocab_size(vocab, DEFAULT_VOCAB), sorted(target.eos))
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
            size_of_states = hidden_state_rms(context, net.taps)
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
