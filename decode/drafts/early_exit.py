"""The target's own first layers as draft (self-speculation), as they are or with a trained exit adapter.

They use the target's own KV cache: it holds all committed tokens already, and verification overwrites what the draft
wrote for drafted tokens. With K drafted tokens and E of L layers a round passes K * E layers one token at a time and
all L layers once, in verification, for K + 1 tokens: K * E + L passes over a layer's weights, as in LayerSkip
(Elhoushi et al. 2024). LayerSkip also keeps the drafted tokens' states after layer E, so that its verification
computes the first E layers for one token only; here they are computed for all K + 1. That costs K * E layers for one
token each in arithmetic and no pass over weights. Each drafted token also passes the LM head.

LayerSkip trains the target itself for early exit. With an exit adapter, a small block for each token in front of the
LM head, the target stays as it is: only the adapter is trained, and the target's own pass never runs it.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decode.checkpoints import importers, layouts
from decode.checkpoints.draft_folder import check_target
from decode.common.errors import UserError
from decode.drafts.base import Draft, DraftContext, Proposal, Reads
from decode.drafts.drafting import ReducedVocab, build_tree_plan, decoder_step, draft_tokens
from decode.model.hidden_states import HiddenStateSpec
from decode.model.layer_stack import final_norm
from decode.model.linear import patch_linear_layers
from decode.model.loading import Target, place_network
from decode.verification.tree import TreeShape

# ---- exit adapter ----


class ExitAdapter(nn.Module):
    """norm(x + D (SiLU(G n(x)) * U n(x))) for each state x [..., H] that enters the target's layer E.

    It takes the place of the target's final norm, and `norm` is a module of that kind. D starts at zero and `norm` as
    the target's, so that an untrained adapter is the plain early exit. `ids` [Vd] are the target's ids of the tokens
    that are drafted, rising; None: all.
    """

    ids: Tensor | None

    def __init__(self, config: dict[str, Any], norm: nn.Module, ids: Tensor | None):
        super().__init__()
        width, inner = config["hidden_size"], config["exit_width"]
        self.config = config
        self.layers: int = config["exit_layer"]
        self.aux_layers = HiddenStateSpec((self.layers,))
        self.input_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.norm = norm
        self.register_buffer("ids", ids, persistent=False)
        for matrix in (self.gate_proj, self.up_proj):
            nn.init.normal_(matrix.weight, std=width**-0.5)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, state: Tensor) -> Tensor:
        """States [..., H] entering layer E -> inputs [..., H] of the LM head, in the dtype of the states."""
        x = state.to(self.input_norm.weight.dtype)
        normed = self.input_norm(x)
        inner = F.silu(self.gate_proj(normed)) * self.up_proj(normed)
        out: Tensor = self.norm(x + self.down_proj(inner))
        return out.to(state.dtype)


def copy_final_norm(model: Any) -> nn.Module:
    """The final norm of the causal LM `model` as a module of its own, in fp32 and trainable."""
    return copy.deepcopy(final_norm(model)).float().requires_grad_(True)


# ---- the draft ----


class EarlyExitDraft(Draft):
    """The first `layers` layers of the target, then its final norm or a trained `adapter` for that exit, and its LM
    head.

    Acceptance without an adapter is low on targets that were not trained for early exit.
    """

    def __init__(
        self,
        target: Target,
        layers: int,
        shape: TreeShape = None,
        adapter: ExitAdapter | None = None,
    ):
        """UserError unless 0 < layers < the target's number of layers."""
        self.target, self.reads = target, Reads(target=target)
        self.shape, self.adapter = shape, adapter
        self.name, self.vocab = "early-exit", None
        if adapter is None:
            self.runner = target.runner.first_layers(layers)
            return
        self.name = "layerskip"
        patch_linear_layers(adapter.eval())
        self.runner = target.runner.first_layers(layers, adapter, adapter.ids)
        if adapter.ids is not None:
            self.vocab = ReducedVocab(adapter.ids, target.runner.vocab_size)

    def begin_batch(self, request: DraftContext) -> None:
        self.request = request
        self.plan = build_tree_plan(self.shape, self.target.runner.device)
        self.runner.share_kv_cache(self.target.runner)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        last = history.gather(1, length[:, None] - 1)
        logits = self.runner.step(last, length - 1)[:, -1]
        step = decoder_step(self.runner)
        return draft_tokens(step, logits, length, k, self.plan, self.request, self.vocab)


def load(path: str, target: Target, device: str, dtype: str) -> EarlyExitDraft:
    """A trained exit from a folder or the Hub. UserError if it does not fit the target, and for a `device` that is not
    the target's: it runs the target's own layers."""
    check_device(path, target, device)
    adapter = load_adapter(path, target, device, dtype)
    return EarlyExitDraft(target, adapter.layers, adapter=adapter)


def load_own_exit(path: str, target: Target, device: str, dtype: str) -> EarlyExitDraft:
    """The first layers of a target that was trained for early exit (family `layerskip2`), which is in `path` itself.

    UserError if `target` is another one, which was not trained so, or on another `device`.
    """
    check_device(path, target, device)
    folder = importers.resolve_folder(path)
    check_target(folder, target)
    layers = layouts.read_config(folder).get("exit_layer")
    if type(layers) is not int:
        raise UserError(f"{path}/config.json has no exit_layer: train it again or restore the file")
    if target.name != path and Path(target.name).resolve() != Path(folder).resolve():
        raise UserError(
            f"draft {path!r} is a target that was trained for early exit, and the target is {target.name!r}: give "
            f"--target {path}, or the method early-exit with `layers: {layers}` for another target"
        )
    return EarlyExitDraft(target, layers)


def check_device(path: str, target: Target, device: str) -> None:
    """UserError unless `device` is that of the target, whose layers the draft runs."""
    place, own = torch.device(device), target.runner.device
    if place.type != own.type or place.index not in (None, own.index):
        raise UserError(
            f"draft {path!r} runs the target's own layers, which are on {own}: leave out its device {device}"
        )


def load_adapter(path: str, target: Target, device: str, dtype: str) -> ExitAdapter:
    """The adapter in a folder or on the Hub; UserError if it does not fit the target or tensors are missing."""
    path, found = importers.read_heads(path, target, "layerskip")
    own = target.runner.config
    wanted = {
        "hidden_size": own.hidden_size,
        "vocab_size": target.runner.vocab_size,
        "num_target_layers": own.num_hidden_layers,
    }
    layouts.check_config(path, found.config, wanted)
    ids = layouts.draft_to_target_ids(path, found.config, found.tensors)
    adapter = ExitAdapter(found.config, copy_final_norm(target.runner.model), ids)
    layouts.load_parameters(adapter, path, layouts.without_maps(found.tensors))
    placed: ExitAdapter = place_network(adapter, device, dtype)
    return placed
