"""Prompt and answer in transformers' own code, for causal LMs and encoder-decoders alike: references and training."""

from typing import Any

import torch

from decode.common.errors import UserError
from decode.model.layer_stack import decoder_config


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
    """Changes the config of `model`, which is not to be saved any more, so that `generate` caches all decoder layers.

    transformers 5.23 makes a cache of as many layers as the encoder has, and ends in an IndexError where the decoder
    has more, also in an assistant, which makes its own cache.
    """
    if model.config.is_encoder_decoder:
        layers = decoder_config(model).num_hidden_layers
        model.config.num_hidden_layers = max(model.config.num_hidden_layers, layers)


def generated_ids(model: Any, output: torch.Tensor, prompt_tokens: int) -> list[int]:
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


def run_decoder(model: Any, tokens: torch.Tensor, **arguments: Any) -> Any:
    """model's forward on tokens [B, T] of a causal LM or of a decoder, with the arguments of `decoder_inputs`."""
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    return model(**{name: tokens}, **arguments)


def answer_logits(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[n, V] from which each of the n tokens of `answer` was chosen, by one pass over all."""
    before, arguments = decoder_inputs(model, prompt)
    tokens = torch.tensor([[*before, *answer]], device=model.device)
    logits: torch.Tensor = run_decoder(model, tokens, use_cache=False, **arguments).logits
    return logits[0, len(before) - 1 : -1]
