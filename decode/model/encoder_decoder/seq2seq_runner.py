"""An encoder-decoder of transformers with its own K/V caches: prefill and decode steps in fixed shapes."""

from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from decode.common.errors import UserError, first_line
from decode.model.compatibility import logits_agree
from decode.model.encoder_decoder.encoded_prompts import EncodedPrompts
from decode.model.encoder_decoder.plain_passes import start_id
from decode.model.encoder_decoder.ragged_positions import RaggedPositionBias
from decode.model.hidden_states import HiddenStateSpec
from decode.model.kv_cache import TreeNodes
from decode.model.layer_stack import decoder_config
from decode.model.linear.packed_linear import begin_request
from decode.model.recurrent.hybrid_cache import has_recurrent_layers
from decode.model.recurrent.recurrent_runner import RecurrentRunner
from decode.model.runner import ModelRunner
from decode.model.vision.vision_runner import VisionRunner, is_vision_language


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

    def reserve(self, size: int) -> None:
        super().reserve(size)
        self.bias.compute_tables(self.shape[1])

    def capture_hidden_states(self, taps: HiddenStateSpec | None) -> None:
        """UserError for any `taps`: no family of heads is made for an encoder-decoder."""
        if taps is not None:
            raise UserError(
                "the draft reads hidden states of a causal target, and this target is an encoder-decoder: draft with a "
                "smaller encoder-decoder, ngram, suffix or early-exit"
            )

    @torch.inference_mode()
    def prefill(
        self, tokens: torch.Tensor, length: torch.Tensor, row: torch.Tensor | None = None
    ) -> torch.Tensor:
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
        self,
        tokens: torch.Tensor,
        base: torch.Tensor,
        nodes: TreeNodes | None = None,
        last: int = 0,
    ) -> torch.Tensor:
        return super().step(tokens, self._decoder_slots(base), nodes, last)

    def compact_kv_cache(self, base: torch.Tensor, path: torch.Tensor) -> None:
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
            raise self._refusal(f"fails in a trial pass: {first_line(error)}") from error
        wanted = self.widen_logits(torch.stack(expected))
        if not wanted.isfinite().any():
            raise self._refusal("gives NaN or infinite logits: its weights are damaged")
        if not logits_agree(found, wanted, self.model.dtype):
            raise self._refusal("computes other logits for rows of unequal length than for one row")
        self.shape = 0, 0

    def _refusal(self, reason: str) -> UserError:
        return UserError(f"this {self.config.model_type} model cannot be decoded: it {reason}")

    def _decoder_slots(self, base: torch.Tensor) -> torch.Tensor:
        """[B] of slots `base` [B] of rows of prompt and answer. Below 0: before the start token, which is repeated."""
        return base - (self.encoded.length - 1)

    def _forward(self, tokens: torch.Tensor, last: int = 0) -> torch.Tensor:
        slots = self.cache.slots
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


def build_runner(
    model: Any, vocab_size: int | None = None, ids: torch.Tensor | None = None
) -> ModelRunner:
    """The runner of a causal LM, with recurrent layers or without, of an encoder-decoder or of a vision-language model;
    the arguments are those of ModelRunner."""
    kind: type[ModelRunner] = ModelRunner
    if model.config.is_encoder_decoder:
        kind = Seq2SeqRunner
    elif is_vision_language(model.config):
        kind = VisionRunner
    elif has_recurrent_layers(decoder_config(model)):
        kind = RecurrentRunner
    return kind(model, vocab_size, ids)
