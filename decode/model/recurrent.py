"""Causal LMs with recurrent layers (Mamba, gated delta rule, short convolutions), alone or beside attention.

A state is a sum over all tokens that were read, from which rejected ones cannot be taken out. So a step of more than
one token begins with a copy of all states; the next step restores those of the rows in which tokens were rejected and
reads the accepted ones again. Nothing outside this file has to know it: the `base` of the next step says what was
accepted.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from decode.common.errors import UserError, first_line
from decode.model import attention
from decode.model.compatibility import (
    check_recurrent,
    check_trial_pass,
    logits_agree,
    refusal,
    use_grouped_experts,
)
from decode.model.kv_cache import SlotMapping, StaticKVCache, StaticKVLayer, TreeNodes
from decode.model.linear import begin_request
from decode.model.runner import ModelRunner, logits_only_at

# ---- cache ----

States = dict[tuple[int, str, int], Tensor]
"""States [B, ...] of all recurrent layers, by (number of the layer, "conv" or "recurrent", number within the layer)."""
KNOWN_ATTENTION = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""The cache layers of transformers for the kinds of attention that are supported, by their exact class."""


def has_recurrent_layers(config: Any) -> bool:
    """Whether transformers' own cache for this text `config` has recurrent layers. False for layer types that it does
    not know."""
    try:
        layers = own_layers(config)
    except KeyError:
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def unknown_attention(config: Any) -> list[str]:
    """The classes of transformers' cache layers for this text `config` that hold keys and values in an unknown way."""
    held = [layer for layer in own_layers(config) if isinstance(layer, CacheLayerMixin)]
    return sorted({type(x).__name__ for x in held if type(x) not in KNOWN_ATTENTION})


def own_layers(config: Any) -> list[Any]:
    """The layers, all empty, of the cache that transformers makes for this text `config`."""
    layers: list[Any] = DynamicCache(config=config).layers
    return layers


class RecurrentAttentionLayer(LinearAttentionLayer, StaticKVLayer):
    """The cache of a layer that has both, side by side (Falcon-H1) or one after the other (Zamba)."""

    def __init__(self, slots: SlotMapping, number_of_states: int):
        StaticKVLayer.__init__(self, slots)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *key_and_value: Tensor, **states: Any) -> None:
        """Allocates the K/V buffers if it is given a key and a value, else the states."""
        if key_and_value:
            StaticKVLayer.lazy_initialization(self, *key_and_value)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)


class HybridCache(StaticKVCache):
    """K/V buffers as in StaticKVCache for layers with attention; one state a row in recurrent layers, which have
    transformers' own cache layers. These allocate their states in the first forward, of all rows."""

    def __init__(self, config: Any, rows: int, size: int, device: torch.device):
        self.slots = SlotMapping(rows, size, device)
        layers = [self._layer(own) for own in own_layers(config)]
        self.kv_layers = [layer for layer in layers if isinstance(layer, StaticKVLayer)]
        self.recurrent = [x for x in layers if isinstance(x, LinearAttentionCacheLayerMixin)]
        Cache.__init__(self, layers=layers)

    def _layer(self, own: Any) -> Any:
        """What stands in the place of transformers' layer `own`: it itself where nothing or only a state is cached."""
        if not isinstance(own, CacheLayerMixin):
            return own
        if isinstance(own, LinearAttentionCacheLayerMixin):
            return RecurrentAttentionLayer(self.slots, own.number_of_states)
        return StaticKVLayer(self.slots)

    def row_bytes(self, slots: int) -> int:
        """Those of K and V, and those of the row's states, which do not grow."""
        states = sum(x.nbytes for x in self.states().values())
        return super().row_bytes(slots) + states // self.slots.rows

    def states(self) -> States:
        """The states of all rows, not copied: a forward changes them in place."""
        found: States = {}
        for number, layer in enumerate(self.recurrent):
            for kind, held in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                found |= {(number, kind, i): x for i, x in held.items() if x is not None}
        return found

    def set_states(self, states: States) -> None:
        """Makes later forwards read and change these states."""
        for (number, kind, i), state in states.items():
            layer = self.recurrent[number]
            held = layer.conv_states if kind == "conv" else layer.recurrent_states
            held[i] = state

    @contextmanager
    def only_rows(self, row: Tensor) -> Iterator[None]:
        """In the block forwards are of rows `row` [b] alone; the states of the others stay as they are."""
        every = self.states()
        self.set_states(rows_of(every, row))
        try:
            yield
        finally:
            set_rows(every, row, self.states())
            self.set_states(every)


def copy_states(states: States) -> States:
    """A copy that no forward changes."""
    return {key: state.clone() for key, state in states.items()}


def rows_of(states: States, row: Tensor) -> States:
    """A copy of rows `row` [b]."""
    return {key: state[row] for key, state in states.items()}


def set_rows(states: States, row: Tensor, given: States) -> None:
    """Writes states `given` of b rows to rows `row` [b] of `states`."""
    for key, state in states.items():
        state[row] = given[key]


def clear_rows(states: States, row: Tensor) -> None:
    """Sets rows `row` [b] to what they are before the first token: zeros."""
    for state in states.values():
        state[row] = 0


# ---- runner ----


class RecurrentRunner(ModelRunner):
    """One causal LM with recurrent layers, for rows of unequal length and chains.

    A step of more than one token keeps a copy of all states before it. The next step's `base` tells how many of its
    tokens were accepted in each row: if not all, the row's states are restored and its accepted tokens read again, the
    rows with equally many in one forward. A step of one token is never taken back, because the engine has committed its
    token: only a row that has ended stands still then, and what it computes means nothing.
    UserError for a model whose states are not in the caches of transformers.
    """

    can_compile = False  # the host reads how many tokens were accepted
    takes_trees = False
    cache: HybridCache

    def make_cache(self, rows: int, size: int) -> HybridCache:
        return HybridCache(self.config, rows, size, self.device)

    @torch.inference_mode()
    def allocate(self, rows: int, size: int) -> None:
        is_new = (rows, size) != self.shape
        super().allocate(rows, size)
        first = torch.zeros(rows, dtype=torch.long, device=self.device)
        if is_new:  # one token, so that the layers allocate their states
            self.cache.slots.set_positions(first, 1)
            try:
                self._forward(first[:, None])
            except BaseException:
                self.cache = self.make_cache(0, 0)  # some layers have no states
                raise
        clear_rows(self.cache.states(), self.cache.slots.all_rows)
        self.before: States = {}  # the states before the last step, if that had more than one token
        self.read = first[:, None]  # [B, T] the tokens of the last step
        self.end = first  # [B] tokens that a row's states have read

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, length: Tensor, row: Tensor | None = None) -> Tensor:
        """Logits [b, V] of each row's last prompt token, for tokens [b, W] right-padded and length [b].

        A state must not read padding: prompts of equal length are read together, the others one after the other.
        """
        rows = self.cache.slots.all_rows if row is None else row
        logits, features = None, None
        for count, members in group_by(length.tolist()).items():
            at = torch.tensor(members, device=self.device)
            clear_rows(self.cache.states(), rows[at])
            with self.cache.only_rows(rows[at]):
                found = super().prefill(tokens[at, :count], length[at], rows[at])
            if logits is None:
                logits = found.new_zeros(len(tokens), found.shape[1])
            logits[at] = found
            if self.hidden_state_hooks is not None:
                if features is None:
                    features = self.features.new_zeros(*tokens.shape, self.features.shape[-1])
                features[at, :count] = self.features
        if features is not None:
            self.features = features
        self.end[rows] = length
        assert logits is not None
        return logits

    def step(
        self, tokens: Tensor, base: Tensor, nodes: TreeNodes | None = None, last: int = 0
    ) -> Tensor:
        """As in ModelRunner; `base` also tells which tokens of the last step were accepted. UserError for a tree."""
        if nodes is not None:
            self._refuse("token trees need a state for each node")
        self._take_back(base)
        self.before = copy_states(self.cache.states()) if tokens.shape[1] > 1 else {}
        self.read, self.end = tokens, base + tokens.shape[1]
        return super().step(tokens, base, None, last)

    def _take_back(self, base: Tensor) -> None:
        """Makes the states those after the first `base` [B] tokens of each row."""
        if not self.before:
            return
        width = self.read.shape[1]
        start = self.end - width
        for count, members in group_by((base - start).tolist()).items():
            if count == width:  # all accepted, or a row that prefill has set since
                continue
            row = torch.tensor(members, device=self.device)
            set_rows(self.cache.states(), row, rows_of(self.before, row))
            if count > 0:
                self._read_again(self.read[row, :count], start[row], row)

    def _read_again(self, tokens: Tensor, base: Tensor, row: Tensor) -> None:
        """Runs tokens [b, T] of rows `row` [b] for their states alone, after the first `base` [b] of each."""
        self.cache.slots.set_positions(base, tokens.shape[1], row=row)
        with self.cache.only_rows(row), logits_only_at(self.model, lambda hidden: hidden[:, :0]):
            self._forward(tokens)

    def read_rows(self, tokens: Tensor, base: Tensor, row: Tensor) -> Tensor:
        """Logits [b, V] after tokens [b, T] that come after the first `base` [b] of rows `row` [b] and are committed: a
        draft reads so what the target has accepted."""
        self.cache.slots.set_positions(base, tokens.shape[1], row=row)
        with self.cache.only_rows(row):
            return self._forward(tokens, last=1)[:, -1]

    def first_layers(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("drafting with its own layers would change the states that they share")

    def with_model(self, model: Any) -> NoReturn:
        self._refuse("drafting with its own layers would change the states that they share")

    def _refuse(self, reason: str) -> NoReturn:
        raise UserError(
            f"this {self.config.model_type} target has recurrent layers, and {reason}: draft chains with ngram, "
            "suffix, a causal draft or heads"
        )

    def prepare_model(self) -> None:
        config = self.model.config.get_text_config(decoder=True)
        self.attention_layers = sum(isinstance(x, CacheLayerMixin) for x in own_layers(config))
        if unknown_attention(config):
            names = ", ".join(unknown_attention(config))
            raise refusal(
                config, f"caches keys and values in a way that is not known here ({names})"
            )
        check_recurrent(self.model, self.attention_layers > 0)
        if self.attention_layers > 0:
            self.model.set_attn_implementation(attention.ATTENTION_NAME)
        use_grouped_experts(self.model)
        unclamp_time_steps(self.model)
        self.takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters

    def model_arguments(self, position: Tensor) -> dict[str, Any]:
        """As in ModelRunner; Mamba's forward takes no positions."""
        positions = {"position_ids": position} if self.takes_positions else {}
        return {self.cache_name: self.cache, **positions}

    @torch.inference_mode()
    def try_model(self) -> None:
        """UserError unless steps with rejected tokens, in rows of unequal length, give the logits of plain passes."""
        if self.attention_layers > 0:
            check_trial_pass(self.model, self.attention_layers)
        text = torch.arange(1, 11, device=self.device) % self.embedding_rows
        length = torch.tensor([3, 1], device=self.device)
        kept = torch.tensor([1, 3], device=self.device)
        place = torch.arange(3, device=self.device)
        rejected = torch.zeros(2, 3, dtype=torch.long, device=self.device)
        begin_request()  # weights may have been trained since they were packed
        try:
            plain = self.model(input_ids=text[None], use_cache=False).logits
            if not plain.isfinite().all():
                raise refusal(self.config, "gives NaN or infinite logits: its weights are damaged")
            if not self._continues_states():
                raise refusal(
                    self.config,
                    "reads several tokens at once as if nothing stood before them in its recurrent layers (Mamba-1 in "
                    "transformers), so that one pass cannot verify a draft",
                )
            self.allocate(2, 16)
            found = [self.prefill(text.expand(2, -1)[:, :3], length)[:, None]]
            at = length[:, None] + place
            self.step(torch.where(place < kept[:, None], text[at], rejected), length)
            found.append(self.step(text[at + kept[:, None]], length + kept))
        except UserError:
            raise
        except Exception as error:  # whatever the code of a model raises
            raise refusal(self.config, f"fails in a trial pass: {first_line(error)}") from error
        after = torch.cat([length[:, None] - 1, at + kept[:, None]], 1)
        wanted = self.widen_logits(plain)[0, after]
        if not logits_agree(torch.cat(found, 1), wanted, self.model.dtype):
            raise refusal(self.config, "computes other logits in steps than in one pass")
        self.cache = self.make_cache(0, 0)

    def _continues_states(self) -> bool:
        """Whether two tokens read at once and one by one, from states that are not zero, end in the same states."""
        tokens = torch.arange(2, device=self.device)[None]
        self.allocate(1, 16)
        ends = []
        for width in (1, 2):
            for state in self.cache.states().values():
                state.copy_(torch.linspace(-1, 1, state.numel()).view_as(state))
            for at in range(0, 2, width):
                self.cache.slots.set_positions(torch.full_like(tokens[0, :1], at), width)
                self._forward(tokens[:, at : at + width])
            ends.append(copy_states(self.cache.states()))
        one_by_one, together = ends
        dtype = self.model.dtype
        return all(logits_agree(x, together[key], dtype) for key, x in one_by_one.items())


def unclamp_time_steps(model: Any) -> None:
    """Lets Mamba-2 layers take time steps of any length in every pass.

    transformers (5.17 to 5.24) clamps them in passes over several tokens and not in passes over one: plain decoding and
    verification would be of two models.
    """
    for module in model.modules():
        if "time_step_limit" in vars(module):
            module.time_step_limit = (0.0, float("inf"))


def group_by(values: list[int]) -> dict[int, list[int]]:
    """{value: the indices at which it stands}."""
    groups: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(value, []).append(index)
    return groups
