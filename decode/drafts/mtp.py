"""Native multi-token prediction (MTP) layers as drafts, in chains or trees.

Targets such as DeepSeek-V3 and GLM-4.5 come with such a layer in their own files, which transformers does not load:
the target's folder is the draft's. The first layer drafts every token, each step from its own state of the step
before, as in serving engines; further layers, if there are any, are not read. vLLM hides the token at position 0 from
such a layer and feeds GLM's the state before the norm; transformers, and so this decoder, do neither.
"""

import warnings

import torch

from decode.checkpoints import importers, layouts
from decode.common.errors import UserError
from decode.drafts import mtp_model
from decode.drafts.base import check_target
from decode.drafts.eagle import EagleDraft
from decode.drafts.mtp_model import MtpModel
from decode.model.attention import forward_context
from decode.model.hidden_states import LMHead
from decode.model.loading import DTYPES, Target

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

    def _forward(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
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
    own = mtp_model.from_files(tensors, depth)
    if not own:
        raise UserError(f"draft {path!r} has no layer {depth}: get its files again")
    model = runner.model
    embedding, matrix = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    layouts.take_copy(path, own, mtp_model.EMBEDDING, embedding, "an embedding")
    layouts.take_copy(path, own, mtp_model.HEAD, matrix, "an output matrix")
    further = mtp_model.further_layers(tensors, depth)
    if further:
        warnings.warn(
            f"draft {path!r} has MTP layers {further} too, which are not read: layer {depth} drafts every token",
            stacklevel=2,
        )
    net = MtpModel(mtp_model.last_layer(runner.model), LMHead(runner.model, device, DTYPES[dtype]))
    layouts.load_parameters(net, path, own)
    for (
        parameter
    ) in net.parameters():  # buffers stay in fp32: the frequencies of RoPE, the biases of routers
        parameter.data = parameter.data.to(DTYPES[dtype])
    return net.to(device)
