"""Vision-language targets: their text with and without images equals `generate`, and what cannot be read is refused."""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from decode import generate
from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.causal import CausalDraft
from decode.drafts.early_exit import EarlyExitDraft
from decode.drafts.lookup import NgramDraft
from decode.drafts.settings import GenerateConfig
from decode.engine.engine import decode
from decode.model import attention
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import Target, build_runner, load_target
from decode.model.runner import ModelRunner
from decode.model.vision import VisionRunner
from decode.verification.tree import DynamicTree
from tests.heads import random_draft
from tests.params import slow_except
from tests.tiny import noisy, tiny_model, tiny_target
from tests.vision import (
    TEXT,
    VARIANTS,
    VISION,
    Prompt,
    generated,
    image_prompt,
    llava_folder,
    text_prompt,
    vision_model,
    vision_target,
)

FEW = ["qwen2_5_vl", "gemma3"]
"""M-RoPE; windows and image tokens that see each other in both directions."""


def prompts_of(kind: str) -> list[Prompt]:
    """Ragged prompts: images in different places, and text alone."""
    return [image_prompt(kind, 3, 5, 1), text_prompt(6, 2), image_prompt(kind, 1, 2, 3)]


def answers(
    target: Target, draft: Draft | None, prompts: Sequence[Prompt], **settings: Any
) -> list[list[int]]:
    """The 20 tokens that follow each prompt, greedily."""
    ids, images = [p.ids for p in prompts], [p.images for p in prompts]
    settings = {"k": 3, "max_new_tokens": 20, "images": images} | settings
    return [output.output_ids for output in decode(target, draft, ids, **settings)]


@pytest.mark.parametrize("kind", slow_except(VARIANTS, FEW))
def test_greedy_text_equals_generate(kind: str) -> None:
    """Catches image features or their positions lost, tokens behind an image at their slots' positions, masks that hide
    image tokens from each other, a row's images given to the row that follows it, and the vision part run with causal
    attention: with chains, a tree, lookups and drafts in the target's own layers.

    The text must depend on the image, else none of that was tried.
    """
    model, prompts = vision_model(kind), prompts_of(kind)
    want = [generated(model, prompt, 20) for prompt in prompts]
    other = image_prompt(kind, 3, 5, 1)
    assert other.images is not None
    pixels = {"pixel_values": other.images["pixel_values"] + 1.0}
    assert generated(model, Prompt(other.ids, other.images | pixels), 20) != want[0]
    target = vision_target(model)
    moved = build_runner(noisy(model, 0.01))
    drafts = [
        None,
        NgramDraft(),
        CausalDraft(moved),
        CausalDraft(moved, shape=DynamicTree(width=3, nodes=9)),
        EarlyExitDraft(target, 2),
    ]
    for draft in drafts:
        assert answers(target, draft, prompts, rows=2) == want, draft and draft.name


@pytest.mark.parametrize("kind", slow_except(VARIANTS, FEW[:1]))
def test_eagle_keeps_the_text(kind: str) -> None:
    """Catches a head that reads states of another width or of the vision part's layers."""
    model, prompts = vision_model(kind), prompts_of(kind)
    target = vision_target(model)
    want = [generated(model, prompt, 20) for prompt in prompts]
    assert answers(target, random_draft("eagle3", target), prompts) == want


STATES_AS_HF = [kind for kind in VARIANTS if kind != "qwen3_vl"]
"""qwen3_vl adds image features between its first layers, where transformers' list of states has no entry."""


@pytest.mark.parametrize("kind", slow_except(STATES_AS_HF, FEW[:1]))
def test_captured_states_are_those_of_the_model(kind: str) -> None:
    """Catches hidden states of prompts with images that are left out, or put into another row's place."""
    model, prompts = vision_model(kind), prompts_of(kind)
    target = vision_target(model)
    runner = target.runner
    assert isinstance(runner, VisionRunner)
    runner.allocate(2, 64)
    runner.capture_hidden_states(HiddenStateSpec((0, 2)))
    padded = torch.zeros(2, len(prompts[0].ids), dtype=torch.long)
    for line, prompt in zip(padded, prompts[:2], strict=True):
        line[: len(prompt.ids)] = torch.tensor(prompt.ids)
    length = torch.tensor([len(prompt.ids) for prompt in prompts[:2]])
    runner.prefill(padded, length, images=[prompt.images for prompt in prompts[:2]])
    for row, prompt in enumerate(prompts[:2]):
        ids = torch.tensor([prompt.ids])
        with torch.no_grad():
            states = model(
                input_ids=ids, output_hidden_states=True, use_cache=False,
                attention_mask=torch.ones_like(ids), **(prompt.images or {}),
            ).hidden_states  # fmt: skip
        own = runner.features[row, : len(prompt.ids)]
        torch.testing.assert_close(
            own, torch.cat([states[0][0], states[2][0]], -1), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("bug", ["delta", "images", "causal"])
def test_planted_bugs_change_the_text(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tests that cannot fail: tokens behind an image at their slots' positions, images that are dropped, and
    image tokens that do not see the later ones."""
    kind = "gemma3" if bug == "causal" else "qwen2_5_vl"
    model, prompts = vision_model(kind), prompts_of(kind)
    want = [generated(model, prompt, 20) for prompt in prompts]
    target = vision_target(model)
    assert answers(target, None, prompts) == want
    images: list[Any] = [prompt.images for prompt in prompts]
    if bug == "delta":
        monkeypatch.setattr(VisionRunner, "positions", ModelRunner.positions)
    if bug == "images":
        images = [None] * len(prompts)
    if bug == "causal":
        monkeypatch.setattr(target.runner, "own_attention", attention.ATTENTION_NAME)
    found = answers(target, None, prompts, images=images)
    assert [one == own for one, own in zip(found, want, strict=True)] == [False, True, False]


def test_a_row_of_text_after_one_with_an_image_has_plain_positions() -> None:
    """Catches positions of the row's last prompt that stay."""
    model = vision_model("qwen2_5_vl")
    target, prompts = vision_target(model), [image_prompt("qwen2_5_vl", 2, 3), text_prompt(7, 1)]
    want = [generated(model, prompt, 20) for prompt in prompts]
    assert answers(target, None, prompts, rows=1) == want
    assert answers(target, None, prompts[1:]) == want[1:]


def test_a_text_model_drafts_for_a_vision_language_target() -> None:
    """Catches a small LM of the same vocabulary that breaks on placeholders."""
    model, prompts = vision_model("llava"), prompts_of("llava")
    draft = CausalDraft(ModelRunner(tiny_model("llama", seed=3)))
    want = [generated(model, prompt, 20) for prompt in prompts]
    assert answers(vision_target(model), draft, prompts) == want


def test_llama4_ends_with_its_first_chunk() -> None:
    """Catches a context beyond the first chunk, where llama4 hides earlier chunks and scales its queries."""
    model = vision_model("llama4")
    target = vision_target(model)
    assert target.runner.context == 48
    text = text_prompt(40)
    assert answers(target, None, [text], images=None) == [generated(model, text, 8)]
    config = copy.deepcopy(model.config)
    config.text_config.floor_scale = 32
    scaled = AutoModelForImageTextToText.from_config(config)
    assert build_runner(scaled).context == 31


# ---- what is refused ----


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "paligemma": (
        {"text_config": TEXT | {"model_type": "gemma"}, "projection_dim": 32, "image_token_index": 90}
        | {"vision_config": VISION | {"model_type": "siglip_vision_model"}},
        "attends to later tokens",
    ),
    "lfm2_vl": (
        {
            "text_config": TEXT
            | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
            "vision_config": VISION | {"model_type": "siglip2_vision_model", "num_patches": 16},
        },
        "conv layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_decoded_is_refused(kind: str) -> None:
    """Catches a model that is decoded although drafted tokens would change its text."""
    settings, reason = REFUSED[kind]
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **settings))
    with pytest.raises(UserError, match=reason):
        build_runner(model)


def test_images_that_cannot_be_read_are_refused() -> None:
    """Catches images that are dropped in silence, or read into places that do not belong to them."""
    prompt = image_prompt("qwen2_5_vl", 2, 3)
    assert prompt.images is not None
    target = vision_target(vision_model("qwen2_5_vl"))
    with pytest.raises(UserError, match="reads text only"):
        answers(tiny_target(tiny_model("llama")), None, [prompt])
    with pytest.raises(UserError, match="2 entries for 1 prompts"):
        answers(target, None, [prompt], images=[prompt.images, None])
    with pytest.raises(UserError, match="cannot read the prompt's images"):
        answers(target, None, [Prompt(prompt.ids[:-6], prompt.images)])
    inputs = {k: v for k, v in prompt.images.items() if k != "mm_token_type_ids"}
    with pytest.raises(UserError, match="needs mm_token_type_ids"):
        answers(target, None, [Prompt(prompt.ids, inputs)])


# ---- from files ----


def test_the_command_reads_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches images that the command leaves out, several of them, and files or targets that cannot be read."""
    folder = llava_folder(tmp_path / "llava")
    red, blue = str(folder / "red.png"), str(folder / "blue.png")
    settings = {"prompt": "abc", "target": str(folder), "device": "cpu", "max_new_tokens": 12}

    def printed(image: str | list[str], **more: Any) -> str:
        generate.main(GenerateConfig(image=image, **(settings | more)))
        return capsys.readouterr().out

    texts = [printed(image) for image in ("", red, blue, [red, blue], [blue, red])]
    assert len(set(texts)) == len(texts)
    assert printed(red, draft="none") == texts[1]
    with pytest.raises(UserError, match=r"no image file 'none\.png'"):
        printed("none.png")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(UserError, match="cannot be read as an image"):
        printed(str(tmp_path / "text.png"))
    with pytest.raises(UserError, match="reads text only"):
        printed(red, target="assets/target")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no processor with a chat template"):
        printed(red)


def test_a_folder_is_loaded_whole(tmp_path: Path) -> None:
    """Catches the text-only class of a model with vision, whose weights have other names and would be random."""
    folder = llava_folder(tmp_path / "llava")
    target = load_target(str(folder), device="cpu")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    text = Prompt(target.tokenizer("def f(x):")["input_ids"], None)
    target = dataclasses.replace(target, eos=frozenset())
    assert answers(target, None, [text]) == [generated(model, text, 20)]
