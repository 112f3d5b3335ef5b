"""Native multi-token prediction (MTP) layers as drafts, in chains or trees (DeepSeek-AI, arXiv 2412.19437, 2.2).

At slot t the layer, of the target's own kind, reads the target's state f_t after the final norm and the token x_{t+1},
as EAGLE-1 does: W [enorm(e); hnorm(f)] passes one decoder layer and a norm of its own, and the target's LM head gives
the logits of x_{t+2}. The normed output is the state of the next step.

Targets such as DeepSeek-V3 and GLM-4.5 come with such a layer in their own files, which transformers does not load:
the target's folder is the draft's. The first layer drafts every token, each step from its own state of the step
before, as in serving engines; further layers, if there are any, are not read. Some of them hide the token at position 0
from such a layer and feed GLM's the state before the norm; transformers, and so this decoder, do neither.
"""

import copy
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decode.checkpoints import importers, layouts
from decode.checkpoints.draft_folder import check_target
from decode.common.errors import UserError
from decode.drafts.eagle import EagleDraft
from decode.model.attention import forward_context
from decode.model.compatibility import cache_name, context_length
from decode.model.hidden_states import HiddenStateSpec, LMHead
from decode.model.layer_stack import layer_stack, renumber_layers, with_layers
from decode.model.loading import DTYPES, Target
from decode.model.quantized.conversion import quantize_network
from decode.model.recurrent import has_recurrent_layers

# ---- network ----

NAMES_IN_FILES = {
    "fc.weight": "eh_proj.weight",
    "decoder.norm.weight": "shared_head.norm.weight",
    "decoder.norm.bias": "shared_head.norm.bias",
}
"""Names of DeepSeek's checkpoints for parameters whose names are others here."""
OWN_LAYER = "decoder.layers.0."
EMBEDDING, HEAD = "embed_tokens.weight", "shared_head.head.weight"
"""In files, copies of the target's."""
Tensors = dict[str, Tensor]


class MtpModel(nn.Module):
    """`decoder` is a model of the target's kind with one layer; `head` the target's LM head, no part of this model."""

    ids: None = None

    def __init__(self, decoder: Any, head: Callable[[Tensor], Tensor]):
        super().__init__()
        width = decoder.config.hidden_size
        self.aux_layers, self.head = HiddenStateSpec(final=True), head
        self.enorm, self.hnorm = copy.deepcopy(decoder.norm), copy.deepcopy(decoder.norm)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.decoder, self.max_positions = decoder, context_length(decoder.config)
        self.cache_name = cache_name(decoder)

    @property
    def layers(self) -> nn.ModuleList:
        return layer_stack(self.decoder)

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """[..., H] of token ids; `weight` is the target's embedding."""
        return F.embedding(tokens, weight)

    def init_state(self, features: Tensor) -> Tensor:
        """The target's hidden states [..., H] unchanged."""
        return features

    def forward(self, state: Tensor, embeds: Tensor, position: Tensor, cache: Any) -> Tensor:
        """States and embeddings [B, T, H] at `position` [B, T] -> the states of the next tokens, normed.

        Keys and values go into `cache`; what attends to what is said by decode/model/attention.py.
        """
        pairs = self.fc(torch.cat([self.enorm(embeds), self.hnorm(state)], -1))
        out: Tensor = self.decoder(
            inputs_embeds=pairs, position_ids=position, use_cache=True, **{self.cache_name: cache}
        ).last_hidden_state
        return out

    def logits(self, state: Tensor) -> Tensor:
        """[..., V] from a state that `forward` returned."""
        return self.head(state)


def last_layer(model: Any) -> Any:
    """A copy of the decoder of the causal LM `model` with its last layer and final norm, in fp32.

    It has no embedding. UserError for a model whose final norm is not called `norm`, as in GPT-2, or whose last layer
    is recurrent.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder = with_layers(model, [depth - 1]).get_decoder()
    if not {"layers", "norm"} <= set(decoder._modules):
        raise UserError(
            f"{model.config.model_type} names its layers and its final norm in a way that MTP layers are not written "
            "for: train an EAGLE head for it"
        )
    decoder.set_input_embeddings(nn.Identity())
    decoder = copy.deepcopy(decoder).float()
    renumber_layers(decoder, [depth - 1])
    if has_recurrent_layers(decoder.config):
        raise UserError(
            f"the last layer of this {model.config.model_type} model is recurrent, and an MTP layer like it could not "
            "take back what it drafted: train an EAGLE head or a causal draft"
        )
    return decoder


# ---- names in files ----


def to_files(tensors: Mapping[str, Tensor], number: int) -> Tensors:
    """The state dict of an MtpModel under the names of checkpoints, as layer `number` of its target.

    Experts that transformers keeps in one tensor are written one by one.
    """
    found: Tensors = {}
    for name, value in tensors.items():
        name = NAMES_IN_FILES.get(name, name.removeprefix(OWN_LAYER))
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj" and value.ndim == 3:
            for i, both in enumerate(value):
                gate, up = both.chunk(2)
                found |= {f"{stem}.{i}.gate_proj.weight": gate, f"{stem}.{i}.up_proj.weight": up}
        elif last == "down_proj" and value.ndim == 3:
            found |= {f"{stem}.{i}.down_proj.weight": one for i, one in enumerate(value)}
        else:
            found[name] = value
    return {f"model.layers.{number}.{name}": value.clone() for name, value in found.items()}


def from_files(tensors: Mapping[str, Tensor], number: int) -> Tensors:
    """The inverse of `to_files`; an embedding and an LM head of the layer, if there are any, as EMBEDDING and HEAD."""
    back = {theirs: ours for ours, theirs in NAMES_IN_FILES.items()}
    prefix = f"layers.{number}."
    own: Tensors = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for full, value in tensors.items():
        name = full.removeprefix("model.")
        if not name.startswith(prefix):
            continue
        name = name.removeprefix(prefix)
        if name in (EMBEDDING, HEAD):
            own[name] = value
            continue
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if expert:
            experts.setdefault(f"{OWN_LAYER}{expert[1]}.{expert[3]}", {})[int(expert[2])] = value
        elif name in back or name.startswith(("enorm.", "hnorm.")):
            own[back.get(name, name)] = value
        else:
            own[OWN_LAYER + name] = value
    stacked = {name: torch.stack([one[i] for i in sorted(one)]) for name, one in experts.items()}
    for name, value in stacked.items():
        stem, _, part = name.rpartition(".")
        if part == "down":
            own[f"{stem}.down_proj"] = value
        elif part == "gate":
            own[f"{stem}.gate_up_proj"] = torch.cat([value, stacked[f"{stem}.up"]], 1)
    return own


# ---- the draft ----

LAYER_FIELDS = (
    "hidden_act",
    "rms_norm_eps",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
)
"""Settings of the layer, which is built as the target's own: a file that has others was trained for another target."""


class MtpDraft(EagleDraft):
    """An EagleDraft whose layer is of the target's own kind and writes its keys and values itself."""

    net: MtpModel  # type: ignore[assignment]

    def _forward(self, state: Tensor, tokens: Tensor) -> Tensor:
        embeds = self.net.embed(tokens, self.embedding).to(self.dtype)
        with forward_context(self.kv_cache.slots):
            return self.net(state, embeds, self._positions(), self.kv_cache)


def load(path: str, target: Target, device: str, dtype: str) -> MtpDraft:
    """The MTP layer in the folder of a target or of a draft. UserError if it does not fit the target."""
    return MtpDraft(load_net(path, target, device, dtype), target, "mtp")


def load_net(path: str, target: Target, device: str, dtype: str) -> MtpModel:
    """The network of such a layer; UserError as in `load`."""
    path = importers.resolve_folder(path)
    check_target(path, target)
    runner = target.runner
    depth, tensors = runner.config.num_hidden_layers, importers.plain_tensors(path)
    layouts.check_family(path, importers.detect_family(tensors), "mtp")
    wanted = {
        "vocab_size": runner.vocab_size,
        "hidden_size": runner.config.hidden_size,
        "num_hidden_layers": depth,
    }
    config, own_config = layouts.read_config(path), runner.config.to_dict()
    shared = [key for key in LAYER_FIELDS if None not in (config.get(key), own_config.get(key))]
    layouts.check_config(path, config, wanted | {key: own_config[key] for key in shared})
    own = from_files(tensors, depth)
    if not own:
        raise UserError(f"draft {path!r} has no layer {depth}: get its files again")
    model = runner.model
    layouts.take_copy(path, own, EMBEDDING, model.get_input_embeddings(), "an embedding")
    layouts.take_copy(path, own, HEAD, model.get_output_embeddings(), "an output matrix")
    layer_name = re.compile(r"(?:model\.)?layers\.(\d+)\.")
    further = sorted({int(m[1]) for name in tensors if (m := layer_name.match(name))} - {depth})
    if further:
        warnings.warn(
            f"draft {path!r} has MTP layers {further} too, which are not read: layer {depth} drafts every token",
            stacklevel=2,
        )
    net = MtpModel(last_layer(runner.model), LMHead(runner.model, device, DTYPES[dtype]))
    layouts.load_parameters(net, path, own)
    for (
        parameter
    ) in net.parameters():  # buffers stay in fp32: the frequencies of RoPE, the biases of routers
        parameter.data = parameter.data.to(DTYPES[dtype])
    net = net.to(device)
    quantize_network(net, dtype)
    return net
