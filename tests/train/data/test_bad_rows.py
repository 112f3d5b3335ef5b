"""A row that cannot be read, or that the chat template refuses, costs itself: it is named, counted and skipped."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import UserError
from tests import worlds
from tests.rows import file_sources, sample, save_byte_target, write_rows
from train.data import sample_store
from train.data.manifest import read_manifest
from train.data.sources import REFUSED, ReadLog, stream_prompts
from train.settings.data import PromptSource

STRICT_TEMPLATE = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('roles must begin with the user') }}{% endif %}"
    "{% for m in messages %}<2>{{ m.role }}\n{{ m.content }}<1>\n{% endfor %}"
    "{% if add_generation_prompt %}<2>assistant\n{% endif %}"
)


def chat(*said: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]}


SYSTEM = {"messages": [{"role": "system", "content": "Be."}, *chat("Hi there", "Yes.")["messages"]]}
GREETING = {
    "messages": [{"role": "assistant", "content": "Hi"}, *chat("Hello", "Yes.")["messages"]]
}
# what is in a line: (the line, what is said of it)
BAD: list[tuple[str, str]] = [
    (json.dumps(SYSTEM), "roles must begin with the user"),
    (json.dumps(GREETING), "roles must begin with the user"),
    (json.dumps(chat("", "Yes.")), r"message 1 \(user\) is empty"),
    (json.dumps(chat("One?", "Yes.", " \n", "No.")), r"message 3 \(user\) is empty"),
    (json.dumps(chat("Two?", "", "Three?", "No.")), r"message 2 \(assistant\) is empty"),
    ('{"prompt": "half', "is not valid JSON"),
    ('{"prompt": "\\ud83d", "completion": "x"}', "half of a surrogate pair"),
    ('["no", "object"]', "is not a JSON object"),
    ('{"prompt": " ", "completion": "x"}', "`prompt` is empty"),
    ('{"prompt": 3, "completion": "x"}', "`prompt` must be text or a list"),
    ('{"ask": "me"}', "needs a column"),
    ('{"messages": [{"role": "user", "content": {"deep": 1}}]}', "every message needs"),
    ("[" * 5000, "nested deeper"),
]  # fmt: skip
GOOD = [{"prompt": f"zq{i} count", "completion": f"to {i}"} for i in range(20)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_target(tmp_path_factory.mktemp("world") / "target", STRICT_TEMPLATE)


def test_bad_rows_are_named_counted_and_skipped(target: Path, tmp_path: Path) -> None:
    """Bug: the first row that a template refuses, or a half line, ends the run; or rows vanish uncounted. Before, each
    of these lines ended sampling and origin text with an error."""
    good = list(GOOD)
    path = write_rows(tmp_path / "rows.jsonl", [*good[:7], *(line for line, _ in BAD), *good[7:]])
    total = len(GOOD) + len(BAD)
    for origin in ("target", "text"):
        out = tmp_path / origin
        done = sample(target, path, out, "--origin", origin, "--max_bad_rows", 0.5).ok()
        said = [line for line in done.err.splitlines() if line.startswith("skipped ")]
        assert len(said) == 3
        assert all(str(path) in line for line in said)
        assert f"{len(BAD)} of {total} rows refused and skipped" in done.err
        counts = read_manifest(out).counts
        assert (counts["asked"], counts["answered"], counts[REFUSED]) == (20, 20, len(BAD))
        assert len(sample_store.row_ends(out)) == 20


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[reason[:24] for _, reason in BAD])
def test_each_is_named_by_its_line_and_reason(
    target: Path, tmp_path: Path, line: str, reason: str
) -> None:
    """Bug: the message names a hash or a batch, or counts the line from elsewhere."""
    path = write_rows(tmp_path / "rows.jsonl", [GOOD[0], "", line, GOOD[1]])
    for origin in ("target", "text"):
        out = tmp_path / origin
        error = sample(target, path, out, "--origin", origin, "--max_bad_rows", 0.1).error()
        assert "1 of 3 rows are refused, max_bad_rows allows a share of 0.1" in error
        assert f"{path}:3" in error
        assert re.search(reason, error)
        assert not out.exists()


def test_the_cause_of_most_rows_is_named(target: Path, tmp_path: Path) -> None:
    """Bug: one odd row in front hides why all others are refused."""
    chats = [[{"role": "robot", "content": f"hi {i}"}] for i in range(3)]
    rows = [{"messages": []}, *({"messages": chat} for chat in chats)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    error = sample(target, path, tmp_path / "out").error()
    assert (
        f"4 of 4 rows are refused, max_bad_rows allows a share of 0.05; 3 of them such as: {path}:2"
        in error
    )


def test_the_default_share_is_five_percent(target: Path, tmp_path: Path) -> None:
    """Bug: the default lets a file of mostly bad rows pass, or none at all."""
    good = list(GOOD)
    one = write_rows(tmp_path / "one.jsonl", [*good, BAD[0][0]])
    assert sample(target, one, tmp_path / "a", "--origin", "text").code == 0
    two = write_rows(tmp_path / "two.jsonl", [*good, BAD[0][0], BAD[1][0]])
    error = sample(target, two, tmp_path / "b", "--origin", "text").error()
    assert "2 of 22 rows are refused" in error
    assert f"{two}:21" in error


def test_a_long_file_is_checked_before_its_end(tmp_path: Path) -> None:
    """Bug: a file in which hardly anything is right is read for an hour before that is said."""
    path = write_rows(tmp_path / "rows.jsonl", ["{", '{"prompt": "x"}'] * 1000)
    log = ReadLog(max_bad_rows=0.05)
    with pytest.raises(UserError, match=r"500 of 1000 rows are refused.*rows.jsonl:1 is not valid"):
        list(stream_prompts([PromptSource("file", str(path))], 0, log))


def test_a_limit_counts_only_what_it_reads(tmp_path: Path) -> None:
    """Bug: refused rows use up the limit."""
    path = write_rows(tmp_path / "rows.jsonl", [line for row in GOOD for line in (row, "{")])
    log = ReadLog(max_bad_rows=0.9)
    found = list(stream_prompts([PromptSource("file", str(path), limit=15)], 0, log))
    assert len({prompt.text for prompt in found}) == 15
    assert log.rows == 15 + log.dropped[REFUSED]


def test_the_doctor_says_what_sampling_will_skip(target: Path, tmp_path: Path) -> None:
    """Bug: the doctor ends at the first line that it should report."""
    good = list(GOOD)
    path = write_rows(tmp_path / "rows.jsonl", [*good, "{", SYSTEM, chat("")])
    done = worlds.call("train/doctor.py", "--target", target, "--sources", file_sources(path)).ok()
    findings = {f["name"]: f for f in json.loads(done.out.splitlines()[-1])["findings"]}
    unread, refused = findings["row is refused"], findings["prompt is refused"]
    assert (unread["rows"], unread["of"], unread["severity"]) == (2, 23, "stops")
    assert (refused["rows"], refused["of"]) == (1, 21)
    assert f"{path}:21" in unread["cost"]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.overflowing(tmp_path_factory.mktemp("overflow") / "target")


def rows_of(folder: Path) -> dict[str, list[int]]:
    return {row["id"]: list(row["input_ids"]) for row in sample_store.read_shards(folder)}


@pytest.mark.parametrize(("batch", "bad"), [(1, [17]), (4, [17]), (4, [0]), (8, [3, 29])])
def test_nan_of_one_prompt_fails_it_alone(
    overflowing: Path, tmp_path: Path, batch: int, bad: list[int]
) -> None:
    """Bug: NaN ends the run at every start and names a number within the batch, or its row is taken for an answer, or
    spoils the next prompts in its place. Before, the run ended with exit code 2."""
    texts = [f"zq{i} abc {'~~~ ' if i in bad else ''}{'word ' * (i % 5)}{i}" for i in range(30)]
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": text} for text in texts])
    good = write_rows(
        tmp_path / "good.jsonl", [{"prompt": text} for i, text in enumerate(texts) if i not in bad]
    )
    more = ("--dtype", "float16", "--batch_size", batch, "--shard_rows", 4, "--device", "cpu")
    share = ("--max_bad_rows", 0.1)
    done = sample(overflowing, path, tmp_path / "out", *more, *share).ok()
    counts = read_manifest(tmp_path / "out").counts
    found = (counts["asked"], counts["answered"], counts["failed"])
    assert found == (30, 30 - len(bad), len(bad))
    assert (
        f"{len(bad)} failed (0 too long for the context)" in done.err
    )  # before, all were said to be
    assert f"'{overflowing}' in float16 gives NaN or infinite logits" in done.err
    missing = {p.id for p in stream_prompts([PromptSource("file", str(path))], 0, ReadLog())} - {
        *rows_of(tmp_path / "out")
    }
    assert len(missing) == len(bad)
    assert all(f"prompt {name} of rows.jsonl failed" in done.err for name in missing)
    sample(overflowing, path, tmp_path / "out", *more, *share).ok()
    assert read_manifest(tmp_path / "out").counts["answered"] == 30 - len(bad)
    assert sample(overflowing, good, tmp_path / "good", *more).code == 0
    assert rows_of(tmp_path / "good") == rows_of(tmp_path / "out")


def test_nan_of_many_prompts_ends_the_run(overflowing: Path, tmp_path: Path) -> None:
    """Bug: a target that is broken throughout is asked for hours."""
    rows = [{"prompt": f"zq{i} ~ x"} for i in range(12)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    done = sample(overflowing, path, tmp_path / "out", "--dtype", "float16", "--device", "cpu")
    assert done.code == 2
    said = done.err.splitlines()[-1]
    assert said.startswith("error: 2 prompts failed, the last one of rows.jsonl: target")
    assert "its dtype is too narrow" in said
