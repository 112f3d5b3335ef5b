"""Files, folders and tables of every form that is read give training and evaluation the same rows."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from decode.common.errors import UserError
from decode.model import names
from decode.model.loading import Target
from eval.tasks import row_files
from eval.tasks.loading import Task, load_task_prompts, task_version
from tests.rows import byte_target
from train.data.sources import ReadLog, evaluation_texts, read_prompts, stream_prompts
from train.settings.data import PromptSource

ROWS = [{"prompt": f"zq{i} say {i * 3} é\u2028 words", "n": i} for i in range(12)]
TEXTS = [str(row["prompt"]) for row in ROWS]


@pytest.fixture(scope="module")
def target() -> Target:
    return byte_target()


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


def snapshot(folder: Path) -> Path:
    """A folder as it is downloaded and unpacked: an empty file, and texts beside the rows that are none of them."""
    (folder / "ja 日本").mkdir()
    (folder / "ja 日本" / "é🙂 0.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(ROWS[:7]))
    (folder / "ja 日本" / "é🙂 1.JSON").write_text("another ending")
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[7:]).replace(b"\n", b"\r\n")))
    (folder / "zz.jsonl").write_bytes(b"")
    (folder / "__MACOSX").mkdir()
    for name in ("README.txt", "LICENSE.txt", "requirements.txt", "__MACOSX/._z.jsonl"):
        (folder / name).write_text("torch >= 2")
    (folder / ".gitattributes").write_text("*.jsonl filter=lfs")
    (folder / "table.csv").write_text("prompt\nno row\n")
    return folder


def large_strings(folder: Path) -> Path:
    """Parquet as other libraries write it: large strings, and a dictionary of values."""
    texts = pyarrow.array(TEXTS, pyarrow.large_string()).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), folder / "a.parquet")
    return folder / "a.parquet"


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


def saved_with_one_split(folder: Path) -> Path:
    splits = {"everything": datasets.Dataset.from_list(ROWS)}
    datasets.DatasetDict(splits).save_to_disk(str(folder / "one"))
    return folder / "one"


BOM = b"\xef\xbb\xbf"
FORMS: dict[str, Callable[[Path], Path]] = {
    "jsonl": one("a.jsonl", lines(ROWS)),
    "jsonl, BOM": one("a.jsonl", BOM + lines(ROWS)),
    "jsonl, BOM within": one(
        "a.jsonl", BOM + lines(ROWS[:4]) + BOM + lines(ROWS[4:]) + BOM + b"\n"
    ),
    "jsonl, CRLF and empty lines": one(
        "a.jsonl", b"\r\n" + lines(ROWS).replace(b"\n", b"\r\n \t\r\n")
    ),
    "jsonl, CR": one("a.jsonl", lines(ROWS).replace(b"\n", b"\r")),
    "jsonl, no last line end": one("a.jsonl", lines(ROWS).strip()),
    "jsonl.gz, BOM and CRLF": one(
        "a.jsonl.gz", gzip.compress(BOM + lines(ROWS).replace(b"\n", b"\r\n"))
    ),
    "json list, BOM": one("a.json", BOM + json.dumps(ROWS).encode()),
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
    "txt, BOM and CRLF": one("a.txt", BOM + "\r\n\r\n".join(TEXTS).encode() + b"\r\n"),
    "txt.zst": one("a.txt.zst", zst("\n \t\n".join(TEXTS).encode())),
    "parquet": parquet,
    "parquet of large strings": large_strings,
    "snapshot": snapshot,
    "save_to_disk of another split": saved_with_one_split,
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
    assert evaluation_texts(str(path), root=tmp_path / "nothing bundled") == TEXTS
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
    ("a.csv", b"prompt\n", r"a.csv: must end in .jsonl, .json, .parquet, .txt, or, but for .parquet, .* .zst, or be a"),
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
    ("folder/state.json", b"{}", "folder/state.json:1: needs a column"),
    ("folder/a.csv", b"prompt\nx\n", "folder holds no file that ends in .jsonl"),
    ("a.json", b"{}", "a.json:1: needs a column"),
    ("a.json", b"[" * 100_000, "a.json is nested deeper"),
    ("a.json", b"[" + b"9" * 5000 + b"]", "a.json has a number of over"),
    ("a.jsonl", b'{"prompt": "good"}\n' + b"9" * 5000, "a.jsonl:2 has a number of over"),
    ("a.arrow", b"ARROW1", "a.arrow: must end in .jsonl"),
    ("a.jsonl", b"", "a.jsonl: has no prompts|a.jsonl holds no prompts"),
    ("a.json", b"", "a.json is empty: write a list of objects"),
    ("a.json", b'[{"prompt": "x"},]', "a.json is not valid JSON"),
    ("a.jsonl", b'{"prompt": "x"},\n', r"a.jsonl:1 is not valid JSON \(Extra data"),
    ("a.jsonl", b'[{"role": "user", "content": "x"}]\n', "a.jsonl:1 is not a JSON object"),
    ("a.jsonl", lines(ROWS).decode().encode("utf-16"), r"a.jsonl is not UTF-8 text \(byte 0\)"),
    ("a.jsonl", gzip.compress(lines(ROWS)), r"a.jsonl is not UTF-8 text \(byte 1\)"),
    ("a.jsonl.gz", lines(ROWS), "a.jsonl.gz cannot be read .Not a gzipped file"),
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


def test_a_saved_set_within_a_folder_is_named(tmp_path: Path) -> None:
    """Bug: the files that describe a saved set are read as rows. Before: "state.json is not a list"."""
    path = saved(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} holds {path}, a folder of save_to_disk: name"):
        read_prompts([PromptSource("file", str(tmp_path))], 0)


def test_a_missing_split_names_those_that_there_are(tmp_path: Path) -> None:
    path = saved_splits(tmp_path)
    with pytest.raises(UserError, match="no split 'validation', but train, test: set `split`"):
        read_prompts([PromptSource("file", str(path), split="validation")], 0)


def test_one_object_on_many_lines_is_one_row(tmp_path: Path) -> None:
    """Bug: a file of one row is read if it stands on one line alone. Before, it was refused as no list."""
    for indent in (None, 2):
        (tmp_path / "a.json").write_text(json.dumps(ROWS[0], indent=indent))
        [prompt] = read_prompts([PromptSource("file", str(tmp_path / "a.json"))], 0)
        assert prompt.text == TEXTS[0]


def hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *splits: str, configs: tuple[str, ...] = ("d",)
) -> None:
    """Lets `datasets` find a data set `owner/name` with these splits, each with its name as the first prompt."""
    for name in splits:
        rows = [{"prompt": name}, *ROWS[:2]]
        (folder / "data").mkdir(exist_ok=True)
        file = folder / "data" / f"{name}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    files = "".join(f"  - split: {name}\n    path: data/{name}-*\n" for name in splits)
    described = "".join(f"- config_name: {name}\n  data_files:\n{files}" for name in configs)
    (folder / "README.md").write_text(f"---\nconfigs:\n{described}---\n")
    for function in ("load_dataset", "get_dataset_split_names"):
        real = getattr(datasets, function)
        monkeypatch.setattr(
            datasets,
            function,
            lambda _, *args, real=real, **named: real(str(folder), *args, **named),
        )
    row_files.hub_split.cache_clear()


def first_prompt(target: Target, task: Task) -> str:
    return str(target.tokenizer.decode(load_task_prompts(task, target)[0].prompt_ids))


@pytest.mark.parametrize("only", ["train", "validation", "test"])
def test_the_only_split_of_a_hub_name_is_read(
    only: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Bug: a set without a split `test` is refused by evaluation, one without `train` by sampling, though it has one
    split; or another split is read without a word, or under a version that names `test`. Before: refused."""
    hub(tmp_path, monkeypatch, only)
    assert first_prompt(target, Task("mine", "owner/name")) == only
    assert task_version(Task("mine", "owner/name")) == f"mine@owner/name:{only}"
    said = (
        f"warning: hub data set 'owner/name' has no split 'test': its only one, '{only}', is read"
    )
    assert (said in capsys.readouterr().err) == (only != "test")
    for streaming in (False, True):
        source = PromptSource("hub", "owner/name", streaming=streaming)
        assert [prompt.text for prompt in read_prompts([source], 0)] == [only, *TEXTS[:2]]


def test_one_of_several_splits_is_named_by_a_setting(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the message does not say which splits there are, or evaluation has no setting for one."""
    hub(tmp_path, monkeypatch, "train_sft", "test_sft")
    said = "hub data set 'owner/name' has no split '{}', but train_sft, test_sft: set `split` to one of them"
    with pytest.raises(UserError, match=said.format("test")) as caught:
        load_task_prompts(Task("mine", "owner/name"), target)
    assert "\n" not in str(caught.value)
    for streaming in (False, True):
        with pytest.raises(UserError, match=said.format("train")):
            read_prompts([PromptSource("hub", "owner/name", streaming=streaming)], 0)
    task = Task("mine", "owner/name", split="test_sft")
    assert first_prompt(target, task) == "test_sft"
    assert task_version(task) == "mine@owner/name:test_sft"
    assert first_prompt(target, Task("mine", "owner/name", split="train_sft[2:]")) == TEXTS[1]
    source = PromptSource("hub", "owner/name", split="train_sft")
    assert read_prompts([source], 0)[0].text == "train_sft"


def test_the_configurations_of_a_hub_set_are_named(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a set of several configurations is said to have no such split, or in lines without their names."""
    hub(tmp_path, monkeypatch, "train", "test", configs=("main", "socratic"))
    monkeypatch.setattr(
        names, "_cached", lambda *_: True
    )  # else what is wrong is that nobody is asked
    said = "'owner/name' .config None, split '{}'. cannot be loaded .*'main', 'socratic'.*check its name, config"
    with pytest.raises(UserError, match=said.format("test")) as caught:
        load_task_prompts(Task("mine", "owner/name"), target)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=said.format("train")):
        read_prompts([PromptSource("hub", "owner/name")], 0)
    assert read_prompts([PromptSource("hub", "owner/name", config="main")], 0)[0].text == "train"


def test_a_task_s_split_chooses_among_files(target: Target, tmp_path: Path) -> None:
    """Bug: `split` of a task is for the Hub alone, or its version does not tell which files were read."""
    path = split_files(tmp_path)
    train, test = Task("own", str(path), split="train"), Task("own", str(path))
    assert first_prompt(target, test) == "held out"
    assert first_prompt(target, train) == TEXTS[0]
    assert task_version(train) == f"{task_version(test)}:train"


def test_a_name_that_the_hub_does_not_know_is_said_once(target: Target) -> None:
    """Bug: the question for splits hides why a set cannot be loaded."""
    row_files.hub_split.cache_clear()
    with pytest.raises(UserError, match=r"'owner/name' .*split 'test'\) cannot be loaded .*`path`"):
        load_task_prompts(Task("mine", "owner/name"), target)
