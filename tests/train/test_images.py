"""Sampling and training with images: what is stored and learned, against the processor's and transformers' own code."""

import base64
import copy
import dataclasses
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.engine import image_prompts
from decode.engine.engine import decode
from decode.engine.image_prompts import ImageReader, encode_chat
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import load_target
from decode.model.vision import image_token
from eval.metrics.acceptance import Acceptance
from eval.tasks.images import FoundImages, read_stored
from eval.tasks.row_forms import DatasetRow, read_row
from tests import worlds
from tests.params import slow_except
from tests.rows import file_sources, sample, write_rows
from tests.tiny import tiny_model, tiny_target
from tests.vision import (
    COLORS,
    Prompt,
    generated,
    llava_folder,
    load_processor,
    own_inputs,
    processor_of,
    said,
    save_pictures,
    save_target,
    shown,
    user,
)
from tests.worlds import EOS
from train import answering, training
from train.data import batching, mixture
from train.data.conversations import Conversation
from train.data.manifest import load_set
from train.data.mixture import locate_images
from train.data.prompt_pipeline import TokenizedPrompt
from train.data.sample_store import SampleRow
from train.data.sources import ReadLog, stream_prompts
from train.doctor_checks.answers import AnswerCheck
from train.doctor_checks.findings import Tally
from train.doctor_checks.rows import SeenRow
from train.hub import dataset_card
from train.sampling.config import SampleConfig
from train.sampling.rows import make_row
from train.settings.data import PromptSource
from train.teacher.live import LiveTeacher
from train.trainer.settings import DistillConfig

KINDS = ["qwen2_5_vl", "qwen3_vl", "gemma3"]


@pytest.fixture(scope="module", autouse=True)
def processors() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_prompts, "load_processor", processor_of)
        yield


def asked_rows() -> list[dict[str, Any]]:
    """Images in front of a text, behind it, two of them, the same one again, in a chat that has begun, and no image."""
    chat = [user(shown("red.png"), said("zq one")), {"role": "assistant", "content": "abc"}]
    return [
        {"messages": [user(shown("red.png"), said("zq what"))]},
        {"messages": [user(said("zq where "), shown("blue.png"))]},
        {"messages": [user(shown("red.png"), said("zq and "), shown("green.png"), said("so"))]},
        {"messages": [user(shown("red.png"), said("zq what else"))]},
        {"messages": [*chat, user(said("zq then"))]},
        {"prompt": "zq words alone"},
    ]


@dataclasses.dataclass(frozen=True)
class Sampled:
    target: Path
    prompts: Path
    out: Path

    def sample(self, out: Path, *more: object) -> worlds.Done:
        """The command on the prompts."""
        return worlds.call(
            "train/sample.py", "--target", self.target, "--sources", file_sources(self.prompts),
            "--out", out, "--shard_rows", 2, *(more or ("--max_new_tokens", 12)),
        )  # fmt: skip

    @property
    def rows(self) -> list[SampleRow]:
        return list(load_set(self.out)[1])

    @property
    def trained(self) -> list[SampleRow]:
        """The rows as training reads them."""
        return [locate_images(self.out / "images", row) for row in self.rows]


def sampled(folder: Path, kind: str) -> Sampled:
    target = save_target(folder / "target", kind)
    prompts = write_rows(save_pictures(folder / "data") / "prompts.jsonl", asked_rows())
    made = Sampled(target, prompts, folder / "out")
    made.sample(made.out).ok()
    return made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Sampled:
    return sampled(tmp_path_factory.mktemp("images"), KINDS[0])


# ---- rows ----


def picture() -> bytes:
    stored = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(stored, "PNG")
    return stored.getvalue()


DATA = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
ASKED = said("What?")
FORMS: dict[str, dict[str, Any]] = {
    "path": {"messages": [user(shown("red.png"), ASKED)]},
    "url": {"messages": [user({"type": "image_url", "image_url": {"url": DATA}}, ASKED)]},
    "address of a file": {"messages": [user({"type": "image", "url": "file://FOLDER/red.png"}, ASKED)]},
    "responses": {"messages": [user({"type": "input_image", "image_url": DATA}, ASKED)]},
    "column": {"messages": [user({"type": "image"}, ASKED)], "images": ["red.png"]},
    "bytes": {"messages": [user({"type": "image"}, ASKED)], "images": [{"bytes": picture(), "path": None}]},
    "picture": {"messages": [user({"type": "image"}, ASKED)], "image": Image.new("RGB", (40, 30), "red")},
    "mark": {"conversations": [{"from": "human", "value": "<image>\nWhat?"}], "image": "red.png"},
    "no mark": {"question": "What?", "image": "red.png"},
}  # fmt: skip


def no_reader() -> ImageReader:
    raise AssertionError("nothing is encoded here")


def placed(fields: dict[str, Any], folder: Path | None) -> tuple[Any, FoundImages]:
    """The question of a row with the names of its images."""
    fields = {name: json.loads(json.dumps(value).replace("FOLDER", str(folder))) if "FOLDER" in str(value)
              else value for name, value in fields.items()}  # fmt: skip
    row, found = (
        read_row(DatasetRow(fields, "row 1"), False, with_images=True),
        FoundImages(no_reader),
    )
    assert row is not None
    question = row.question()
    assert question is not None
    return found.place(question, row, "row 1", folder), found


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_is_the_same_chat(form: str, tmp_path: Path) -> None:
    """Catches a form that loses its image, its text or their order, names that depend on where an image lay, and images
    that stay in memory once they are stored."""
    (tmp_path / "red.png").write_bytes(picture())
    messages, found = placed(FORMS[form], tmp_path)
    [name] = found.sources
    assert messages == [user(shown(name), ASKED)]
    assert name.endswith(".png")
    if form != "picture":  # that one is written anew
        want, _ = placed(FORMS["path"], tmp_path)
        assert messages == want
    assert found.open(name).getpixel((0, 0)) == (255, 0, 0)
    found.store(tmp_path, [name])
    assert found.sources == {name: tmp_path / "images" / name}
    assert found.open(name).getpixel((0, 0)) == (255, 0, 0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "network": ({"messages": [user(shown("https://a.b/c.png"), ASKED)]}, "download it first"),
    "missing": ({"messages": [user(shown("none.png"), ASKED)]}, "no image file"),
    "damaged": ({"messages": [user(shown("text.png"), ASKED)]}, "cannot be read"),
    "no base64": ({"messages": [user(shown("data:image/png;base64,%"), ASKED)]}, "no base64"),
    "too few": ({"messages": [user({"type": "image"}, ASKED)]}, "holds 0.*places for 1"),
    "too many": ({"question": "<image> What?", "images": ["red.png"] * 2}, "holds 2.*places for 1"),
    "video": ({"messages": [user({"type": "video", "video": "a"}, ASKED)]}, "texts and images"),
    "no content": ({"messages": [{"role": "user", "content": {"a": 1}}]}, "`role` and `content`"),
    "nothing": ({"messages": [{"role": "user", "content": []}]}, "`role` and `content`"),
    "number": ({"question": "What?", "images": [3]}, "a path, a file"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_images_that_cannot_be_had_are_refused(form: str, tmp_path: Path) -> None:
    """Catches an image that is fetched, dropped in silence, or given to another place."""
    (tmp_path / "red.png").write_bytes(picture())
    (tmp_path / "text.png").write_text("no picture")
    fields, reason = REFUSED[form]
    with pytest.raises(UserError, match=f"row 1.*{reason}"):
        placed(fields, tmp_path)


def test_a_set_of_the_hub_names_no_file_of_this_machine(tmp_path: Path) -> None:
    """Catches a private picture that a foreign row copies into a set."""
    (tmp_path / "red.png").write_bytes(picture())
    for path in ("red.png", str(tmp_path / "red.png"), f"file://{tmp_path}/red.png"):
        with pytest.raises(UserError, match="from its rows alone"):
            placed({"question": "What?", "image": path}, None)
    placed({"question": "What?", "image": DATA}, None)


def test_a_text_target_reads_no_images(tmp_path: Path) -> None:
    """Catches images in messages that a target of text leaves out in silence, and a column of them that it refuses."""
    rows = [{"messages": [user(shown("red.png"), ASKED)]}, {"question": "What?", "image": "x.png"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    log = ReadLog(max_bad_rows=0.5)
    [prompt] = stream_prompts([PromptSource("file", str(path))], 0, log)
    assert prompt.text == "What?"
    assert "not used: image" in log.lines()[0]
    assert "every message needs `role` and `content` as text" in log.refused[0]


# ---- sampling ----


def test_samples_hold_images_once_and_answers_about_them(world: Sampled) -> None:
    """Catches images that are stored twice, missing or others, placeholders in other places than the processor's, and
    answers to prompts whose images were dropped."""
    want = {color: (world.prompts.parent / f"{color}.png").read_bytes() for color in COLORS}
    stored = {path.name: path.read_bytes() for path in (world.out / "images").iterdir()}
    assert sorted(stored.values()) == sorted(want.values())
    assert {path.name for path in world.out.parent.iterdir()} == {"target", "data", "out"}
    processor, rows = processor_of(str(world.target)), {}
    for row in world.rows:
        rows[tuple(row["input_ids"][: row["loss_spans"][0][0]])] = row
    for asked in asked_rows()[:5]:
        messages: Any = copy.deepcopy(asked["messages"])
        pictures = []
        for message in messages:
            parts = message["content"]
            message["content"] = [said(parts)] if isinstance(parts, str) else parts
            for part in message["content"]:
                if part["type"] == "image":
                    pictures.append(part["image"])
                    part["image"] = Image.open(world.prompts.parent / part["image"]).convert("RGB")
        prompt = encode_chat(processor, messages)
        row = rows.pop(tuple(prompt.ids))
        assert [stored[name] for name in row["images"]] == [
            want[name.removesuffix(".png")] for name in pictures
        ]
        spots = [i for start, end in row["image_spans"] for i in range(start, end)]
        assert spots == [i for i, token in enumerate(prompt.ids) if token == processor.placeholder]
    [row] = rows.values()
    assert "images" not in row


@pytest.mark.parametrize("begins", [True, False], ids=["as it is", "planted"])
def test_answers_are_those_of_generate(
    begins: bool, world: Sampled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches images that are dropped in sampling, or given to another prompt."""
    if not begins:
        monkeypatch.setattr("train.sampling.local_engine.stored_images", lambda *_: None)
    out = tmp_path / "out"
    world.sample(out, "--sampling.temperature", 0, "--max_new_tokens", 12).ok()
    model = AutoModelForImageTextToText.from_pretrained(world.target)
    equal = []
    for row in load_set(out)[1]:
        ids = [int(token) for token in row["input_ids"]]
        start = row["loss_spans"][0][0]
        pictures = [read_stored(str(out / "images" / name)) for name in row.get("images", ())]
        inputs = own_inputs(world.target, ids[:start], pictures) if pictures else None
        equal.append(generated(model, Prompt(ids[:start], inputs), len(ids) - start) == ids[start:])
    assert all(equal) if begins else not all(equal)


def test_a_set_goes_on_as_if_it_had_not_stopped(world: Sampled, tmp_path: Path) -> None:
    """Catches answers that depend on what was answered before, images that are written again, and lost ones."""
    out = tmp_path / "again"
    shutil.copytree(world.out, out)
    (out / "manifest.json").unlink()
    shards = sorted((out / "shards").iterdir())
    assert len(shards) == 3
    for shard in shards[1:]:
        shard.unlink()
    kept, lost, *_ = sorted((out / "images").iterdir())
    lost.unlink()
    before = kept.stat().st_mtime_ns
    world.sample(out, "--resume", "true", "--max_new_tokens", 12).ok()
    assert kept.stat().st_mtime_ns == before
    assert lost.is_file()

    def contents(rows: Sequence[SampleRow]) -> list[Any]:
        return sorted(
            [{**row, "input_ids": list(row["input_ids"])} for row in rows],
            key=lambda row: row["id"],
        )

    assert contents(list(load_set(out)[1])) == contents(world.rows)


def test_a_processor_of_transformers_reads_the_same(tmp_path: Path) -> None:
    """Catches inputs of images that depend on the text around them, by LLaVA's own processor and the real command."""
    target = llava_folder(tmp_path / "llava")
    rows = [
        {"messages": [user(shown("llava/red.png"), said("abc"))]},
        {"messages": [user(said("a"), shown("llava/red.png"), shown("llava/blue.png"))]},
    ]
    out = tmp_path / "out"
    sample(target, write_rows(tmp_path / "rows.jsonl", rows), out).ok()
    processor = load_processor(str(target))
    reader = ImageReader(processor, image_token(AutoConfig.from_pretrained(target)))
    pictures = {
        color: Image.open(target / f"{color}.png").convert("RGB") for color in ("red", "blue")
    }
    chats = [
        [user(shown("red"), said("abc"))],
        [user(said("a"), shown("red"), shown("blue"))],
    ]
    found = {tuple(row["input_ids"][: row["loss_spans"][0][0]]) for row in load_set(out)[1]}
    for chat in chats:
        names = [part["image"] for part in chat[0]["content"] if part["type"] == "image"]
        filled = [
            user(
                *(
                    {**p, "image": pictures[p["image"]]} if "image" in p else p
                    for p in chat[0]["content"]
                )
            )
        ]
        whole = encode_chat(processor, filled)
        assert tuple(whole.ids) in found
        made = reader.inputs(whole.ids, [pictures[name] for name in names])
        assert made.keys() == whole.inputs.keys()
        for name, value in made.items():
            torch.testing.assert_close(value, whole.inputs[name])
    with pytest.raises(UserError, match="1 images take 4 tokens, and the prompt has 3"):
        reader.inputs(([reader.placeholder] * 3), [pictures["red"]])


def test_servers_are_sent_no_images(world: Sampled, tmp_path: Path) -> None:
    """Catches prompts that a server answers without their images."""
    source = PromptSource("file", str(world.prompts))
    s = SampleConfig(
        target=str(world.target), sources=[source], engine="openai", out=str(tmp_path / "out")
    )
    with pytest.raises(UserError, match="hold images.*--engine draftsmith"):
        answering.write_answers(
            s, SimpleNamespace(is_main_process=False), answering.load_reader(s), None
        )  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_of_refused_images(world: Sampled, tmp_path: Path) -> None:
    """Catches a run that answers without images that cannot be read."""
    rows = [{"messages": [user(shown("https://a.b/c.png"), said("zq"))]}]
    out = tmp_path / "out"
    line = sample(world.target, write_rows(tmp_path / "rows.jsonl", rows), out).error()
    assert "download it first" in line
    assert not out.exists()


def test_a_reply_ends_before_the_token_of_an_image() -> None:
    """Catches a row with more placeholders than images, which no forward would take."""
    prompt = TokenizedPrompt(
        "x", "s", Conversation([], []), images=("a.png",), image_spans=[[1, 3]]
    )
    script = Conversation([[5, 9, 9, 6]], [[7, 8, 9, 4]])
    row = make_row(SampleConfig(), prompt, script, "eos")
    assert row["input_ids"] == [5, 9, 9, 6, 7, 8]
    assert (row["loss_spans"], row["finish_reason"]) == ([[4, 6]], "length")


# ---- training ----


def test_images_are_no_labels(world: Sampled) -> None:
    """Catches a draft that learns to write placeholders, also where all of a prompt is learned; and rows that are cut
    within an image."""
    placeholder = processor_of(str(world.target)).placeholder
    for row in world.rows:
        for one in (row, batching.supervise_whole_row(row)):
            batch = batching.collate([one], 0)
            assert placeholder not in batch.input_ids[:, 1:][batch.loss_mask[:, :-1]]
    [row, *_] = (row for row in world.rows if len(row.get("images", ())) == 2)
    bare: SampleRow = {**row, "image_spans": []}
    batch = batching.collate([batching.supervise_whole_row(bare)], 0)
    assert placeholder in batch.input_ids[:, 1:][batch.loss_mask[:, :-1]]
    whole, end = batching.supervise_whole_row(row), row["image_spans"][-1][1]
    assert batching.truncate_row(whole, end)["loss_spans"] == [[0, end]]
    assert batching.truncate_row(whole, end - 1)["loss_spans"] == []
    with pytest.raises(UserError, match="none of the 2 samples"):
        batching.truncate_rows([whole, row], end - 1)


def reference_states(target: Path, row: SampleRow, taps: Sequence[int]) -> torch.Tensor:
    """[L, F] by transformers' own forward of the row with its images, final states last."""
    model = AutoModelForImageTextToText.from_pretrained(target)
    ids = torch.tensor([[int(token) for token in row["input_ids"]]])
    pictures = [Image.open(path).convert("RGB") for path in row.get("images", ())]
    inputs = own_inputs(target, ids[0].tolist(), pictures) if pictures else {}
    with torch.no_grad():
        states = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True,
            use_cache=False, **inputs,
        ).hidden_states  # fmt: skip
    return torch.cat([states[i][0] for i in (*taps, -1)], -1)


@pytest.mark.parametrize("kind", slow_except(KINDS, KINDS[:1]))
def test_states_at_images_are_the_targets_own(kind: str, world: Sampled, tmp_path: Path) -> None:
    """Catches images left out of training, given to another row, or seen at other positions or by another attention
    than in decoding: padded and packed, beside rows of text and without any."""
    made = world if kind == KINDS[0] else sampled(tmp_path, kind)
    # qwen3_vl adds features of images between its first layers, where transformers lists no state
    taps = (0,) if kind == "qwen3_vl" else (0, 2)
    teacher = LiveTeacher(load_target(str(made.target), "cpu"), HiddenStateSpec(taps))
    rows = made.trained
    want = {row["id"]: reference_states(made.target, row, taps) for row in rows}

    def errors(batch: batching.Batch, of: Sequence[SampleRow]) -> list[float]:
        output = teacher.get_output(batch)
        both = torch.cat([output.features, output.head_inputs], -1)
        places = zip(of, batch.starts, strict=True)
        return [
            float((both[line, at : at + len(row["input_ids"])] - want[row["id"]]).abs().max())
            for row, (line, at) in places
        ]

    pictured = [row for row in rows if "images" in row]
    for make in (batching.collate, batching.pack):
        for some in (rows, pictured, pictured[:1]):
            assert max(errors(make(some, 0), some)) < 1e-3
    dropped = dataclasses.replace(batching.collate(rows, 0), images={})
    bad = [error > 0.1 for error in errors(dropped, rows)]
    assert bad == ["images" in row for row in rows]


TRAINED: dict[str, list[object]] = {
    "eagle3": ["--draft.taps", "[0, 1, 2]"],
    "mtp": [],
    "medusa": [],
}


def distilled(
    made: Sampled, out: Path, family: str, steps: int, *more: object
) -> list[dict[str, float]]:
    """Trains by the real command; the lines of its log."""
    worlds.call(
        "train/distill.py", "--target", made.target, "--data", made.out, "--out", out,
        "--draft.family", family, *TRAINED[family], "--loop.steps", steps, "--loop.batch_size", 4,
        "--tracker", "none", "--check.prompts", 4, "--check.max_new_tokens", 8, *more,
    ).ok()  # fmt: skip
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def image_answers(
    made: Sampled, draft: Path | None, eos: frozenset[int] = frozenset(), **settings: Any
) -> list[Any]:
    """What the target says to the prompts of the set with their images, drafted by `draft`."""
    target = dataclasses.replace(load_target(str(made.target), "cpu"), eos=eos)
    rows = [row for row in made.trained if "images" in row]
    ids = [[int(token) for token in row["input_ids"][: row["loss_spans"][0][0]]] for row in rows]
    images = [
        own_inputs(made.target, prompt, [read_stored(path) for path in row["images"]])
        for prompt, row in zip(ids, rows, strict=True)
    ]
    loaded = None if draft is None else load_draft(str(draft), target)
    return decode(target, loaded, ids, images=images, **settings)


@pytest.mark.parametrize("family", slow_except(TRAINED, ["eagle3"]))
def test_a_draft_learns_from_images(family: str, world: Sampled, tmp_path: Path) -> None:
    """Catches a family that cannot train on images, that changes the target's text about them, and features on disk of
    other rows or without images."""
    live = distilled(world, tmp_path / "live", family, 2, "--loop.eval_every", 2)
    assert any("accept/tau" in line for line in live)
    found = image_answers(world, tmp_path / "live", max_new_tokens=12)
    want = image_answers(world, None, max_new_tokens=12)
    assert [x.output_ids for x in found] == [x.output_ids for x in want]
    worlds.call(
        "eval/run.py", "--target", world.target, "--out", tmp_path / "eval", "--temperatures", "[0.0]",
        "--methods", json.dumps([{"name": family, "draft": str(tmp_path / "live"), "k": 2}]),
        "--tasks", json.dumps([{"name": "own", "path": str(world.prompts)}]),
        "--max_new_tokens", 12, "--phase_prompts", 0,
    ).ok()  # fmt: skip
    report = json.loads((tmp_path / "eval" / "report.json").read_text())
    assert report["image_prompts"] == 5
    assert all(x["lossless"]["greedy_identical"] for x in report["methods"])
    stored = distilled(
        world,
        tmp_path / "stored",
        family,
        2,
        "--features",
        tmp_path / "features",
        "--loop.eval_every",
        0,
    )
    first = [next(x["train/loss"] for x in log if "train/loss" in x) for log in (live, stored)]
    assert first[0] == pytest.approx(first[1], rel=0.05)


@pytest.mark.slow
def test_images_in_training_raise_acceptance(
    world: Sampled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a training whose drafts know no more of images than one from which they were dropped: of greedy answers
    to the same questions about several images, which are learned by heart."""
    rows = [
        {"messages": [user(shown(f"{color}.png"), said(text))]}
        for text in ("zq what", "zq how")
        for color in COLORS
    ]
    prompts = write_rows(save_pictures(tmp_path / "data") / "asked.jsonl", rows)
    made = Sampled(world.target, prompts, tmp_path / "out")
    made.sample(made.out, "--sampling.temperature", 0, "--max_new_tokens", 24).ok()
    settings = "--loop.lr", 3e-3, "--loop.eval_every", 0

    def without_images(folder: Path, row: SampleRow) -> SampleRow:
        row = copy.copy(row)
        row.pop("images", None)
        return row

    distilled(made, tmp_path / "seen", "eagle3", 120, *settings)
    monkeypatch.setattr(mixture, "locate_images", without_images)
    distilled(made, tmp_path / "dropped", "eagle3", 120, *settings)
    monkeypatch.undo()
    alphas = []
    for name in ("seen", "dropped"):
        found = image_answers(made, tmp_path / name, frozenset(EOS), max_new_tokens=24)
        alphas.append(Acceptance.of(found, 4).alpha.value or 0.0)
    assert alphas[0] > alphas[1] + 0.1, alphas


def test_a_training_never_leaves_images_out(world: Sampled, tmp_path: Path) -> None:
    """Catches settings under which a draft would learn from placeholders alone."""
    target = tiny_target(tiny_model("llama"))
    with pytest.raises(UserError, match="samples hold images.*reads text only"):
        training.check_images(DistillConfig(), target)
    reads = dataclasses.replace(target, runner=SimpleNamespace(takes_images=True))  # type: ignore[arg-type]
    training.check_images(DistillConfig(), reads)
    served, on_policy = DistillConfig(), DistillConfig()
    served.states.url, on_policy.on_policy.share = "http://localhost", 0.5
    for s, reason in ((served, "sent tokens alone"), (on_policy, "set it to 0")):
        with pytest.raises(UserError, match=f"samples hold images.*{reason}"):
            training.check_images(s, reads)
    line = worlds.call(
        "train/distill.py", "--target", world.target, "--data", world.out, "--out", tmp_path / "x",
        "--draft.family", "medusa2", "--loop.steps", 1, "--tracker", "none",
    ).error()  # fmt: skip
    assert "trains in the target" in line
    assert not (tmp_path / "x").exists()


def test_lost_and_altered_images_are_seen(world: Sampled, tmp_path: Path) -> None:
    """Catches a training on another picture than the target saw, and a set that is published without its images."""
    out = tmp_path / "set"
    shutil.copytree(world.out, out)
    path = next((out / "images").iterdir())
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(UserError, match="was altered: delete it"):
        read_stored(str(path))
    path.unlink()
    with pytest.raises(UserError, match=r"is missing: run the train/sample\.py command again"):
        mixture.load(str(out), 512)
    with pytest.raises(UserError, match="is missing"):
        read_stored(str(path))
    with pytest.raises(UserError, match="holds images"):
        dataset_card.read_stats(world.out)


def test_the_doctor_finds_supervised_images(world: Sampled) -> None:
    """Bug: a set whose loss spans lie over images. Nothing else is said of such a set: what stands for an image is no
    special token of a reply, no loop, no label that is missing, and may be a token that the target does not embed."""
    tokenizer = AutoTokenizer.from_pretrained(world.target)

    def found(
        rows: Sequence[SampleRow], size: int = len(tokenizer), longest: int = 4096
    ) -> dict[str, int]:
        tally = Tally(0.3)
        check = AnswerCheck(tally, tokenizer, frozenset(EOS), size, longest)
        for row in rows:
            check.add(SeenRow(row["id"], row, ChatTemplate(tokenizer), None, False))
        check.finish()
        return {finding.name: finding.rows for finding in tally.findings()[0]}

    usual = found(world.rows)
    assert "images are supervised" not in usual
    assert found(world.rows, len(tokenizer) - 1) == usual
    planted = [batching.supervise_whole_row(row) for row in world.rows]
    assert found(planted) == {**usual, "images are supervised": 5}
    large = [with_larger_images(row) for row in world.rows]
    assert found(large) == usual
    assert found(large, longest=512) == {**usual, "rows longer than training reads": 5}
    as_text = [{**row, "image_spans": []} for row in large]
    assert found(as_text)["few supervised tokens"] == len(large)  # type: ignore[arg-type]


def with_larger_images(row: SampleRow) -> SampleRow:
    """The row with a hundred times as many placeholders in its first image."""
    if "images" not in row:
        return row
    [start, end], *later = row["image_spans"]
    more = 99 * (end - start)
    ids = [int(token) for token in row["input_ids"]]
    return {
        **row,
        "input_ids": [*ids[:start], *[ids[start]] * more, *ids[start:]],
        "image_spans": [[start, end + more], *([a + more, b + more] for a, b in later)],
        "loss_spans": [[a + more, b + more] for a, b in row["loss_spans"]],
    }


def doctor(target: Path, *arguments: object) -> dict[str, Any]:
    """The JSON of the command's last line, with its findings by name."""
    done = worlds.call("train/doctor.py", "--target", target, *arguments).ok()
    result: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return {**result, "found": {x["name"]: x for x in result["findings"]}}


def test_the_doctor_names_images_that_cannot_be_read(world: Sampled, tmp_path: Path) -> None:
    """Catches rows with images that the doctor refuses, other ids than sampling gives them, and images that only the
    sampling or the training finds missing or damaged."""
    both = "--sources", file_sources(world.prompts), "--data", world.out
    result = doctor(world.target, *both)
    assert [x for x in result["findings"] if x["severity"] == "stops"] == []
    assert not {"row is refused", "special token inside a reply"} & {*result["found"]}
    prompts = result["parts"]["Prompts before sampling"]
    assert (prompts["rows"], prompts["facts"]["with images"]) == (6, 5)
    folder = save_pictures(tmp_path / "data")
    whole = (folder / "blue.png").read_bytes()
    (folder / "blue.png").write_bytes(whole[: len(whole) // 2])
    asked = [{"messages": [user(shown(f"{x}.png"), said("zq"))]} for x in ("red", "blue", "none")]
    path = write_rows(folder / "prompts.jsonl", asked)
    found = doctor(world.target, "--sources", file_sources(path))["found"]
    assert f"{folder}/none.png" in found["row is refused"]["cost"]
    assert f"{folder}/blue.png" in found["prompt is refused"]["cost"]
    shutil.copytree(world.out, tmp_path / "set")
    image = next((tmp_path / "set" / "images").iterdir())
    image.write_bytes(image.read_bytes() + b"x")
    lost = doctor(world.target, "--data", tmp_path / "set")["found"]["image cannot be read"]
    assert (lost["severity"], image.name in lost["cost"]) == ("stops", True)
    held = [row for row in world.rows if image.name in row.get("images", ())]
    assert lost["rows"] == len(held)
