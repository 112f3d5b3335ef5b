"""Encoder-decoders (T5) behind the same steps as causal LMs: a row is the prompt followed by the answer.

The encoder reads the prompt. The decoder reads its start token in the place of the prompt's last token, and then the
answer: token t of a row is at position t - (prompt length - 1) of the decoder. So nothing outside this file has to
know that there are two parts: logits at the prompt's last position predict the answer's first token.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationConfig

from decode.common.errors import UserError, first_line
from decode.model.compatibility import logits_agree, refusal
from decode.model.hidden_states import HiddenStateSpec
from decode.model.kv_cache import SlotMapping, StaticKVCache, TreeNodes
from decode.model.layer_stack import decoder_config
from decode.model.linear import begin_request
from decode.model.runner import ModelRunner

# ---- transformers' own code ----


def start_id(model: Any) -> int:
    """The token that the decoder of an encoder-decoder reads first. UserError if its configs name none."""
    for config in (model.generation_config, model.config):
        start = vars(config).get("decoder_start_token_id")
        if isinstance(start, int):
            return start
    raise UserError(
        f"this {model.config.model_type} model names no decoder_start_token_id: add it to generation_config.json"
    )


def prepare_generate(model: Any) -> None:
    """Changes the configs of `model`, which is not to be saved any more, so that `generate` caches all decoder layers
    and follows the settings of each call alone.

    transformers 5.23 makes a cache of as many layers as the encoder has, and ends in an IndexError where the decoder
    has more, also in an assistant, which makes its own cache. It takes what a call leaves open, such as a repetition
    penalty, from the generation_config.json of the model's folder.
    """
    start = vars(model.generation_config).get("decoder_start_token_id")
    model.generation_config = GenerationConfig(decoder_start_token_id=start)
    if model.config.is_encoder_decoder:
        layers = decoder_config(model).num_hidden_layers
        model.config.num_hidden_layers = max(model.config.num_hidden_layers, layers)


def generation_settings(
    model: Any,
    eos: Collection[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    **more: Any,
) -> GenerationConfig:
    """Settings of `generate` for a model after `prepare_generate`: greedy at temperature 0, else sampled from all
    tokens unless `top_k` or `top_p` say otherwise. Where they name no top_k, transformers takes 50."""
    if temperature > 0:
        more |= {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if model.config.is_encoder_decoder:
        more["decoder_start_token_id"] = start_id(model)
    return GenerationConfig(
        do_sample=temperature > 0,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(eos) or None,
        pad_token_id=0,
        **more,
    )


def generated_ids(model: Any, output: Tensor, prompt_tokens: int) -> list[int]:
    """The answer in a row [L] of what `generate` returns: behind the prompt, or behind the decoder's start token."""
    start = 1 if model.config.is_encoder_decoder else prompt_tokens
    ids: list[int] = output[start:].tolist()
    return ids


def decoder_inputs(model: Any, prompt: list[int]) -> tuple[list[int], dict[str, Any]]:
    """(ids that the decoder reads before the answer, further arguments of its forward): the prompt and none, or the
    start token and the encoder's output."""
    if not model.config.is_encoder_decoder:
        return prompt, {}
    tokens = torch.tensor([prompt], device=model.device)
    return [start_id(model)], {"encoder_outputs": model.get_encoder()(input_ids=tokens)}


def run_decoder(model: Any, tokens: Tensor, **arguments: Any) -> Any:
    """model's forward on tokens [B, T] of a causal LM or of a decoder, with the arguments of `decoder_inputs`."""
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    return model(**{name: tokens}, **arguments)


def answer_logits(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """[n, V] from which each of the n tokens of `answer` was chosen, by one pass over all."""
    before, arguments = decoder_inputs(model, prompt)
    tokens = torch.tensor([[*before, *answer]], device=model.device)
    logits: Tensor = run_decoder(model, tokens, use_cache=False, **arguments).logits
    return logits[0, len(before) - 1 : -1]


# ---- the encoder's output ----

STEP = 16
"""Buffers have a multiple of this many slots, as many as the longest prompt of the batch needs."""


class EncodedPrompts:
    """Cross-attention keys and values [B, H, S, D] of all decoder layers, for prompts of unequal length."""

    def __init__(self, layers: int, rows: int, device: torch.device):
        self.cache = StaticKVCache(layers, rows, STEP, device)
        self.length = torch.ones(rows, dtype=torch.long, device=device)
        """[B] tokens of each row's prompt; 1 in a row that has had none, which attends to zeros."""

    def write(self, row: Tensor, length: Tensor, computed: Cache) -> None:
        """Rows `row` [b] get the keys and values of prompts of `length` [b], padded on the right."""
        width = computed.layers[0].keys.shape[2]
        if width > self.cache.slots.size:
            self.cache.reserve(-(-width // STEP) * STEP)
        self.cache.write_rows(row, computed)
        self.length[row] = length

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, S] what is added to attention scores: 0 within a row's prompt, -inf behind it."""
        visible = self.cache.slots.every_slot < self.length[:, None]
        zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return zeros.masked_fill(~visible, float("-inf"))[:, None, None]


# ---- relative position bias ----


class RaggedPositionBias:
    """The relative position bias of a decoder's self-attention (T5, mT5). UserError for a decoder that has none."""

    def __init__(self, decoder: Any):
        self.modules = [m for m in decoder.modules() if "relative_attention_bias" in m._modules]
        if not self.modules:
            raise UserError(
                f"this {decoder.config.model_type} model cannot be decoded: its decoder has no relative position bias, "
                "so that rows of unequal length cannot be told apart; T5 and its kin (Flan-T5, mT5) can be"
            )
        self.tables, self.size = list[Tensor](), 0

    @torch.inference_mode()
    def compute_tables(self, size: int) -> None:
        """Computes the bias [size, H] by distance from the present weights, for buffers of `size` slots."""
        last_rows = [m.compute_bias(1, size, past_seen_tokens=size - 1) for m in self.modules]
        self.tables, self.size = [row[0, :, 0].flip(1).T.contiguous() for row in last_rows], size

    @contextmanager
    def for_slots(self, slots: SlotMapping) -> Iterator[None]:
        """While the block runs, the decoder's tokens have the positions of `slots` and see what these show."""
        distance, visible = slots.distances()  # [b, T, S]
        near = distance.clamp_min(0)

        def replace(
            table: Tensor, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            bias = table[near].permute(0, 3, 1, 2)  # [b, H, T, S]
            bias = bias.masked_fill(~visible[:, None], float("-inf"))
            return args, {**kwargs, "position_bias": bias}

        handles = [
            module.register_forward_pre_hook(partial(replace, table), with_kwargs=True)
            for module, table in zip(self.modules, self.tables, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


# ---- runner ----


class Seq2SeqRunner(ModelRunner):
    """One encoder-decoder, for rows of prompt and answer.

    `prefill` encodes the prompts and runs the decoder's start token. A step's `base` counts the tokens of prompt and
    answer, as for a causal LM; the decoder's own slots begin with the start token, at the prompt's last token.
    UserError for a model whose decoder cannot run rows of unequal length.
    """

    can_compile = False  # the buffers of cross-attention grow with the prompts

    def allocate(self, rows: int, size: int) -> None:
        super().allocate(rows, size)
        self.bias.compute_tables(size)
        self.encoded = EncodedPrompts(self.config.num_hidden_layers, rows, self.device)

    def capture_hidden_states(self, aux_layers: HiddenStateSpec | None) -> None:
        """UserError for any `aux_layers`: no family of heads is made for an encoder-decoder."""
        if aux_layers is not None:
            raise UserError(
                "the draft reads hidden states of a causal target, and this target is an encoder-decoder: draft with a "
                "smaller encoder-decoder, ngram, suffix or early-exit"
            )

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, length: Tensor, row: Tensor | None = None) -> Tensor:
        """Logits [b, V] of the answer's first token, for prompts [b, W] right-padded and of `length` [b]."""
        row = self.cache.slots.all_rows if row is None else row
        width = torch.arange(tokens.shape[1], device=self.device)
        own, cross = DynamicCache(), DynamicCache()
        logits = self.model(
            input_ids=tokens.clamp_max(self.embedding_rows - 1),
            attention_mask=(width < length[:, None]).long(),
            decoder_input_ids=torch.full_like(length, self.start)[:, None],
            use_cache=True,
            **{self.cache_name: EncoderDecoderCache(own, cross)},
        ).logits
        self.encoded.write(row, length, cross)
        self.cache.write_rows(row, own)
        return self.widen_logits(logits)[:, 0]

    def step(
        self, tokens: Tensor, base: Tensor, nodes: TreeNodes | None = None, last: int = 0
    ) -> Tensor:
        return super().step(tokens, self._decoder_slots(base), nodes, last)

    def compact_kv_cache(self, base: Tensor, path: Tensor) -> None:
        super().compact_kv_cache(self._decoder_slots(base), path)

    def share_kv_cache(self, owner: ModelRunner) -> None:
        super().share_kv_cache(owner)
        assert isinstance(owner, Seq2SeqRunner)
        self.encoded = owner.encoded

    def prepare_model(self) -> None:
        self.start = start_id(self.model)
        self.bias = RaggedPositionBias(self.model.get_decoder())

    def try_model(self) -> None:
        """UserError unless ragged steps give the logits of transformers' own passes."""
        lengths, answer = (3, 1), [0, 1, 0, 1]
        tokens = torch.zeros(2, max(lengths), dtype=torch.long, device=self.device)
        length = torch.tensor(lengths, device=self.device)
        fed = torch.tensor([answer, answer], device=self.device)
        begin_request()  # weights may have been trained since they were packed
        try:
            self.allocate(2, 16)
            self.prefill(tokens, length)
            with torch.inference_mode():
                # one token first, so that the second step finds K/V in the buffers
                parts = [self.step(fed[:, :1], length), self.step(fed[:, 1:], length + 1)]
                found = torch.cat(parts, 1)
                own = torch.tensor([[self.start, *answer]], device=self.device)
                expected = [
                    self.model(input_ids=tokens[:1, :count], decoder_input_ids=own).logits[0, 1:]
                    for count in lengths
                ]
        except Exception as error:  # whatever the code of a model raises
            raise refusal(self.config, f"fails in a trial pass: {first_line(error)}") from error
        wanted = self.widen_logits(torch.stack(expected))
        if not wanted.isfinite().any():
            raise refusal(self.config, "gives NaN or infinite logits: its weights are damaged")
        if not logits_agree(found, wanted, self.model.dtype):
            raise refusal(
                self.config, "computes other logits for rows of unequal length than for one row"
            )
        self.cache = self.make_cache(0, 0)

    def _decoder_slots(self, base: Tensor) -> Tensor:
        """[B] of slots `base` [B] of rows of prompt and answer. Below 0: before the start token, which is repeated."""
        return base - (self.encoded.length - 1)

    def _forward(self, tokens: Tensor, last: int = 0) -> Tensor:
        slots = self.cache.slots
        if self.bias.size < slots.size:  # the buffers were enlarged
            self.bias.compute_tables(slots.size)
        tokens = tokens.clamp_max(self.embedding_rows - 1)
        tokens = torch.where(slots.position <= 0, self.start, tokens)
        cache = EncoderDecoderCache(self.cache, self.encoded.cache)
        cache.is_updated = dict.fromkeys(cache.is_updated, True)  # nothing is left to encode
        mask = self.encoded.mask(self.model.dtype)
        with self.bias.for_slots(slots):
            logits = self.model(
                decoder_input_ids=tokens,
                # Only its presence is read: keys and values of the prompts are cached.
                encoder_outputs=(mask.new_zeros(len(tokens), 1, self.config.hidden_size),),
                attention_mask=mask,
                # 4 dimensions: transformers adds no causal mask, which `bias` brings
                decoder_attention_mask=mask.new_zeros(1, 1, 1, 1),
                use_cache=True,
                **{self.cache_name: cache},
            ).logits
        return self.widen_logits(logits)
