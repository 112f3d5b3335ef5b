"""train/sample.py --engine openai, asking a server that answers well, badly, late or not at all."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decode.common import files
from decode.common.published import published
from decode.common.target_record import ModelFingerprint
from decode.serving.running import completions
from tests import worlds
from tests.train.sampling.stand_in import Ids, StandIn, serving
from tests.train.test_sample_command import Rows, ids_of, rows_of, shard_files, sources
from tests.train.test_sample_origins import world as chat_world  # noqa: F401 (a fixture)
from tests.worlds import CONTEXT, Done, World, contents
from train.data import sample_store
from train.data.manifest import Manifest, load_set, read_manifest

COMMAND = "train/sample.py"
KEY = "k3y-" + "Zq7" * 8
COUNT = 12


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    built = worlds.build(tmp_path_factory.mktemp("world"), prompts=COUNT)
    built.target.joinpath("model.safetensors").unlink()  # no weights are needed
    return built


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "FIRST_WAIT", 0.02)
    monkeypatch.delenv(completions.KEY_VARIABLE, raising=False)


@pytest.fixture
def server() -> Iterator[StandIn]:
    with serving(StandIn()) as stand_in:
        yield stand_in


def arguments(world: World, server: StandIn, out: Path) -> list[object]:
    return [
        "--engine", "openai", "--url", server.url, "--target", world.target, "--sources", sources(world.prompts),
        "--out", out, "--max_new_tokens", 24, "--shard_rows", 4, "--concurrency", 3, "--retries", 3,
    ]  # fmt: skip


def sample(world: World, server: StandIn, out: Path, *more: object) -> Done:
    return worlds.call(COMMAND, *arguments(world, server, out), *more)


def prompt_ids(text: str) -> Ids:
    return tuple(worlds.byte_tokenizer()(text)["input_ids"])


def expected(world: World, server: StandIn) -> Rows:
    """The rows that the server's answers make."""
    rows: Rows = {}
    for name, text in zip(ids_of(world, world.texts), world.texts, strict=True):
        ids = prompt_ids(text)
        if ids in server.said:
            answer, reason = server.said[ids]
            whole = [*ids, *answer]
            rows[name] = (whole, [[len(ids), len(whole)]], reason)
    return rows


def summary(done: Done) -> dict[str, Any]:
    """The counts that the command printed, which add up."""
    assert done.code == 0, done.err
    counts: dict[str, Any] = json.loads(done.out)
    assert counts["asked"] == sum(
        counts[name] for name in ("answered", "failed", "skipped", "answers_too_short")
    )
    assert counts["failed"] == counts["too_long"] + sum(counts["failures"].values())
    return counts


def every_other(fault: str, attempts: int = 1) -> Callable[[Ids, int], str]:
    """The first attempts of about half of the prompts go wrong."""
    return lambda prompt, attempt: fault if sum(prompt) % 2 == 0 and attempt <= attempts else ""


@pytest.mark.parametrize(
    "fault",
    ["", "drop", "hang", "429", "500", "503", "cut", "garbled", "list", "twice", "two choices", "aborted"],
)  # fmt: skip
def test_rows_are_what_the_server_said(
    world: World, server: StandIn, tmp_path: Path, fault: str
) -> None:
    """Bug: a dropped, late, cut or repeated answer is lost, taken twice or given to another prompt."""
    server.fault = every_other(fault)
    patience = ["--timeout", 1.5, "--concurrency", COUNT] if fault == "hang" else []
    counts = summary(sample(world, server, tmp_path / "out", *patience))
    assert (counts["asked"], counts["answered"]) == (COUNT, COUNT)
    assert len(server.said) == COUNT
    assert rows_of(tmp_path / "out") == expected(world, server)
    assert {row[2] for row in rows_of(tmp_path / "out").values()} == {"eos", "length"}
    assert len(load_set(tmp_path / "out")[1]) == COUNT
    faulty = sum(sum(prompt) % 2 == 0 for prompt in server.attempts)
    assert faulty > 1
    repeated = faulty if fault not in ("", "twice") else 0
    assert server.attempts.total() == COUNT + repeated
    if fault == "429":  # it asks for time
        waits = [times[1] - times[0] for times in server.times.values() if len(times) == 2]
        assert min(waits) >= 0.4


def test_the_request_says_all_that_decides_the_distribution(
    world: World, server: StandIn, tmp_path: Path
) -> None:
    """Bug: the server's own top_k, penalty or EOS tokens sample another distribution."""
    options = ["--sampling.temperature", 0.7, "--sampling.top_p", 0.9]
    assert sample(world, server, tmp_path / "out", *options).code == 0
    assert {tuple(body["prompt"]) for body in server.bodies} == set(map(prompt_ids, world.texts))
    common = {
        "model": "tiny", "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "stop_token_ids": worlds.EOS, "max_tokens": 24, "return_token_ids": True,
        "presence_penalty": 0.0, "frequency_penalty": 0.0,
        # llama.cpp's own: without these its --repeat-penalty, --dry-multiplier, --xtc-probability … would be in force
        "repeat_penalty": 1.0, "samplers": ["temperature", "top_k", "top_p"], "mirostat": 0, "dynatemp_range": 0.0,
    }  # fmt: skip
    for body in server.bodies:
        assert common.items() <= body.items()
    seeds = {tuple(body["prompt"]): body["seed"] for body in server.bodies}
    assert len(set(seeds.values())) == COUNT
    again = tmp_path / "again"
    assert (
        sample(world, server, again, *options, "--sampling.top_k", 5, "--concurrency", 1).code == 0
    )
    assert server.bodies[-1]["top_k"] == 5
    assert all(seeds[tuple(body["prompt"])] == body["seed"] for body in server.bodies)
    assert any("logprobs" not in body for body in server.bodies)  # they cost time


@pytest.mark.parametrize("lists", ["content", "tokens", "count", "nothing"])
def test_servers_that_list_no_token_ids(
    world: World, server: StandIn, tmp_path: Path, lists: str
) -> None:
    """Bug: text is tokenised into other tokens, or the EOS token is lost or doubled."""
    server.lists = lists
    done = sample(world, server, tmp_path / "out")
    assert summary(done)["answered"] == COUNT
    assert rows_of(tmp_path / "out") == expected(world, server)


@pytest.mark.parametrize(
    ("lists", "fault", "reason"),
    [
        ("count", "undecodable", "skipped_round_trip"),
        ("count", "too many", "skipped_round_trip"),
        ("nothing", "other end", "skipped_end"),
    ],
)
def test_unusable_answers_are_skipped_once_and_for_all(
    world: World, server: StandIn, tmp_path: Path, lists: str, fault: str, reason: str
) -> None:
    """Bug: tokens that were not sampled are learned, or a prompt is asked again in every start."""
    server.lists, server.fault = lists, every_other(fault, attempts=9)
    counts = summary(sample(world, server, tmp_path / "out"))
    skipped = {prompt for prompt in server.attempts if sum(prompt) % 2 == 0}
    assert len(skipped) > 1
    assert counts["skipped"] == counts[reason] == len(skipped)
    rows = rows_of(tmp_path / "out")
    without = [(row[0], row[2]) for row in rows.values() if not row[1]]
    assert sorted(without) == sorted((list(prompt), reason) for prompt in skipped)
    asked = server.attempts.total()
    assert summary(sample(world, server, tmp_path / "out")) == counts
    assert server.attempts.total() == asked
    assert rows_of(tmp_path / "out") == rows


def test_failed_prompts_are_counted_and_asked_again(
    world: World, server: StandIn, tmp_path: Path
) -> None:
    """Bug: one bad prompt ends the run, a failure is stored or uncounted, or answered prompts are asked again."""
    faults = {world.texts[0]: "400", world.texts[1]: "500", world.texts[2]: "wrong prompt"}
    faults |= {world.texts[3]: "drop", world.texts[4]: "wrong tokens"}
    named = {prompt_ids(text): fault for text, fault in faults.items()}
    server.fault = lambda prompt, attempt: named.get(prompt, "")
    out, long = tmp_path / "out", "y" * CONTEXT
    path = worlds.write_prompts(tmp_path / "all.jsonl", [*world.texts, long])
    done = sample(world, server, out, "--sources", sources(path))
    counts = summary(done)
    assert counts["failures"] == {
        "HTTP 400": 1, "HTTP 500": 1, "foreign answer": 2, "connection": 1,
    }  # fmt: skip
    assert (counts["answered"], counts["too_long"]) == (COUNT - 5, 1)
    assert read_manifest(out).counts.items() <= counts.items()
    tries = {fault: server.attempts[prompt] for prompt, fault in named.items()}
    assert tries == {"400": 1, "500": 4, "wrong prompt": 1, "drop": 4, "wrong tokens": 1}
    server.fault = lambda prompt, attempt: ""
    answered = +server.answered
    counts = summary(sample(world, server, out, "--sources", sources(path)))
    assert (counts["answered"], counts["failed"], counts["too_long"]) == (COUNT, 1, 1)
    assert {prompt: server.answered[prompt] for prompt in answered} == answered
    assert rows_of(out) == expected(world, server)


def test_no_more_requests_at_a_time_than_asked(
    world: World, server: StandIn, tmp_path: Path
) -> None:
    """Bug: requests run one by one, or all of a million are open at once."""
    server.seconds = 0.05
    assert summary(sample(world, server, tmp_path / "out"))["answered"] == COUNT
    assert server.most_open == 3
    # Bug: publishing a set that a server sampled is refused because of an unknown count.
    content = files.read_json(tmp_path / "out" / "manifest.json")
    shown = published(content, Manifest, "manifest.json")
    assert (shown["counts"], shown["engine"]) == (content["counts"], "openai")


def test_a_server_with_a_short_context(world: World, server: StandIn, tmp_path: Path) -> None:
    """Bug: prompts are sent that the server cannot hold, or more tokens are asked than it has room for."""
    server.model = {"id": "tiny", "max_model_len": 30}
    counts = summary(sample(world, server, tmp_path / "out"))
    fitting = [text for text in world.texts if len(text) < 30]
    assert 0 < counts["answered"] == len(fitting) < COUNT
    assert counts["too_long"] == COUNT - len(fitting)
    for body in server.bodies:
        assert body["max_tokens"] == min(24, 30 - len(body["prompt"]))


def test_sigterm_keeps_what_is_finished(world: World, server: StandIn, tmp_path: Path) -> None:
    """Bug: a stop loses finished answers, waits for all others, or the next start asks them again."""
    out = tmp_path / "out"

    def stop_after(count: int) -> None:
        if count == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    server.after, server.seconds = stop_after, 0.1
    done = sample(world, server, out, "--concurrency", 1)
    assert done.code == 143, done.err
    kept = rows_of(out)
    assert 5 <= len(kept) < COUNT
    server.after = lambda count: None
    answered = dict(server.attempts)
    assert summary(sample(world, server, out, "--concurrency", 1))["answered"] == COUNT
    by_id = dict(zip(ids_of(world, world.texts), map(prompt_ids, world.texts), strict=True))
    assert all(server.attempts[by_id[name]] == answered[by_id[name]] for name in kept)
    assert rows_of(out) == expected(world, server)


@pytest.mark.slow
def test_killed_and_started_again(world: World, server: StandIn, tmp_path: Path) -> None:
    """Bug: a kill loses answers that were written, repeats them, or leaves a set that does not go on."""
    out, server.seconds = tmp_path / "out", 0.1
    words = arguments(world, server, out)
    assert worlds.kill_when(lambda: len(shard_files(out)) > 0, COMMAND, *words) == -9
    kept, answered = rows_of(out), dict(server.answered)
    assert 0 < len(kept) < COUNT
    before = contents(out / "shards")
    assert summary(sample(world, server, out))["answered"] == COUNT
    by_id = dict(zip(ids_of(world, world.texts), map(prompt_ids, world.texts), strict=True))
    assert all(server.answered[by_id[name]] == answered[by_id[name]] == 1 for name in kept)
    assert before.items() <= contents(out / "shards").items()
    assert rows_of(out) == expected(world, server)


def test_chats_are_answered_turn_by_turn_as_by_the_local_engine(
    chat_world: World,  # noqa: F811
    server: StandIn,
    tmp_path: Path,
) -> None:
    """Bug: a later turn does not see the target's own replies, or what is between turns differs. The server knows the
    greedy replies of the local engine and nothing else: a prompt that the local engine did not read is an error."""
    settings = [
        "--target", chat_world.target, "--sources", sources(chat_world.prompts), "--turns", "all",
        "--max_new_tokens", 24, "--sampling.temperature", 0,
    ]  # fmt: skip
    assert worlds.call(COMMAND, *settings, "--out", tmp_path / "local").code == 0
    local = rows_of(tmp_path / "local")
    replies: dict[Ids, list[int]] = {}
    for ids, spans, _ in local.values():
        replies |= {
            tuple(map(int, ids[:start])): list(map(int, ids[start:end])) for start, end in spans
        }
    assert len(replies) > len(local)

    def known(prompt: Ids, limit: int, seed: int) -> tuple[list[int], str]:
        reply = replies[prompt]
        return reply, "stop" if reply[-1] in worlds.EOS else "length"

    server.answer = known
    address = ["--engine", "openai", "--url", server.url, "--out", tmp_path / "served"]
    done = worlds.call(COMMAND, *settings, *address)
    assert summary(done)["answered"] == len(local)
    assert rows_of(tmp_path / "served") == local


def test_the_key_is_sent_and_stays_secret(
    world: World, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the key of the environment is not used, or stands in a log, a message or a file."""
    server.key = KEY
    monkeypatch.setenv(completions.KEY_VARIABLE, KEY)
    server.fault = every_other("400", attempts=9)  # what it says repeats the key
    done = sample(world, server, tmp_path / "out")
    assert summary(done)["answered"] > 0
    assert "as told: Bearer ***" in done.err
    assert KEY not in done.err + done.out
    assert contents(tmp_path / "out")
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes()
    monkeypatch.setenv(completions.KEY_VARIABLE, "another")
    message = sample(world, server, tmp_path / "refused").error()
    assert completions.KEY_VARIABLE in message
    assert "another" not in message
    assert not (tmp_path / "refused").exists()


def test_a_server_that_is_gone_ends_the_run(world: World, tmp_path: Path) -> None:
    """Bug: every remaining prompt waits for a server that is not there, or counts as failed."""
    out = tmp_path / "out"
    with serving(StandIn()) as server:
        address = server.url
        assert summary(sample(world, server, out, "--sources", some(world, tmp_path)))["asked"] == 4
    gone = StandIn()
    gone.url = address
    words = ["--resume", "true", "--retries", 1]
    assert "no server answers" in sample(world, gone, out, *words).error()
    with serving(StandIn()) as server:
        refused = completions.Server("http://127.0.0.1:9/v1", "tiny", None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(completions, "connect", lambda s: refused)
            done = sample(world, server, out, *words)
    assert done.code == 2
    assert "cannot be reached any more" in done.err
    assert len(rows_of(out)) == 4


def some(world: World, folder: Path) -> str:
    return sources(worlds.write_prompts(folder / "some.jsonl", world.texts[:4]))


@pytest.mark.parametrize(
    ("more", "fault", "named"),
    [
        (["--model", "other"], "", "serves tiny"),
        ([], "404", "--model"),
        ([], "403", "OPENAI_API_KEY"),
        ([], "400", "HTTP 400: 12"),
        ([], "wrong prompt", "foreign answer: 12"),
    ],
)
def test_a_server_that_is_of_no_use_is_an_error(
    world: World, server: StandIn, tmp_path: Path, more: list[object], fault: str, named: str
) -> None:
    """Bug: the wrong model or a refused key gives an empty set and exit code 0."""
    server.fault = lambda prompt, attempt: fault
    done = sample(world, server, tmp_path / "out", *more)
    assert done.code == 2, done.err
    assert named in done.err.splitlines()[-1]
    assert done.err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert sample_store.shard_paths(tmp_path / "out") == []


def test_what_is_no_such_server(world: World, server: StandIn, tmp_path: Path) -> None:
    """Bug: an address that answers something else ends in a traceback."""
    server.model = "text"  # type: ignore[assignment]
    assert "list of models" in sample(world, server, tmp_path / "out").error()
    server.model = {"id": "tiny"}
    begun = time.monotonic()
    address = server.url.replace("/v1", "/v1/")  # a slash too many
    assert sample(world, server, tmp_path / "out", "--url", address).code == 0
    assert time.monotonic() - begun < 60


def test_answers_of_another_served_model_are_refused(
    world: World, server: StandIn, tmp_path: Path
) -> None:
    """Bug: a set is finished by whatever the address serves by now; or it claims to know the server's weights."""
    out = tmp_path / "out"
    done = sample(world, server, out).ok()
    assert "which weights the server calls tiny is not known" in done.err
    assert read_manifest(out).fingerprints == [ModelFingerprint(served_as="tiny")]
    shard_files(out)[0].unlink()
    (out / "manifest.json").unlink()
    before = contents(out)
    server.model = {"id": "other"}
    error = sample(world, server, out).error()
    assert "served as tiny then, other now" in error
    assert contents(out) == before
    assert sample(world, server, out, "--allow_changed", "true").code == 0
    told = read_manifest(out).fingerprints
    assert sorted(str(one.served_as) for one in told) == ["other", "tiny"]


def test_servers_get_prompts_as_the_setting_renders_them(
    server: StandIn, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Bug: a server's own template or mode decides what the target reads."""
    world: World = request.getfixturevalue("chat_world")
    target = tmp_path / "target"
    shutil.copytree(world.target, target)
    tokenizer = worlds.byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}[{{ date }}|{{ think }}]"
    )
    tokenizer.save_pretrained(target)
    rows = [
        {"prompt": "zq a"},
        {"prompt": "zq b", "chat_template_kwargs": {"think": True}},
        {"prompt": "zq c", "chat_template_kwargs": {"date": "other"}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words: list[object] = [
        "--engine", "openai", "--url", server.url, "--target", target, "--out", tmp_path / "out",
        "--sources", sources(tmp_path / "rows.jsonl"), "--max_new_tokens", 8,
    ]  # fmt: skip
    refused = worlds.call(COMMAND, *words, "--template", "{date: 2026-01-31}")
    assert "needs think, which nobody gave" in refused.error()
    assert server.bodies == []
    worlds.call(COMMAND, *words, "--template", "{date: 2026-01-31, think: no}").ok()
    asked = {worlds.byte_tokenizer().decode(body["prompt"]) for body in server.bodies}
    assert asked == {"zq a[2026-01-31|False]", "zq b[2026-01-31|True]", "zq c[other|False]"}
    assert read_manifest(tmp_path / "out").template == {"date": "2026-01-31", "think": False}
