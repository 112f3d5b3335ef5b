"""eval/run.py on prompts with images: texts and verdicts against transformers' generate with the same pictures."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from decode.common.errors import UserError
from decode.engine import image_prompts
from decode.model.loading import load_target
from eval.benchmark import timing
from eval.checks.greedy_equivalence import logits_after
from eval.settings.evaluation import Task
from eval.tasks.images import FoundImages
from eval.tasks.loading import load_task_prompts
from tests import heads, worlds
from tests.params import slow_except
from tests.rows import write_rows
from tests.vision import (
    COLORS,
    Prompt,
    generated,
    own_inputs,
    processor_of,
    said,
    save_pictures,
    save_target,
    shown,
    user,
)

KINDS = ["qwen2_5_vl", "gemma3"]
NEW = 24


@pytest.fixture(scope="module", autouse=True)
def processors() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_prompts, "load_processor", processor_of)
        yield


ROWS: list[tuple[dict[str, Any], list[str]]] = [
    *(
        ({"messages": [user(shown(x), said("zq what"))]}, [x, "zq what"])
        for x in (f"{color}.png" for color in COLORS)
    ),
    (
        {"question": "<image>zq then <image>so", "images": ["blue.png", "red.png"]},
        ["blue.png", "zq then ", "red.png", "so"],
    ),
    ({"prompt": "zq words alone"}, ["zq words alone"]),
]
"""Rows of a task, and the pictures and texts that each of them shows."""


class Evaluation:
    """A tiny target, EAGLE-3 and Medusa heads for it that know nothing, and a task about pictures."""

    def __init__(self, folder: Path, kind: str):
        self.folder = folder
        self.target = save_target(folder / "target", kind)
        self.rows = write_rows(
            save_pictures(folder / "data") / "asked.jsonl", [row for row, _ in ROWS]
        )
        loaded = load_target(str(self.target), "cpu")
        self.drafts = {
            name: heads.save(folder / name, name, heads.net_of(name, loaded), loaded, torch.float32)
            for name in ("eagle3", "medusa")
        }

    def run(self, out: Path, *more: object, drafts: Sequence[str] = ("eagle3",)) -> worlds.Done:
        """The command: n-gram and heads on the task, greedily."""
        methods = [{"name": "ngram"}, *({"name": x, "draft": self.drafts[x]} for x in drafts)]
        return worlds.call(
            "eval/run.py", "--target", self.target, "--out", out, "--methods", json.dumps(methods),
            "--tasks", json.dumps([{"name": "own", "path": str(self.rows)}]), "--k", 3,
            "--temperatures", "[0.0]", "--max_new_tokens", NEW, *more,
        )  # fmt: skip

    def expected(self) -> list[tuple[list[int], list[int]]]:
        """(the ids, what transformers' generate says to them) of each row."""
        model = AutoModelForImageTextToText.from_pretrained(self.target)
        processor, found = processor_of(str(self.target)), []
        loaded = load_target(str(self.target), "cpu")
        for _, parts in ROWS:
            files = [self.rows.parent / part for part in parts if part.endswith(".png")]
            pictures = iter([Image.open(file).convert("RGB") for file in files])
            ids, inputs = loaded.chat.encode(parts[0]), None
            if files:
                content: list[Any] = [
                    {"type": "image", "image": next(pictures)} if x.endswith(".png") else said(x)
                    for x in parts
                ]
                chat = processor.apply_chat_template([user(*content)])
                ids = chat["input_ids"][0].tolist()
                shows = [part["image"] for part in content if "image" in part]
                inputs = own_inputs(self.target, ids, shows)
            answer = generated(model, Prompt(ids, inputs), NEW)
            ends = [i + 1 for i, token in enumerate(answer) if token in loaded.eos]
            found.append((ids, answer[: ends[0] if ends else NEW]))
        return found


@pytest.fixture(scope="module", params=slow_except(KINDS, KINDS))
def evaluation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Evaluation:
    return Evaluation(tmp_path_factory.mktemp("images"), request.param)


def outputs(out: Path) -> dict[str, list[tuple[list[int], list[int]]]]:
    """(prompt, answer) of each row, by method."""
    lines = [json.loads(line) for line in (out / "outputs.jsonl").read_text().splitlines()]
    found: dict[str, list[tuple[list[int], list[int]]]] = {}
    for line in lines:
        found.setdefault(line["method"], []).append((line["prompt_ids"], line["output_ids"]))
    return found


def read(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def test_texts_about_images_are_those_of_generate(evaluation: Evaluation, tmp_path: Path) -> None:
    """Catches images that a method, a reference or another engine reads otherwise, and a report that is silent about
    them."""
    evaluation.run(tmp_path, "--compare", "hf", "--batch_size", 1, drafts=("eagle3", "medusa")).ok()
    want = evaluation.expected()
    assert outputs(tmp_path) == dict.fromkeys(("plain", "ngram", "eagle3", "medusa"), want)
    assert len({tuple(answer) for _, answer in want[:3]}) == 3  # else no picture was looked at
    report = read(tmp_path)
    assert report["image_prompts"] == 4
    assert "Prompts with images: 4." in (tmp_path / "report.md").read_text()
    for result in report["methods"]:
        assert (result["lossless"]["greedy_identical"], result["lossless"]["identical"]) == (
            True,
            5,
        )
        assert result["failed"] == []
    [pooled] = [x for x in report["engines"] if x["task"] == "all"]
    assert (pooled["same_as_ours"], pooled["failed"]) == (5, [])
    about = {x["name"]: x for x in report["domains"] if x["domain"] == "images"}
    assert about["ngram"]["prompts"] == 4
    low, high = about["ngram"]["alpha_ci"]
    assert low <= about["ngram"]["alpha"] <= high


def exchanged(self: FoundImages, name: str) -> Image.Image:
    """Planted: `FoundImages.open` that opens the image of another name."""
    names = sorted(self.sources)
    return image_prompts.read_image(self.sources[names[names.index(name) - 1]])


@pytest.mark.parametrize("bug", ["left out", "another prompt's", "another file"])
def test_a_report_on_other_pixels_is_caught(
    bug: str, evaluation: Evaluation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches checks that cannot fail: pixels that are left out, or exchanged, in what is decoded; and, where
    transformers is given the same wrong picture, texts that the test above would take for right."""
    if bug == "another file":
        monkeypatch.setattr(FoundImages, "open", exchanged)
    else:
        right = timing.read_images

        def planted(items: Sequence[Any]) -> list[Any]:
            found = right(items)
            if bug == "left out":
                return [None] * len(found)
            return [*found[1:3], found[0], *found[3:]]

        monkeypatch.setattr(timing, "read_images", planted)
    evaluation.run(tmp_path, "--batch_size", 5, "--phase_prompts", 0).ok()
    want = evaluation.expected()
    assert [one == right for one, right in zip(outputs(tmp_path)["plain"], want, strict=True)] != [
        True
    ] * 5
    verdicts = {x["lossless"]["greedy_identical"] for x in read(tmp_path)["methods"]}
    assert verdicts == {bug == "another file"}


def test_logits_behind_images_are_those_of_one_pass(evaluation: Evaluation) -> None:
    """Catches rounding that is measured without the images, or at positions that an earlier prompt left behind."""
    target = load_target(str(evaluation.target), "cpu")
    model = AutoModelForImageTextToText.from_pretrained(evaluation.target)
    items = load_task_prompts(Task("own", str(evaluation.rows)), target, with_images=True)
    for item in [*items, items[-1], items[0]]:
        inputs = None if item.images is None else item.images.read()
        ids = [*item.prompt_ids, 20, 21, 22]
        row = torch.tensor([ids])
        given = dict(inputs or {})
        for name in given:
            if name.endswith("token_type_ids"):
                given[name] = torch.cat([given[name], torch.zeros(1, 3, dtype=torch.long)], 1)
        fresh = AutoModelForImageTextToText.from_pretrained(evaluation.target)
        with torch.no_grad():
            want = fresh(input_ids=row, attention_mask=torch.ones_like(row), **given).logits[0, -1]
        start = len(item.prompt_ids)
        for first, width in ((len(ids), 1), (start, 1), (start - 1, 3)):
            found = logits_after(model, ids, first, width, inputs)
            torch.testing.assert_close(found.float(), want, atol=1e-3, rtol=1e-3)


def test_what_cannot_read_images_is_refused_by_name(evaluation: Evaluation, tmp_path: Path) -> None:
    """Catches an engine or a check that is given placeholders without pixels, and images that cannot be read."""
    for setting, name in (
        (("--compare", "hf,hf-lookup"), "compare hf-lookup"),
        (("--check_law", 200, "--temperatures", "[1.0]"), "check_law"),
        (("--original", evaluation.target), "original"),
    ):
        line = evaluation.run(tmp_path / "out", *setting).error()
        assert f"prompts with images, which {name} cannot read" in line
    assert not (tmp_path / "out").exists()
    target = load_target(str(evaluation.target), "cpu")
    for row, reason in (
        ({"messages": [user(shown("none.png"), said("a"))]}, r"rows.jsonl:1: .*none\.png"),
        ({"turns": ["a", "b"], "image": "red.png"}, "turns.*are texts"),
    ):
        task = Task("own", str(write_rows(tmp_path / "rows.jsonl", [row])))
        with pytest.raises(UserError, match=reason):
            load_task_prompts(task, target, with_images=True)
    task = Task("own", str(evaluation.rows))
    with pytest.raises(UserError, match="`content` as text"):
        load_task_prompts(task, target)
