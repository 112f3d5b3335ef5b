"""Checks that greedy output equals that of transformers' `generate`, which shares no code with this decoder.

Of a target whose weights were rounded here (w8a8, w4a8, int8, int4), lossless means that the text is that of our own
plain decoding with the same weights: transformers' passes round their products otherwise. How many texts leave
transformers' is said beside it, with the same gaps.

A forward pass over one token and a pass over several sum in different orders, so two logits that are almost equal may
swap: rarely in fp32, often in bf16. Only the first difference of an output is judged, by the two tokens that differ.
Their gap, the reference's logit minus the output's, is computed in the next wider floating-point type, and in the
model's own type by passes of every width that decoding uses. The difference is a tie, counted and listed, if some of
these passes is off by at least the whole gap: then rounding alone can swap the two. Any other difference is a failure.

So what counts is the rounding of this pair at this place, and not the largest one over the vocabulary, by which many
second-best tokens would pass in bf16. The passes are those of transformers' own code, because a bug of this decoder
could make its own rounding look large. Of a target that this process does not hold whole (decode/distributed) the gap
is computed in the model's own type as well, by one pass over the whole text.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.functional import pad

from decode.constraints.grammar import Matcher
from decode.model.compatibility import cache_name
from decode.model.layer_stack import holds_all_weights
from decode.model.loading import Target
from decode.model.seq2seq import (
    decoder_inputs,
    generated_ids,
    generation_settings,
    prepare_generate,
    run_decoder,
)
from decode.model.vision import ImageInputs, image_arguments, image_token
from eval.results.report import GreedyMismatch, GreedyVerdict, NotCompared
from eval.tasks.loading import TaskPrompt
from eval.tasks.stop_strings import trim_at_stop

WIDER_DTYPE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
"""What a model is computed in to judge its rounding; float64 for every other dtype."""


def reference_greedy_output(
    model: Any,
    prompt: list[int],
    max_new_tokens: int,
    target: Target,
    stop: Sequence[str] = (),
    grammar: Matcher | None = None,
    images: ImageInputs | None = None,
) -> list[int]:
    """Token ids of transformers' greedy `generate` on the prompt with its images, cut at the context length and the
    stop strings as ours are. With `grammar` it chooses among the tokens that this allows."""

    def allowed(_: int, text: torch.Tensor) -> list[int]:
        assert grammar is not None
        place = grammar.copy()
        place.advance(text[len(prompt) :].tolist())
        found: list[int] = place.allowed().nonzero()[:, 0].tolist()
        return found

    ids = torch.tensor([prompt], device=model.device)
    prepare_generate(model)
    room = min(max_new_tokens, target.runner.context - len(prompt))
    # Without a mask, generate() takes id 0 for padding and masks it in the prompt.
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=generation_settings(model, target.eos, room),
        prefix_allowed_tokens_fn=None if grammar is None else allowed,
        **image_arguments(model, images),
    )
    return trim_at_stop(generated_ids(model, out[0], len(prompt)), stop, target.tokenizer)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, where a missing token differs too; None for equal sequences."""
    different = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(different, None if len(a) == len(b) else min(len(a), len(b)))


@torch.inference_mode()
def logits_after(
    model: Any,
    ids: list[int],
    start: int,
    width: int,
    images: ImageInputs | None = None,
    **arguments: Any,
) -> torch.Tensor:
    """Logits [V] of the token after `ids`, by one pass over ids[:start], which hold the `images`, and passes over
    `width` tokens each. `arguments`: those of `decoder_inputs`. The last pass has its full width too, as in
    verification; the tokens that it reads past `ids` are arbitrary."""
    tokens = torch.tensor([[*ids, *ids[-1:] * width]], device=model.device)
    name, cache, at, end = cache_name(model), None, 0, start
    first = {
        key: pad(value, (0, start - value.shape[1])) if key.endswith("token_type_ids") else value
        for key, value in image_arguments(model, images).items()
    }
    while True:
        given = {name: cache, **arguments, **(first if at == 0 else {})}
        out = run_decoder(model, tokens[:, at:end], use_cache=True, **given)
        if end >= len(ids):
            logits: torch.Tensor = out.logits[0, len(ids) - 1 - at].double()
            return logits
        cache, at, end = out[name], end, end + width


@contextmanager
def wider_precision(model: Any) -> Iterator[None]:
    """Within it the model computes in a wider dtype. Only the weights of the running modules and of their children are
    held in it: a T5 looks at the dtype of a child's weight before it calls the child."""
    wide = WIDER_DTYPE.get(model.dtype, torch.float64)
    kept: dict[torch.nn.Parameter, torch.Tensor] = {}

    def weights(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
        for part in (module, *module.children()):
            yield from part.parameters(recurse=False)

    def widen(module: torch.nn.Module, _: Any) -> None:
        for weight in weights(module):
            if weight.is_floating_point() and weight not in kept:
                kept[weight] = weight.data
                weight.data = weight.data.to(wide)

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for weight in weights(module):
            weight.data = kept.pop(weight, weight.data)

    experts = model.get_experts_implementation()
    model.set_experts_implementation("eager")  # kernels for experts do not know every dtype
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(widen))
        hooks.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        model.set_experts_implementation(experts)


def measure_pair(
    model: Any,
    prompt: list[int],
    answer: list[int],
    pair: tuple[int, int],
    k: int,
    images: ImageInputs | None = None,
) -> tuple[float, float]:
    """(gap, noise) of two tokens after the prompt with its images + answer, as GreedyMismatch has them, for rounds of k
    drafted tokens."""
    before, _ = decoder_inputs(model, prompt)
    ids, start = [*before, *answer], len(before)

    def gap(start: int, width: int) -> float:
        _, arguments = decoder_inputs(model, prompt)  # an encoder runs in the same precision
        logits = logits_after(model, ids, start, width, images, **arguments)
        return float(logits[pair[0]] - logits[pair[1]])

    with wider_precision(model) if holds_all_weights(model) else nullcontext():
        exact = gap(len(ids), 1)
    # The prompt's last token is read with the answer, so that its logits vary too, unless it is a part of an image.
    is_image = images is not None and prompt[-1] == image_token(model.config)
    apart = start if is_image else max(1, start - 1)
    passes = [gap(len(ids), 1), gap(start, 1), *(gap(apart, width) for width in range(1, k + 2))]
    return exact, max(abs(found - exact) for found in passes)


def find_mismatches(
    items: Sequence[TaskPrompt],
    references: Sequence[list[int]],
    outputs: Sequence[list[int]],
    measure: Callable[[TaskPrompt, list[int], tuple[int, int]], Sequence[float]],
) -> list[GreedyMismatch]:
    """The outputs that are not their reference, each with its first difference and whether that is a tie. `measure`
    gives what `measure_pair` does for an item, the tokens before the difference and the two that differ."""
    mismatches = []
    for item, reference, output in zip(items, references, outputs, strict=True):
        at = first_difference(reference, output)
        if at is None:
            continue
        if at == min(len(reference), len(output)):  # one has ended
            mismatches.append(GreedyMismatch(item.task, item.id, at, None, None, False))
            continue
        pair = reference[at], output[at]
        gap, noise = measure(item, reference[:at], pair)
        mismatches.append(GreedyMismatch(item.task, item.id, at, gap, noise, tie=abs(gap) <= noise))
    return mismatches


def greedy_verdict(
    items: Sequence[TaskPrompt],
    mismatches: Sequence[GreedyMismatch],
    leaves: Sequence[GreedyMismatch] | None = None,
) -> GreedyVerdict | NotCompared:
    """The verdict on these prompts; `mismatches` may hold others too. With `leaves`, the reference is plain decoding,
    and these are the differences from transformers' text."""
    if not items:
        return NotCompared(None, 0)
    own = {(item.task, item.id) for item in items}
    found = [m for m in mismatches if (m.task, m.id) in own]
    ties, failures = [m for m in found if m.tie], [m for m in found if not m.tie]
    share, identical = 1 / len(items), len(items) - len(found)
    return GreedyVerdict(
        greedy_identical=len(failures) == 0,
        prompts=len(items),
        identical=identical,
        ties=ties,
        failures=failures,
        exact=share * identical,
        tied=share * len(ties),
        failed=share * len(failures),
        noise=max((m.noise for m in found if m.noise is not None), default=None),
        reference="transformers" if leaves is None else "plain",
        leaves=[m for m in leaves or () if (m.task, m.id) in own],
    )
