"""EAGLE-1 and EAGLE-3 heads as drafts: one layer that goes on from the target's states, in chains or trees.

The head's K/V slot t holds the pair (state at t, token t + 1), one slot before the token's own. What a round's
drafts wrote there came from the head's states; the next proposal begins by writing all slots that the round may have
committed anew, from the target's. EAGLE-2 is EAGLE-1 or -3 with a DynamicTree.
"""

import torch

from decode import formats, published
from decode.attention import attention, over
from decode.cache import Nodes, Slots, Store
from decode.drafts.base import Draft, Proposal, Request, check_target, read_facts
from decode.drafts.eagle_net import Eagle1, Eagle3, EagleNet, llama_config
from decode.drafts.grow import grow, levels, prepare, reach
from decode.drafts.recent import Recent
from decode.settings import UserError
from decode.taps import Taps, head_of
from decode.target import DTYPES, PREFILL_CHUNK, Target


class EagleDraft(Draft):
    """A net, the target's embedding, and a K/V store of one layer."""

    def __init__(self, net: EagleNet, target: Target, name: str):
        self.net, self.name, self.taps = net.eval(), name, net.taps
        weight = net.fc.weight
        self.device, self.dtype = weight.device, weight.dtype
        embedding = target.decoder.model.get_input_embeddings().weight
        self.embedding = embedding.detach().to(self.device)
        self.vocab_size = target.decoder.vocab_size
        self.context = target.decoder.context
        hidden = target.decoder.config.hidden_size
        self.width = hidden * (len(net.taps.layers) + net.taps.final)
        self.held = 0, 0, 0

    def reach(self, k: int) -> int:
        return reach(self.shape, k)

    @torch.inference_mode()
    def begin(self, request: Request) -> None:
        self.request = request
        self.plan = prepare(self.shape, self.device)
        # A round commits at most its levels and the bonus; each is a pair that must be read from true states.
        count = levels(self.shape, request.k) + 1
        held = request.rows, request.size, count
        if held != self.held:  # equal shapes are used again: graphs know them by their addresses
            self.store = Store(1, request.rows, request.size, self.device)
            self.recent = Recent(request.rows, count, self.width, self.device, self.dtype)
            self.held = held

    def reserve(self, size: int) -> None:
        rows, held, count = self.held
        if held < size:
            self.store.grow(size)
            self.held = rows, size, count

    def stores(self) -> list[Slots]:
        return [self.store.slots]

    def admit(
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        """Fills the store from the prompt's pairs. The last one, whose token is yet to come, `propose` reads."""
        assert features is not None
        self.recent.seat(row, features, length)
        for start in range(0, prompts.shape[1] - 1, PREFILL_CHUNK):
            states = features[:, start : start + PREFILL_CHUNK]
            tokens = prompts[:, start + 1 : start + 1 + PREFILL_CHUNK]
            base = torch.full_like(length, start)
            slots = self.store.slots
            slots.place(base, tokens.shape[1], row=row, fresh=start == 0)
            self._forward(self.net.start(states[:, : tokens.shape[1]].to(self.dtype)), tokens)

    def absorb(self, features: torch.Tensor, count: torch.Tensor) -> None:
        self.recent.absorb(features, count)

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        count = len(self.recent.place)
        back = length[:, None] - count + self.recent.place
        tokens = history.gather(1, back.clamp_min(1))
        self.store.slots.place(length - 1 - count, count)
        state = self._forward(self.net.start(self.recent.states), tokens)[:, -1:]

        def step(
            tokens: torch.Tensor, length: torch.Tensor, nodes: Nodes | None, above: torch.Tensor
        ) -> torch.Tensor:
            nonlocal state
            before = state.gather(1, above[..., None].expand(-1, -1, state.shape[-1]))
            base = length - 1 if nodes is None else length - 2
            self.store.slots.place(base, tokens.shape[1], nodes=nodes)
            state = self._forward(before, tokens)
            return self._logits(state)

        return grow(step, self._logits(state)[:, 0], length, k, self.plan, self.request)

    def _forward(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States [b, T, h] and tokens [b, T] -> next states, at the places that were set in the store."""
        slots, layer = self.store.slots, self.store.static[0]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = layer.update(k, v)
            with over(slots):
                return attention(self.net, q, keys, values, None)[0]

        embeds = self.net.embed(tokens, self.embedding).to(self.dtype)
        # As the target's: beyond its context longrope would turn all rows by other frequencies.
        position = slots.position.clamp_max(self.context - 1)
        return self.net.step(state, embeds, position, attend)

    def _logits(self, state: torch.Tensor) -> torch.Tensor:
        """[b, T, V]: -inf for what the draft's vocabulary lacks."""
        logits = self.net.logits(state)
        if self.net.ids is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        full[..., self.net.ids] = logits
        return full


def load(path: str, target: Target, device: str, dtype: str) -> EagleDraft:
    """A head from a folder or from the Hub. UserError if it is not this target's, or not whole."""
    path = published.local(path)
    check_target(path, target)
    found = published.read(path)
    config, tensors = found.config, dict(found.tensors)
    facts = read_facts(path)
    formats.expect_family(path, found.family, facts.get("family", found.family))
    hidden = target.decoder.config.hidden_size
    formats.expect(path, config, {"vocab_size": target.decoder.vocab_size})
    own = "embed_tokens.weight"
    if own in tensors and _same(tensors[own], target.decoder.model.get_input_embeddings().weight):
        tensors.pop(own)  # a copy of the target's, which other trainers save along
    net: EagleNet
    if found.family == "eagle1":
        formats.expect(path, config, {"hidden_size": hidden})
        head = head_of(target.decoder.model, device, DTYPES[dtype])
        tensors.setdefault("fc.bias", torch.zeros(hidden))
        net = Eagle1(llama_config(config), head, own in tensors)
    else:
        formats.expect(path, config, {"target_hidden_size": hidden})
        for flag in formats.NORM_FLAGS:
            if (
                config[flag] and facts
            ):  # of those trained here none is; most add no tensor that would tell
                raise UserError(
                    f"draft {path!r} has {flag} true, and was trained here without: get it anew"
                )
        taps = Taps(formats.tapped_layers(config, target.decoder.config.num_hidden_layers))
        ids = formats.draft_ids(path, config, tensors)
        if ids is None and "lm_head.weight" not in tensors:  # then it is the target's
            tensors["lm_head.weight"] = target.decoder.model.get_output_embeddings().weight.detach()
        net = Eagle3(llama_config(config), taps, ids, own in tensors)
    formats.fill(net, path, tensors)
    return EagleDraft(net.to(device, DTYPES[dtype]), target, found.family)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two matrices hold equal values, in whatever dtype."""
    return a.shape == b.shape and torch.equal(a.float(), b.detach().cpu().float())
