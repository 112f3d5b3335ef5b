"""Drafts for a vision-language target by the real commands: sampled and distilled on text, decoded with images."""

import dataclasses
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import load_target
from tests import worlds
from tests.vision import generated, image_prompt, text_prompt, vision_model
from tests.worlds import World

KIND = "qwen2_5_vl"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The tiny world with a vision-language target."""
    folder = tmp_path_factory.mktemp("world")
    plain = worlds.build(folder)
    tokenizer = worlds.byte_tokenizer()
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": worlds.CONTEXT}
    target = worlds.save(folder / "vision", vision_model(KIND, seed=1, **size), tokenizer)
    return dataclasses.replace(plain, target=target)


@pytest.fixture(scope="module")
def data(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.sampled(world, tmp_path_factory.mktemp("data"), "--max_new_tokens", 24)


@pytest.mark.parametrize("family", ["causal", "eagle3"])
def test_a_distilled_draft_decodes_text_and_images(
    family: str, world: World, data: Path, tmp_path: Path
) -> None:
    """Catches a teacher that takes the vision part's layers for the text's, a draft of other sizes than the text
    model's, and drafts that change the text behind an image."""
    more = ["--draft.init", world.draft] if family == "causal" else ["--draft.taps", "[0, 1, 2]"]
    worlds.call(
        "train/distill.py", "--target", world.target, "--data", data, "--out", tmp_path / "draft",
        "--draft.family", family, *more, "--loop.steps", 3, "--loop.batch_size", 4,
        "--tracker", "none", "--check.prompts", 2, "--check.max_new_tokens", 4,
    ).ok()  # fmt: skip
    assert "mrope" not in (tmp_path / "draft" / "config.json").read_text()
    target = dataclasses.replace(load_target(str(world.target), "cpu"), eos=frozenset())
    draft = load_draft(str(tmp_path / "draft"), target)
    prompts = [image_prompt(KIND, 3, 4), text_prompt(5, 1)]
    own = AutoModelForImageTextToText.from_pretrained(world.target)
    want = [generated(own, prompt, 16) for prompt in prompts]
    ids, images = [p.ids for p in prompts], [p.images for p in prompts]
    found = decode(target, draft, ids, images=images, max_new_tokens=16)
    assert [output.output_ids for output in found] == want
