"""Prompt and answer in transformers' own code, for causal LMs and encoder-decoders alike: references and training."""

from collections.abc import Collection
from typing import Any

import torch
from transformers import GenerationConfig

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
