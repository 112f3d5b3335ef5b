"""Medusa heads: small residual blocks on the target's last hidden state, one for each position (Cai et al. 2024)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decode.checkpoints import importers, layouts
from decode.common.errors import UserError
from decode.drafts.base import Draft, DraftBuffers, DraftContext, Proposal, Reads
from decode.drafts.drafting import build_tree_plan, draft_tokens
from decode.model.hidden_states import HiddenStateBuffer, HiddenStateSpec
from decode.model.kv_cache import TreeNodes
from decode.model.linear import patch_linear_layers
from decode.model.loading import Target, place_network
from decode.verification.tree import max_depth


class MedusaResBlock(nn.Module):
    """h + SiLU(W h + b), `layers` times. It starts as the identity: W and b are zero."""

    def __init__(self, width: int, layers: int, bias: bool = True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, state: Tensor) -> Tensor:
        for layer in self.layers:
            state = state + F.silu(layer(state))
        return state


class MedusaModel(nn.Module):
    """K heads. Head j (from 0) reads the final hidden state at t and gives the logits of token t + 2 + j.

    Parameters have the names that serving engines load. With `original_lm_head` in config.json all heads share one
    output matrix, that of the target.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        width, vocab, heads = config["hidden_size"], config["vocab_size"], config["num_heads"]
        self.config = config
        self.aux_layers = HiddenStateSpec(final=True)
        layers, bias = config["num_hidden_layers"], config["medusa_fc_bias"]
        self.blocks = nn.ModuleList(MedusaResBlock(width, layers, bias) for _ in range(heads))
        matrices = 1 if config["original_lm_head"] else heads
        self.lm_heads = nn.ModuleList(nn.Linear(width, vocab, bias=False) for _ in range(matrices))

    def states(self, features: Tensor, head: int) -> Tensor:
        """[..., H] from final hidden states [..., H]: what that head projects to the vocabulary."""
        return self.blocks[head](features)

    def logits(self, features: Tensor, head: int) -> Tensor:
        """[..., V] of that head, from final hidden states [..., H]."""
        return self.lm_heads[head % len(self.lm_heads)](self.states(features, head))


class MedusaDraft(Draft):
    """All heads read the target's hidden state before the last committed token; none sees what another drafted."""

    def __init__(self, net: MedusaModel, target: Target, name: str = "medusa"):
        self.net, self.name = net.eval(), name
        self.reads = Reads(net.aux_layers, target)
        patch_linear_layers(net)
        self.width = target.runner.config.hidden_size
        self.allocated_rows, self.state = 0, list[Tensor]()

    @torch.inference_mode()
    def begin_batch(self, request: DraftContext) -> None:
        heads = len(self.net.blocks)
        if max_depth(self.shape, request.k) > heads:
            raise UserError(
                f"draft {self.name!r} has {heads} heads: give k (or a tree) of at most {heads}"
            )
        weight = next(self.net.parameters())
        self.request = request
        self.plan = build_tree_plan(self.shape, weight.device)
        if self.allocated_rows != request.rows:
            self.state_buffer = HiddenStateBuffer(
                request.rows, 1, self.width, weight.device, weight.dtype
            )
            self.allocated_rows, self.state = request.rows, [self.state_buffer.states]

    def buffers(self) -> DraftBuffers:
        return DraftBuffers([self], self, state=self.state)

    def prefill(
        self, row: Tensor, prompts: Tensor, length: Tensor, features: Tensor | None
    ) -> None:
        assert features is not None
        self.state_buffer.reset_rows(row, features, length)

    def update_hidden_states(self, features: Tensor, count: Tensor) -> None:
        self.state_buffer.update_hidden_states(features, count)

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        state = self.state_buffer.states[:, 0]
        head = 0

        def step(tokens: Tensor, length: Tensor, nodes: TreeNodes | None, above: Tensor) -> Tensor:
            nonlocal head
            head += 1
            return self.net.logits(state, head)[:, None].expand(-1, tokens.shape[1], -1)

        return draft_tokens(step, self.net.logits(state, 0), length, k, self.plan, self.request)


def load(path: str, target: Target, device: str, dtype: str) -> MedusaDraft:
    """Heads from a folder or the Hub. UserError if they do not fit the target or tensors are missing."""
    path, found = importers.read_heads(path, target, "medusa")
    config, tensors = found.config, found.tensors
    head = target.runner.model.get_output_embeddings().weight.detach()
    if config["original_lm_head"] and "lm_heads.0.weight" not in tensors:
        tensors = tensors | {"lm_heads.0.weight": head}
        config = layouts.HeadConfig(config | {"vocab_size": head.shape[0]})
    hidden = target.runner.config.hidden_size
    layouts.check_config(
        path, config, {"hidden_size": hidden, "vocab_size": target.runner.vocab_size}
    )
    net = MedusaModel(config)
    layouts.load_parameters(net, path, tensors)
    return MedusaDraft(place_network(net, device, dtype), target)
