"""What generation_config.json of a target says changes no measurement; the ids that end a text are taken from it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.drafts.lookup import NgramDraft
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_model, load_target, unfollowed_settings
from decode.model.seq2seq import generation_settings, prepare_generate
from decode.verification.sampling import SamplingParams
from eval.benchmark.baselines import TransformersEngine
from eval.benchmark.methods import Method
from eval.checks.greedy_equivalence import reference_greedy_output
from eval.settings.evaluation import EvalConfig, MethodConfig
from eval.tasks.loading import TaskPrompt
from tests import worlds
from tests.tiny import reference
from tests.worlds import EOS, World

NEW = 24
COMMON_TOKENS = list(range(40, 160))
SETTINGS: dict[str, dict[str, Any]] = {
    "as published": {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "do_sample": True},
    "scores": {
        "repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "guidance_scale": 5.0, "suppress_tokens": COMMON_TOKENS,
        "begin_suppress_tokens": COMMON_TOKENS, "bad_words_ids": [[token] for token in COMMON_TOKENS],
        "sequence_bias": [[[token], -90.0] for token in COMMON_TOKENS],
    },
    "draws": {
        "do_sample": True, "top_k": 1, "top_p": 0.01, "min_p": 0.99, "typical_p": 0.05, "epsilon_cutoff": 0.9,
        "eta_cutoff": 0.9, "watermarking_config": {"greenlist_ratio": 0.1, "bias": 50.0},
    },
    "temperature": {"do_sample": True, "temperature": 9.0},
    "forced": {
        "forced_bos_token_id": 77, "forced_eos_token_id": 3, "exponential_decay_length_penalty": [2, 9.0],
    },
    "longer": {"min_new_tokens": NEW, "min_length": 200},
    "shorter": {"max_length": 3, "max_new_tokens": 2, "stop_strings": ["a", "e", "i", "o", " "]},
    "num_beams": {"num_beams": 4, "length_penalty": -3.0},
    "what generate returns": {
        "return_dict_in_generate": True, "output_scores": True, "do_sample": True, "num_return_sequences": 3,
    },
    "assistant": {"use_cache": False, "prompt_lookup_num_tokens": 3, "num_assistant_tokens": 2},
}  # fmt: skip
"""Fields of generation_config.json that reach `generate` where a call does not name them; any one that did changes
the text, whatever stands beside it."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), prompts=6)


@pytest.fixture(scope="module")
def target(world: World) -> Target:
    return load_target(str(world.target), "cpu")


@pytest.fixture(scope="module")
def items(world: World, target: Target) -> list[TaskPrompt]:
    return [TaskPrompt("t", text, target.tokenizer(text)["input_ids"]) for text in world.texts[:3]]


def folder_with(folder: Path, settings: dict[str, Any], to: Path) -> Path:
    """A copy of a model's folder whose generation_config.json has these settings besides its EOS."""
    shutil.copytree(folder, to)
    (to / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, **settings}))
    return to


def plain(world: World) -> Any:
    return load_model(str(world.target), "target", "cpu", "float32")


def engine(
    target: Target, model: Any, method: Method | None, sampling: SamplingParams, draft: str = ""
) -> TransformersEngine:
    methods = [MethodConfig("causal", draft=draft)] if draft else []
    s = EvalConfig(max_new_tokens=NEW, methods=methods)
    return TransformersEngine(s, target, model, method, sampling)


def answers(engine: TransformersEngine, items: Sequence[TaskPrompt]) -> list[list[int]]:
    found = [engine.answer(item) for item in items]
    assert not any("error" in one for one in found), found
    return [one["ids"] for one in found]


def drawn(model: Any, item: TaskPrompt, target: Target, seed: int, top_k: int) -> list[int]:
    """An answer at temperature 1 from the model's own probabilities, by torch alone."""
    torch.manual_seed(seed)
    text = list(item.prompt_ids)
    while len(text) < len(item.prompt_ids) + NEW:
        scores = reference(model)(torch.tensor([text])).logits[0, -1]
        if top_k:
            scores[scores < scores.topk(top_k).values[-1]] = float("-inf")
        text.append(int(torch.multinomial(scores.softmax(-1), 1)))
        if text[-1] in target.eos:
            break
    return text[len(item.prompt_ids) :]


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_reaches_references_or_baselines(
    world: World, target: Target, items: list[TaskPrompt], tmp_path: Path, name: str
) -> None:
    """Bug: `generate` took from the file what the call did not name, so that the decoder's own text seemed wrong.
    References, plain `generate` and its prompt lookup; greedy, and at temperature 1, where the seed decides."""
    folder = folder_with(world.target, SETTINGS[name], tmp_path / "target")
    told, lookup = load_target(str(folder), "cpu"), Method("ngram", NgramDraft(), 3)
    assert told.eos == target.eos
    model = load_model(str(folder), "target", "cpu", "float32")
    prompts = [item.prompt_ids for item in items]
    want = [out.output_ids for out in decode(target, None, prompts, max_new_tokens=NEW)]
    assert {len(text) for text in want} != {NEW}  # some end with an EOS of the file
    found = [reference_greedy_output(model, item.prompt_ids, NEW, told) for item in items]
    assert found == want
    for method in (None, lookup):
        assert answers(engine(told, model, method, SamplingParams()), items) == want
        sampling = SamplingParams(1.0)
        own = answers(engine(target, plain(world), method, sampling), items)
        again = load_model(str(folder), "target", "cpu", "float32")
        assert answers(engine(told, again, method, sampling), items) == own


@pytest.mark.parametrize("name", ["scores", "draws", "num_beams", "assistant"])
def test_no_setting_of_a_draft_reaches_assisted_generation(
    world: World, target: Target, items: list[TaskPrompt], tmp_path: Path, name: str
) -> None:
    """Both folders have the file. Rounds too are those of the same weights without it."""
    method = Method("causal", load_draft(str(world.draft), target), 3)
    found: list[list[tuple[list[int], int]]] = []
    for settings in ({}, SETTINGS[name]):
        place = tmp_path / str(len(found))
        draft = folder_with(world.draft, settings, place / "draft")
        own = folder_with(world.target, settings, place / "target")
        model = load_model(str(own), "target", "cpu", "float32")
        asked = engine(target, model, method, SamplingParams(), str(draft))
        found.append([(a["ids"], a["rounds"]) for a in map(asked.answer, items)])
    assert found[0] == found[1]
    assert [ids for ids, _ in found[0]] == [
        reference_greedy_output(plain(world), item.prompt_ids, NEW, target) for item in items
    ]


@pytest.mark.parametrize("top_k", [0, 2])
def test_sampling_is_that_of_the_model(
    world: World, target: Target, items: list[TaskPrompt], top_k: int
) -> None:
    """Bug: where all tokens were asked for, transformers took the 50 most probable ones. The wide draws differ."""
    model = plain(world)
    for one in model.parameters():
        one.data *= 0.4  # flat enough that 50 of 268 tokens are not all
    sampling = SamplingParams(1.0, top_k=top_k)
    found = answers(engine(target, model, None, sampling), items)
    assert found == [drawn(model, item, target, 0, top_k) for item in items]
    assert found != [drawn(model, item, target, 0, 50) for item in items]


def test_settings_of_a_call_are_whole(world: World) -> None:
    """Greedy calls name no sampling, which transformers would warn about; others name all that is asked."""
    model = plain(world)
    prepare_generate(model)
    assert generation_settings(model, [], 5).to_diff_dict().keys() <= {
        "max_new_tokens", "pad_token_id", "do_sample", "transformers_version",
    }  # fmt: skip
    asked = generation_settings(model, {5, 3}, 9, 0.5, 0, 0.9)
    assert (asked.do_sample, asked.temperature, asked.top_k, asked.top_p) == (True, 0.5, 0, 0.9)
    assert (asked.eos_token_id, asked.max_new_tokens) == ([3, 5], 9)


def test_what_is_not_followed_is_named(world: World, tmp_path: Path) -> None:
    """Only what differs from neutral values and from what the run says itself."""
    said = {
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
        "do_sample": True, "bad_words_ids": [[4]], "suppress_tokens": [], "num_beams": 1, "use_cache": True,
    }  # fmt: skip
    folder = str(folder_with(world.target, said, tmp_path / "target"))
    found = unfollowed_settings(folder, None, {})
    assert found == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "bad_words_ids": [[4]]}
    found = unfollowed_settings(folder, None, {"temperature": 0.7, "top_k": 20, "top_p": 1.0})
    assert found == {"top_p": 0.8, "bad_words_ids": [[4]]}
    assert unfollowed_settings(str(world.target), None, {}) == {}
    (tmp_path / "target" / "generation_config.json").unlink()
    assert unfollowed_settings(folder, None, {}) == {}
