"""Files, folders and tables of every form that is read give training and evaluation the same rows."""

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from decode.common.errors import UserError
from decode.model.loading import Target
from eval.tasks import row_files
from eval.tasks.loading import Task, load_task_prompts, task_version
from tests.tiny import tiny_model, tiny_target
from tests.worlds import EOS, byte_tokenizer
from train.data.prompts import evaluation_texts, read_prompt_texts, read_prompts, stream_prompts
from train.data.sources import BUNDLED_PROMPTS, PromptSource, ReadLog

ROWS = [{"prompt": f"zq{i} say {i * 3} é\u2028 words", "n": i} for i in range(12)]
TEXTS = [str(row["prompt"]) for row in ROWS]


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    return replace(tiny_target(model, tuple(EOS)), tokenizer=tokenizer)


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def zst(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def one(name: str, data: bytes) -> Callable[[Path], Path]:
    """What writes one file and returns its path."""

    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


def parquet(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet")
    return folder / "a.parquet"


def many(folder: Path) -> Path:
    """A folder as a Hub snapshot has it, with files that hold no rows beside."""
    (folder / "data" / "deep").mkdir(parents=True)
    (folder / "data" / "0.jsonl").write_bytes(lines(ROWS[:3]))
    (folder / "data" / "1.json.gz").write_bytes(gzip.compress(json.dumps(ROWS[3:5]).encode()))
    (folder / "data" / "2.jsonl.zst").write_bytes(zst(lines(ROWS[5:8])))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[8:9]), folder / "data" / "3.parquet")
    (folder / "data" / "deep" / "4.txt").write_text("\n\n".join(TEXTS[9:]), encoding="utf-8")
    (folder / "data" / "README.md").write_text("# no rows")
    (folder / "dataset_infos.json").write_text('{"default": {}}')
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.jsonl").write_bytes(lines([{"prompt": "hidden"}]))
    return folder


def split_files(folder: Path) -> Path:
    for name in ("train", "test"):
        part = [*ROWS] if name == "train" else [{"prompt": "held out"}]
        (folder / f"{name}-00000-of-00001.jsonl").write_bytes(lines(part))
    return folder


def saved(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def saved_splits(folder: Path) -> Path:
    held_out = datasets.Dataset.from_list([{"prompt": "held out", "n": 0}])
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": held_out}
    datasets.DatasetDict(splits).save_to_disk(str(folder / "splits"))
    return folder / "splits"


def one_split(folder: Path) -> Path:
    return saved_splits(folder) / "train"


FORMS: dict[str, Callable[[Path], Path]] = {
    "jsonl": one("a.jsonl", lines(ROWS)),
    "jsonl.gz": one("a.jsonl.gz", gzip.compress(lines(ROWS))),
    "jsonl.zst": one("a.jsonl.zst", zst(lines(ROWS))),
    "zst of two frames": one("a.jsonl.zst", zst(lines(ROWS[:5])) + zst(lines(ROWS[5:]))),
    "json list": one("a.json", json.dumps(ROWS).encode()),
    "json list on many lines": one("a.json", json.dumps(ROWS, indent=2).encode()),
    "json list, gz": one("a.json.gz", gzip.compress(json.dumps(ROWS).encode())),
    "json list, zst": one("a.json.zst", zst(json.dumps(ROWS).encode())),
    "json lines named json": one("a.json", lines(ROWS)),
    "json list inside": one("a.json", json.dumps({"data": ROWS}).encode()),
    "json list inside, on many lines": one("a.json", json.dumps({"data": ROWS}, indent=1).encode()),
    "txt": one("a.txt", "\n\n".join(TEXTS).encode()),
    "txt.zst": one("a.txt.zst", zst("\n \t\n".join(TEXTS).encode())),
    "parquet": parquet,
    "folder": many,
    "folder of splits": split_files,
    "save_to_disk": saved,
    "save_to_disk of splits": saved_splits,
    "a split of save_to_disk": one_split,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_by_training_and_evaluation(
    form: str, target: Target, tmp_path: Path
) -> None:
    """Bug: a file that evaluation reads is refused by training, rows of a folder are lost, hidden files are read."""
    path = FORMS[form](tmp_path)
    prompts = read_prompts([PromptSource("file", str(path))], 0)
    assert [prompt.text for prompt in prompts] == TEXTS
    chosen = read_prompts([PromptSource("file", str(path), limit=5)], 3)
    assert len({prompt.text for prompt in chosen} & {*TEXTS}) == 5
    assert [p.text for p in chosen] != TEXTS[:5]
    all_of_it = read_prompts([PromptSource("file", str(path), limit=12)], 3)
    assert [p.text for p in all_of_it[:5]] == [p.text for p in chosen]
    assert sorted(p.text or "" for p in all_of_it) == sorted(TEXTS)
    items = load_task_prompts(Task("own", str(path)), target)
    decoded = [target.tokenizer.decode(item.prompt_ids) for item in items]
    # evaluation's own files are of the split `test`
    assert decoded == (["held out"] if form.endswith("of splits") else TEXTS)
    assert read_prompt_texts(path) == TEXTS
    version = task_version(Task("own", str(path)))
    assert re.fullmatch("own@[0-9a-f]{12}", version)


def test_a_limit_reads_in_passes_what_it_would_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: rows that are read in several passes come twice, get lost, or come in another order."""
    source = PromptSource("file", str(many(tmp_path)), limit=12)
    at_once = read_prompts([source], 5)
    monkeypatch.setattr(row_files, "ROWS_A_PASS", 5)
    assert read_prompts([source], 5) == at_once
    assert len(at_once) == 12


def test_a_hub_name_is_read_by_both(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: evaluation of a data set by its name needs a recipe, or takes another split than it says."""
    asked: list[tuple[Any, ...]] = []

    def load(name: str, config: Any, split: str, **more: Any) -> datasets.Dataset:
        asked.append((name, config, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    items = load_task_prompts(Task("mine", "owner/name"), target)
    assert [target.tokenizer.decode(item.prompt_ids) for item in items] == TEXTS
    assert task_version(Task("mine", "owner/name")) == "mine@owner/name:test"
    prompts = read_prompts([PromptSource("hub", "owner/name")], 0)
    assert [prompt.text for prompt in prompts] == TEXTS
    assert asked == [("owner/name", None, "test"), ("owner/name", None, "train")]


@pytest.mark.parametrize("form", ["jsonl.zst", "parquet", "save_to_disk", "save_to_disk of splits"])
def test_kind_hub_reads_what_is_on_this_disk(form: str, tmp_path: Path) -> None:
    """Bug: `kind: hub` asks the Hub's library for a folder that it has itself written with save_to_disk."""
    path = FORMS[form](tmp_path)
    prompts = read_prompts([PromptSource("hub", str(path), column="prompt")], 0)
    assert [prompt.text for prompt in prompts] == TEXTS


def test_whole_texts_of_a_folder_are_learned(tmp_path: Path) -> None:
    """Bug: for origin text a folder of documents is cut into paragraphs, or none of it has an answer."""
    documents = ["one\n\ntwo\n", "three\n"]
    for number, text in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(text)
    log = ReadLog()
    source = PromptSource("file", str(tmp_path))
    assert [p.text for p in stream_prompts([source], 0, log, answered=True)] == documents
    assert [p.text for p in stream_prompts([source], 0, log)] == ["one", "two", "three"]


def test_the_form_is_said_once(tmp_path: Path) -> None:
    """Bug: nothing says which columns of a file were read, or it is said for each of its rows."""
    log = ReadLog()
    list(stream_prompts([PromptSource("file", str(many(tmp_path / "set")))], 0, log))
    assert log.lines() == ["set: read as prompt (columns prompt); not used: n"]


BAD: list[tuple[str, bytes, str]] = [
    ("a.csv", b"prompt\n", r"a.csv: must end in .jsonl, .json, .parquet, .txt, or .* .zst, or be a"),
    ("a.jsonl.bz2", b"x", "a.jsonl.bz2: must end in"),
    ("a.jsonl.zst", b"no zstd", "a.jsonl.zst cannot be read"),
    ("a.jsonl.zst", zst(lines(ROWS * 99))[:-40], "a.jsonl.zst cannot be read .Truncated"),
    ("a.jsonl.zst", zst(b'{"prompt": "\xff"}\n'), r"a.jsonl.zst is not UTF-8 text \(byte 12\)"),
    ("a.json", b'{"data": [3]}', "a.json, row 1 is not a JSON object"),
    ("a.json", b'[{"prompt": "x"}, {"prompt": "\\ud800"}]', "a.json, row 2 has .*surrogate pair"),
    ("a.json", b'"text"', "a.json is not a list of JSON objects, nor one object on each line"),
    ("a.json", b'{"ask": "x"}\n{"ask": "y"}\n', "a.json:1: needs a column `messages`, .*it has ask"),
    ("a.parquet", b"PAR1", "a.parquet cannot be read as Parquet"),
    ("folder/a.md", b"x", "folder holds no file that ends in .jsonl"),
    ("folder/state.json", b"{}", "folder.*cannot be loaded|folder/state.json|folder: "),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "said"), BAD)
def test_what_cannot_be_read_is_named(
    name: str, data: bytes, said: str, target: Target, tmp_path: Path
) -> None:
    """Bug: a file of another form ends in a traceback, or in a message that names only another one."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(data)
    path = tmp_path / name.split("/")[0]
    for read in (
        lambda: read_prompts([PromptSource("file", str(path))], 0),
        lambda: load_task_prompts(Task("own", str(path)), target),
    ):
        with pytest.raises(UserError, match=said) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_missing_split_names_those_that_there_are(tmp_path: Path) -> None:
    path = saved_splits(tmp_path)
    with pytest.raises(UserError, match="no split 'validation', but train, test: name the folder"):
        read_prompts([PromptSource("file", str(path), split="validation")], 0)


def test_a_folder_is_read_in_the_order_of_its_names() -> None:
    """Bug: evaluation prompts of a folder come in the order of the disk, or some are left out."""
    assert read_prompt_texts(BUNDLED_PROMPTS / "eval") == evaluation_texts()
