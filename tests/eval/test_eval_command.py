"""eval/run.py as users run it, on tiny models: the report says what its outputs say, and bad input destroys nothing."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.checkpoints.draft_folder import draft_sha256
from decode.common.published import published
from decode.common.typed_json import from_json, to_json
from decode.drafts.lookup import NgramDraft
from decode.model.loading import Target, load_model, load_target
from decode.verification import registry
from eval.checks import greedy_equivalence
from eval.evaluate import count_tokens_after_eos
from eval.results.report import EvalReport
from tests import worlds
from tests.worlds import CONTEXT, EOS, Done, World, contents

COMMAND = "eval/run.py"
K, NEW = 3, 16
# DESIGN of the report, schema 1: fields may be added, not renamed.
FIELDS = {
    "name", "draft", "k", "tree", "temperature", "batch_size", "task", "prompts", "tau", "tau_ci",
    "alpha_by_position", "alpha", "alpha_ci", "alpha_by_position_ci", "acceptance_rate", "counts",
    "draft_sha256", "mode", "dtype", "verification", "lossy", "latency_ms", "tokens_per_second",
    "ms_per_token", "speedup", "speedup_ci", "predicted_speedup", "phase_ms", "lossless",
}  # fmt: skip
ADDED = {
    "domain", "finish", "tokens_after_eos", "failed", "quality", "simulated", "mean_output_tokens", "histogram",
    "draft_altered", "trained_for", "draft_dtype", "lookup", "adaptive", "mirror", "family", "mean_accept_length",
    "unconditional_by_position_ci",
    "prefill", "decode",
}  # fmt: skip
INNER = {
    "counts": {"rounds", "drafted", "accepted", "emitted", "rounds_by_position"},
    "latency_ms": {"p50", "p95", "first_token"},
    "lossless": {"greedy_identical", "prompts"},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), prompts=12)


@pytest.fixture(scope="module")
def evaluated(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A report over two tasks of 4 and 3 prompts, made by the real command, and what it said."""
    folder = tmp_path_factory.mktemp("evaluated")
    tasks = [
        {"name": name, "path": str(worlds.write_prompts(folder / f"{name}.jsonl", texts))}
        for name, texts in (("long", world.texts[:4]), ("short", world.texts[4:7]))
    ]
    done = worlds.call(
        COMMAND, *arguments(world, folder / "out"), "--tasks", json.dumps(tasks)
    ).ok()
    return folder / "out", done


@pytest.fixture(scope="module")
def report(evaluated: tuple[Path, Done]) -> dict[str, Any]:
    return json.loads((evaluated[0] / "report.json").read_text())


@pytest.fixture
def evaluate(world: World, tmp_path: Path) -> Callable[..., Done]:
    """Evaluates greedily on three prompts into tmp_path / "out", in a second."""
    prompts = worlds.write_prompts(tmp_path / "few.jsonl", world.texts[:3])
    few = ["--tasks", tasks_of(prompts), "--temperatures", "[0.0]", "--phase_prompts", 0]
    out = tmp_path / "out"

    def start(*more: object, first: Sequence[object] = ()) -> Done:
        return worlds.call(COMMAND, *first, *arguments(world, out), *few, *more)

    return start


@pytest.fixture(scope="module")
def target(world: World) -> Target:
    return load_target(str(world.target), "cpu")


@pytest.fixture
def three(world: World, target: Target, tmp_path: Path) -> Path:
    """Three prompts whose greedy answers have 8 tokens at least, so that every method drafts."""
    model = load_model(str(world.target), "target", "cpu", "float32")

    def answer(text: str) -> list[int]:
        return greedy_equivalence.reference_greedy_output(
            model, target.tokenizer(text)["input_ids"], NEW, target
        )

    texts = [text for text in world.texts if len(answer(text)) >= 8]
    return worlds.write_prompts(tmp_path / "three.jsonl", texts[:3])


def arguments(world: World, out: Path) -> list[object]:
    methods = [{"name": "ngram"}, {"name": "causal-base", "draft": str(world.draft)}]
    return [
        "--target", world.target, "--methods", json.dumps(methods), "--out", out, "--k", K,
        "--max_new_tokens", NEW, "--phase_prompts", 1,
    ]  # fmt: skip


def tasks_of(*paths: Path) -> str:
    return json.dumps([{"name": path.stem, "path": str(path)} for path in paths])


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "outputs.jsonl").read_text().splitlines()]


def report_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())


# ---- the report ----


def test_report_has_every_field_for_every_method_task_and_temperature(
    world: World, report: dict[str, Any]
) -> None:
    """Bug: a field is renamed, or a method, task or temperature is left out."""
    assert report["schema"] == 1
    assert {"target", "hardware", "versions", "seed", "baseline", "methods"} <= report.keys()
    assert report["baseline"].keys() == {"tokens_per_second", "ms_per_token"}
    found = [(m["name"], m["task"], m["temperature"]) for m in report["methods"]]
    wanted = {
        (name, task, temperature)
        for name in ("plain", "ngram", "causal-base")
        for task in ("all", "long", "short")
        for temperature in (0.0, 1.0)
    }
    assert sorted(found) == sorted(wanted)
    for entry in report["methods"]:
        assert entry.keys() >= FIELDS | ADDED
        for name, inner in INNER.items():
            assert entry[name].keys() >= inner
        assert entry["prompts"] == {"all": 7, "long": 4, "short": 3}[entry["task"]]
        if entry["name"] == "plain":
            assert entry["predicted_speedup"] is None
            assert "relative to plain" in entry["prediction_missing"]
        else:  # a bound that a loaded machine keeps
            assert entry["prediction_missing"] is None
            assert 1 / 3 < entry["predicted_speedup"] / entry["speedup"] < 3
        if entry["task"] == "all":
            assert entry["phase_ms"].keys() == {"draft", "verify", "overhead"}
        if entry["name"] == "plain":
            assert (entry["tau"], entry["alpha"], entry["speedup"]) == (1.0, None, 1.0)
    drafts = {m["name"]: (m["draft"], m["draft_sha256"]) for m in report["methods"]}
    files = [world.draft / "model.safetensors", world.draft / "config.json"]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    assert drafts["causal-base"] == (str(world.draft), digest)
    assert drafts["ngram"] == (None, None)


def test_numbers_follow_from_the_outputs(
    evaluated: tuple[Path, Done], report: dict[str, Any]
) -> None:
    """Bug: means of means, α confused with the acceptance rate, or rows of another task or temperature counted."""
    lines = lines_of(evaluated[0])
    assert len(lines) == 3 * 2 * 7
    for entry in report["methods"]:
        own = [
            line
            for line in lines
            if (line["method"], line["temperature"]) == (entry["name"], entry["temperature"])
            and entry["task"] in ("all", line["task"])
        ]
        rounds = [tuple(pair) for line in own for pair in line["rounds"]]
        emitted = sum(len(line["output_ids"]) for line in own) - len(own)
        drafted, accepted = (sum(column) for column in zip(*rounds, strict=True))
        reached = [sum(min(d, a + 1) >= i for d, a in rounds) for i in range(1, entry["k"] + 1)]
        taken = [sum(a >= i for _, a in rounds) for i in range(1, entry["k"] + 1)]
        assert entry["tau"] == pytest.approx(emitted / len(rounds))
        assert entry["alpha"] == ratio(accepted, sum(reached))
        assert entry["acceptance_rate"] == ratio(accepted, drafted)
        assert entry["alpha_by_position"] == [ratio(*x) for x in zip(taken, reached, strict=True)]
        shares = [n / len(rounds) for n in taken]
        assert entry["unconditional_by_position"] == pytest.approx(shares)
        if entry["k"]:
            length = 1 + accepted / len(rounds)
            assert entry["mean_accept_length"]["pooled"] == pytest.approx(length)
        counts = {
            "rounds": len(rounds), "drafted": drafted, "accepted": accepted, "emitted": emitted,
            "rounds_by_position": reached,
        }  # fmt: skip
        assert {name: entry["counts"][name] for name in counts} == counts
        ids = {(line["task"], line["id"]) for line in own}
        plain = [
            line
            for line in lines
            if (line["method"], line["temperature"]) == ("plain", entry["temperature"])
            and (line["task"], line["id"]) in ids
        ]
        for name, seconds in (("speedup", "seconds"), ("speedup_of_sums", "measured_seconds")):
            slow, fast = (
                sum(line[seconds] for line in side) / sum(len(line["output_ids"]) for line in side)
                for side in (plain, own)
            )
            if name == "speedup_of_sums" or not any(line["untimed"] for line in own):
                assert entry[name] == pytest.approx(slow / fast)
        assert entry["stalled"] == sum(bool(x["untimed"]) for x in own)
        assert entry["repeated_turns"] >= 0
    pooled = next(m for m in report["methods"] if (m["name"], m["task"]) == ("causal-base", "all"))
    assert (
        0 < pooled["acceptance_rate"] < pooled["alpha"] < 1
    )  # else the two could not be told apart


def ratio(numerator: int, denominator: int) -> Any:
    return None if denominator == 0 else pytest.approx(numerator / denominator)


def test_greedy_outputs_are_those_of_generate(
    world: World, evaluated: tuple[Path, Done], report: dict[str, Any]
) -> None:
    """Bug: the verdict is true whatever the outputs are."""
    verdicts: dict[float, set] = {0.0: set(), 1.0: set()}
    for entry in report["methods"]:
        verdicts[entry["temperature"]].add(entry["lossless"]["greedy_identical"])
    assert verdicts == {0.0: {True}, 1.0: {None}}
    model = load_model(str(world.target), "target", "cpu", "float32")
    for line in lines_of(evaluated[0]):
        prompt = torch.tensor([line["prompt_ids"]])
        own = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW
        )
        if line["temperature"] == 0:
            assert line["prompt_ids"] + line["output_ids"] == own[0].tolist()


@pytest.mark.slow
def test_a_rounded_target_is_compared_with_plain_decoding(
    evaluate: Callable[..., Done], tmp_path: Path
) -> None:
    """Catches transformers' text as the measure of w8a8, whose products it rounds otherwise."""
    evaluate("--dtype", "w8a8", "--methods", "[{name: ngram, k: 2}]").ok()
    found = json.loads((tmp_path / "out/report.json").read_text())
    for m in found["methods"]:
        verdict = m["lossless"]
        assert (verdict["reference"], verdict["greedy_identical"]) == ("plain", True)
        assert verdict["identical"] == verdict["prompts"] == m["prompts"]


def test_the_last_line_is_json(evaluated: tuple[Path, Done]) -> None:
    """Bug: a script that reads the last line of stdout meets a table or a progress bar."""
    out, done = evaluated
    last = json.loads(done.out.splitlines()[-1])
    assert last["report"] == str(out / "report.json")
    assert last["greedy_identical"] is True
    assert last["best"].keys() == {"0", "1"}


def test_predictions_stand_beside_what_was_measured(
    evaluated: tuple[Path, Done], report: dict[str, Any], evaluate: Callable, tmp_path: Path
) -> None:
    """Bug: the column is empty, holds the measured value again, or says nothing where no step was timed."""
    out, done = evaluated
    drafted = [m for m in report["methods"] if m["name"] != "plain"]
    assert all(m["predicted_speedup"] != m["speedup"] for m in drafted)
    shown = {f"{m['predicted_speedup']:.2f}" for m in drafted}
    assert all(f"{text}\n" in done.out.replace(" ", "") for text in shown)
    for page in (out / "report.md", out / "report.html"):
        assert all(f"{text}×" in page.read_text() for text in shown)
    assert evaluate().code == 0  # without timed steps
    for m in report_of(tmp_path / "out")["methods"]:
        assert m["predicted_speedup"] is None
        assert m["phase_ms"] is None
    text = (tmp_path / "out" / "report.md").read_text()
    assert "No predicted speed-up: ngram, causal-base (no step was timed)." in text


@pytest.mark.slow
def test_rows_do_not_depend_on_the_batch(evaluated: tuple[Path, Done], tmp_path: Path) -> None:
    """Bug: with another batch size a prompt meets other random numbers, or another row's."""
    config = ["--config", evaluated[0] / "run.yaml", "--temperatures", "[1.0]"]
    worlds.call(COMMAND, *config, "--out", tmp_path / "out", "--batch_size", 5).ok()

    def texts(out: Path) -> list[tuple]:
        fields = ("task", "id", "method", "output_ids", "rounds")
        return [tuple(x[name] for name in fields) for x in lines_of(out) if x["temperature"] == 1]

    assert texts(tmp_path / "out") == texts(evaluated[0])


def test_a_list_on_the_command_line_replaces_that_of_the_file(
    world: World, evaluate: Callable, tmp_path: Path
) -> None:
    """Bug: lists are merged place by place, so that ngram is measured with the draft of the method that it replaces."""
    config = tmp_path / "config.yaml"
    config.write_text(
        f"methods: [{{name: a, k: 2, draft: {world.draft}}}, {{name: b, draft: {world.draft}}}]\n"
        f"tasks: [{{name: few, limit: 1, path: {tmp_path / 'few.jsonl'}}}]\n"
    )
    evaluate(first=["--config", config]).ok()
    entries = report_of(tmp_path / "out")["methods"]
    assert {(m["name"], m["draft"], m["k"], m["prompts"]) for m in entries} == {
        ("plain", None, 0, 3),
        ("ngram", None, K, 3),
        ("causal-base", str(world.draft), K, 3),
    }


def test_the_draft_folder_is_left_as_it_is(world: World, evaluate: Callable) -> None:
    """Bug: evaluating writes its numbers into the draft, whose checksum no longer holds."""
    before = contents(world.draft)
    assert evaluate().code == 0
    assert contents(world.draft) == before


def test_a_folder_of_two_parts_is_published_as_a_folder(
    world: World, evaluate: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a relative folder that is published as it stands, since it looks like a name on the Hub."""
    shutil.copytree(world.draft, tmp_path / "customer" / "secret")
    monkeypatch.chdir(tmp_path)
    evaluate("--methods", "[{name: causal, draft: customer/secret}]").ok()
    report = from_json(EvalReport, report_of(tmp_path / "out"))
    assert {m.draft for m in report.methods} == {None, "./customer/secret"}
    shown = to_json(published(report, EvalReport, "report.json"))
    assert "customer" not in json.dumps(shown)
    assert {m["draft"] for m in shown["methods"]} == {None, "secret"}


@pytest.mark.slow
def test_two_tasks_may_use_the_same_ids(world: World, evaluate: Callable, tmp_path: Path) -> None:
    """Bug: prompts of two files that both count from 0 are judged by each other's reference."""
    paths = []
    for name, texts in (("a", world.texts[:3]), ("b", world.texts[3:6])):
        rows = [{"id": str(i), "prompt": text} for i, text in enumerate(texts)]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = evaluate("--tasks", tasks_of(*paths)).ok()
    assert json.loads(done.out.splitlines()[-1])["greedy_identical"] is True


@pytest.mark.parametrize(
    "said",
    [
        {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "do_sample": True},
        {"repetition_penalty": 9.0, "stop_strings": ["a", " "], "num_beams": 3},
    ],
)
def test_generation_config_of_the_target_changes_no_verdict(
    world: World, evaluate: Callable, tmp_path: Path, said: dict[str, Any]
) -> None:
    """Bug: references and transformers' own engines followed it, and every method seemed to write other text."""
    told = tmp_path / "told"
    shutil.copytree(world.target, told)
    (told / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, **said}))
    done = evaluate("--target", told, "--compare", "hf,hf-assisted,hf-lookup").ok()
    assert json.loads(done.out.splitlines()[-1])["greedy_identical"] is True
    engines = json.loads((tmp_path / "out" / "report.json").read_text())["engines"]
    assert {(e["engine"], e["same_as_ours"], len(e["failed"])) for e in engines} == {
        (name, 3, 0) for name in ("hf", "hf-assisted", "hf-lookup")
    }


def test_a_task_file_may_hold_blank_lines_and_any_letter(
    evaluate: Callable, tmp_path: Path
) -> None:
    """Bug: an empty last line, or U+2028 inside a text, is called invalid JSON."""
    path = tmp_path / "own.jsonl"
    row = json.dumps({"prompt": "zq\u2028é"}, ensure_ascii=False)
    path.write_text(f'{row}\n{{"prompt": "zq"}}\n\n', encoding="utf-8")
    evaluate("--tasks", tasks_of(path)).ok()
    assert len(lines_of(tmp_path / "out")) == 3 * 2


def test_every_answer_ends_once(evaluated: tuple[Path, Done], report: dict[str, Any]) -> None:
    """Bug: tokens after EOS count for one method, or an end is counted twice or not at all."""
    reasons = {"eos": 0, "length": 0}
    for line in lines_of(evaluated[0]):
        ends = [i for i, token in enumerate(line["output_ids"]) if token in worlds.EOS]
        assert ends in ([], [len(line["output_ids"]) - 1])
        assert line["finish_reason"] == ("eos" if ends else "length")
        reasons[line["finish_reason"]] += 1
    assert min(reasons.values()) > 0  # else one of them was not tried
    pooled = [m for m in report["methods"] if m["task"] == "all"]
    assert {m["tokens_after_eos"] for m in pooled} == {0}
    for reason, count in reasons.items():
        assert sum(m["finish"].get(reason, 0) for m in pooled) == count


def test_tokens_after_eos_are_counted() -> None:
    """The test above is blind if this one is not."""
    assert count_tokens_after_eos([5, 1, 5, 1], frozenset([1])) == 2
    for ids in ([5, 5, 1], [5]):
        assert count_tokens_after_eos(ids, frozenset([1])) == 0


@pytest.mark.slow
def test_domains_cut_across_tasks(world: World, evaluate: Callable, tmp_path: Path) -> None:
    """Bug: a domain's numbers are those of a task, or leave out what lies in another one."""
    paths = []
    for name, texts in (("a", world.texts[:3]), ("b", world.texts[3:6])):
        rows = [{"prompt": t, "domain": d} for t, d in zip(texts, ("x", "y", "y"), strict=True)]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate("--tasks", tasks_of(*paths)).code == 0
    found = report_of(tmp_path / "out")["domains"]
    assert {(m["name"], m["domain"], m["task"], m["prompts"]) for m in found} == {
        (name, domain, "all", prompts)
        for name in ("plain", "ngram", "causal-base")
        for domain, prompts in (("x", 2), ("y", 4))
    }


# ---- what fails, and what is stopped ----


@pytest.mark.slow
def test_a_failed_prompt_is_named_and_the_others_count(
    evaluate: Callable, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: an error in one prompt ends the run, or its prompt is dropped, or keeps the counters of the one before."""
    propose, calls = NgramDraft.propose, []

    def fails(self: NgramDraft, history: torch.Tensor, length: torch.Tensor, k: int) -> Any:
        calls.append(1)
        if bool((history[0, :3] == second).all()):
            raise RuntimeError("out of luck\nat once")
        return propose(self, history, length, k)

    rows = [json.loads(line) for line in three.read_text().splitlines()]
    second = torch.tensor(worlds.byte_tokenizer()(rows[1]["prompt"])["input_ids"][:3])
    monkeypatch.setattr(NgramDraft, "propose", fails)
    done = evaluate("--tasks", tasks_of(three)).ok()
    assert json.loads(done.out.splitlines()[-1])["failed"] == 1
    for entry in report_of(tmp_path / "out")["methods"]:
        failed = [(f["task"], f["error"]) for f in entry["failed"]]
        assert failed == (
            [("three", "RuntimeError: out of luck")] if entry["name"] == "ngram" else []
        )
        assert entry["prompts"] + len(failed) == 3
        assert entry["speedup"] is not None
    monkeypatch.setattr(NgramDraft, "propose", propose)
    assert evaluate("--tasks", tasks_of(three)).code == 0  # the same command tries it again
    assert all(entry["prompts"] == 3 for entry in report_of(tmp_path / "out")["methods"])


def test_a_method_that_never_works_is_one_line(
    evaluate: Callable, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a report of nothing but failures looks like a report."""
    monkeypatch.setattr(NgramDraft, "propose", None)
    done = evaluate("--tasks", tasks_of(three))
    assert done.code == 2
    assert "error: method 'ngram' failed on every prompt" in done.err.splitlines()[-1]


@pytest.mark.slow
def test_killed_and_run_again_goes_on(world: World, tmp_path: Path) -> None:
    """Bug: a kill loses finished prompts, or a rerun measures them again, twice, or with other seeds."""
    prompts = worlds.write_prompts(tmp_path / "own.jsonl", world.texts[:6])
    command = [*arguments(world, tmp_path / "out"), "--tasks", tasks_of(prompts)]
    journal = tmp_path / "out" / "journal.jsonl"

    def measured() -> list[str]:
        lines = journal.read_text().splitlines() if journal.exists() else []
        own = [line for line in lines if '"key": ["runs"' in line and line.endswith("}")]
        return [line for line in own if '"repeats": 0' in line]  # a busy machine stalls, too

    ready = lambda: len(measured()) >= 3  # noqa: E731
    assert worlds.kill_when(ready, COMMAND, *command) == -9
    kept = measured()
    assert 3 <= len(kept) < 12
    worlds.call(COMMAND, *command).ok()
    assert measured()[: len(kept)] == kept
    assert len(measured()) == len({json.dumps(json.loads(x)["key"]) for x in measured()}) == 12
    report, lines = report_of(tmp_path / "out"), lines_of(tmp_path / "out")
    assert report["resumed"] >= len(kept)
    assert len(lines) == 3 * 2 * 6
    worlds.call(COMMAND, *arguments(world, tmp_path / "b"), "--tasks", tasks_of(prompts)).ok()

    def texts(rows: list[dict[str, Any]]) -> list[tuple]:
        return [
            (x["method"], x["temperature"], x["id"], x["output_ids"], x["rounds"]) for x in rows
        ]

    assert texts(lines) == texts(lines_of(tmp_path / "b"))


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(
    evaluate: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: Ctrl-C ends in a traceback, or counts as a prompt that failed."""
    propose, calls = NgramDraft.propose, []

    def stops(self: NgramDraft, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return propose(self, *args)

    monkeypatch.setattr(NgramDraft, "propose", stops)
    done = evaluate()
    assert (done.code, "Traceback" in done.err) == (130, False)
    assert "goes on" in done.err
    assert not (tmp_path / "out" / "report.json").exists()
    assert evaluate().code == 0
    assert report_of(tmp_path / "out")["resumed"] > 0


# ---- law, other engines, quality ----


@pytest.mark.slow
def test_the_law_is_checked(world: World, evaluate: Callable, tmp_path: Path) -> None:
    """Bug: the verdict leaves out a method, forgets its controls, or passes what is lossy."""
    methods = [
        {"name": "causal-base", "draft": str(world.draft)},
        {"name": "typical", "draft": str(world.draft), "rule": "typical"},
    ]
    evaluate("--methods", json.dumps(methods), "--temperatures", "[1.0]", "--check_law", 2500).ok()
    law = report_of(tmp_path / "out")["law"]
    assert [m["name"] for m in law["methods"]] == ["plain", "causal-base", "typical"]
    assert [m["passed"] for m in law["methods"]] == [True, True, False]
    assert [m["control_caught"] for m in law["methods"]] == [None, True, None]
    assert law["passed"] is True
    assert {t["order"] for t in law["tests"] if t["method"] == "plain"} == {"p", "id"}
    assert all(0 < t["detects"] < 0.3 for t in law["tests"])


def test_a_rule_from_outside_is_accepted_and_labelled(
    evaluate: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a lossy rule passes for lossless because its name is not Medusa's, or only known names are settings."""
    loose = replace(registry.find_rule("exact"), name="loose", lossless=False)
    monkeypatch.setitem(registry.VERIFICATION_RULES, "loose", loose)
    evaluate("--methods", "[{name: ngram, rule: loose}, {name: suffix, rule: block}]").ok()
    found = {
        m["name"]: (m["lossy"], m["verification"]) for m in report_of(tmp_path / "out")["methods"]
    }
    assert found == {"plain": (False, "none"), "ngram": (True, "loose"), "suffix": (False, "block")}


@pytest.mark.slow
def test_other_engines_on_the_same_prompts(evaluate: Callable, three: Path, tmp_path: Path) -> None:
    """Bug: another engine gets other prompts, stops elsewhere, or is timed on other tokens than it is credited with."""
    evaluate("--tasks", tasks_of(three), "--compare", "hf,hf-assisted,hf-lookup").ok()
    found = {(e["engine"], e["name"], e["task"]): e for e in report_of(tmp_path / "out")["engines"]}
    assert found.keys() == {
        (engine, name, task)
        for engine, name in (
            ("hf", "plain"),
            ("hf-assisted", "causal-base"),
            ("hf-lookup", "ngram"),
        )
        for task in ("all", "three")
    }
    plain = next(m for m in report_of(tmp_path / "out")["methods"] if m["name"] == "plain")
    for entry in found.values():
        assert (entry["prompts"], entry["same_as_ours"], entry["failed"]) == (3, 3, [])
        assert entry["output_tokens"] == plain["counts"]["output_tokens"]
        assert entry["speedup"] == pytest.approx(plain["ms_per_token"] / entry["ms_per_token"])
        assert entry["speedup_ci"][0] <= entry["speedup"] <= entry["speedup_ci"][1]
    alone = found["hf", "plain", "all"]
    assert (alone["tau"], alone["gain"]) == (1.0, None)
    for helped in (found["hf-assisted", "causal-base", "all"], found["hf-lookup", "ngram", "all"]):
        assert helped["tau"] > 1.0
        assert helped["gain"] == pytest.approx(alone["ms_per_token"] / helped["ms_per_token"])
    line = "transformers with assistant_model = causal-base (K = 3, temperature 0): "
    assert line in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.slow
def test_other_engines_leave_ours_alone(
    world: World, evaluate: Callable, three: Path, tmp_path: Path
) -> None:
    """Bug: between our methods an engine's seed, hook or cache changes what ours sample."""
    sampled = ["--tasks", tasks_of(three), "--temperatures", "[1.0]"]
    assert evaluate(*sampled, "--out", tmp_path / "alone").code == 0
    assert evaluate(*sampled, "--compare", "hf,hf-assisted,hf-lookup").code == 0
    texts = [
        [(x["id"], x["method"], x["output_ids"], x["rounds"]) for x in lines_of(tmp_path / out)]
        for out in ("alone", "out")
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_draft_trained_anew_is_not_mixed_in(world: World, tmp_path: Path) -> None:
    """Bug: a rerun puts the checksum of today's weights on what was measured with yesterday's."""
    draft = shutil.copytree(world.draft, tmp_path / "draft")
    methods = [{"name": "causal", "draft": str(draft)}]
    prompts = worlds.write_prompts(tmp_path / "few.jsonl", world.texts[:2])
    command = [
        *arguments(world, tmp_path / "out"), "--methods", json.dumps(methods), "--tasks", tasks_of(prompts),
        "--temperatures", "[0.0]",
    ]  # fmt: skip
    assert worlds.call(COMMAND, *command).code == 0
    worlds.flip_byte(draft / "model.safetensors", -1)
    error = worlds.call(COMMAND, *command).error()
    assert "other weights of causal" in error
    assert worlds.call(COMMAND, *command, "--overwrite", "true").code == 0


def test_a_lookup_before_a_draft_is_a_method_of_its_own(
    world: World, evaluate: Callable, tmp_path: Path
) -> None:
    """Bug: the lookup is dropped, its tokens are not the target's, or its numbers pass for those of the draft alone."""
    alone = {"name": "causal", "draft": str(world.draft)}
    both = {**alone, "name": "causal+ngram", "lookup": "ngram", "min_match": 1}
    both["dtype"] = "bfloat16"
    evaluate("--methods", json.dumps([alone, both]), "--max_new_tokens", 24).ok()
    report = report_of(tmp_path / "out")
    entries = {m["name"]: m for m in report["methods"] if m["task"] == "all"}
    assert entries["causal+ngram"]["lookup"] == {"name": "ngram", "min_match": 1}
    assert entries["causal"]["lookup"] is entries["plain"]["lookup"] is None
    assert [entries[n]["draft_dtype"] for n in ("causal", "causal+ngram")] == [
        "float32",
        "bfloat16",
    ]
    assert entries["causal+ngram"]["lossless"]["greedy_identical"] is True
    counts = [entries[name]["counts"] for name in ("causal", "causal+ngram")]
    assert counts[0] != counts[1]
    sha = entries["causal+ngram"]["draft_sha256"]
    assert sha == entries["causal"]["draft_sha256"] == draft_sha256(str(world.draft))
    assert {m.name for m in from_json(EvalReport, report).of_draft(sha)} == {"causal"}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "after ngram from 1 tokens on" in text
    assert "float32, draft bfloat16" in text


def test_a_length_by_confidence_is_a_method_of_its_own(
    world: World, evaluate: Callable, tmp_path: Path
) -> None:
    """Bug: the setting is dropped, changes the text, or its numbers pass for those of the draft at K."""
    alone = {"name": "causal", "draft": str(world.draft)}
    unsure = {**alone, "confidence": 0.5, "name": "unsure"}
    evaluate("--methods", json.dumps([alone, unsure])).ok()
    report = report_of(tmp_path / "out")
    entries = {m["name"]: m for m in report["methods"] if m["task"] == "all"}
    assert entries["unsure"]["adaptive"] == {"by": "confidence", "confidence": 0.5}
    assert entries["causal"]["adaptive"] is entries["plain"]["adaptive"] is None
    assert entries["unsure"]["lossless"]["greedy_identical"] is True
    per_round = {
        name: m["counts"]["drafted"] / m["counts"]["rounds"]
        for name, m in entries.items()
        if name != "plain"
    }
    assert per_round["unsure"] < per_round["causal"]
    sha = entries["unsure"]["draft_sha256"]
    assert {m.name for m in from_json(EvalReport, report).of_draft(sha)} == {"causal"}
    assert "by confidence" in (tmp_path / "out" / "report.md").read_text()


def test_a_draft_that_learns_is_a_method_of_its_own(
    world: World, evaluate: Callable, tmp_path: Path
) -> None:
    """Bug: the setting is dropped, changes the text, or its numbers pass for those of the saved draft."""
    alone = {"name": "causal", "draft": str(world.draft)}
    learns = {**alone, "name": "learns", "learn": True, "learn_rate": 100.0}
    evaluate("--methods", json.dumps([alone, learns]), "--max_new_tokens", 24).ok()
    report = report_of(tmp_path / "out")
    entries = {m["name"]: m for m in report["methods"] if m["task"] == "all"}
    assert entries["learns"]["learned"] is True
    assert "learned" not in entries["causal"]
    assert entries["learns"]["lossless"]["greedy_identical"] is True
    assert entries["learns"]["counts"] != entries["causal"]["counts"]
    sha = entries["learns"]["draft_sha256"]
    found = from_json(EvalReport, report)
    assert {m.name for m in found.of_draft(sha)} == {"causal"}
    only = replace(found, methods=[m for m in found.methods if m.name == "learns"])
    assert only.of_draft(sha) == []
    assert "learns (learning)" in (tmp_path / "out" / "report.md").read_text()


def test_mirror_is_a_method_of_its_own(world: World, evaluate: Callable, tmp_path: Path) -> None:
    """Bug: the setting is dropped, changes text or rounds, or its numbers pass for those of the draft alone."""
    alone = {"name": "causal", "draft": str(world.draft)}
    beside = {**alone, "name": "mirror", "mirror": {"exit_layer": 1, "branches": 2}}
    evaluate("--methods", json.dumps([alone, beside]), "--phase_prompts", 3).ok()
    report = report_of(tmp_path / "out")
    entries = {m["name"]: m for m in report["methods"] if m["task"] == "all"}
    mirror = entries["mirror"]["mirror"]
    assert (mirror["exit_layer"], mirror["branches"], mirror["overlap"]) == (1, 2, True)
    assert 0 < mirror["reuse_rate"] <= 1
    assert mirror["exit_hit_rate"] > 0
    assert mirror["hidden_share"] <= 1
    assert entries["causal"]["mirror"] is entries["plain"]["mirror"] is None
    assert entries["mirror"]["lossless"]["greedy_identical"] is True
    assert entries["mirror"]["counts"] == entries["causal"]["counts"]
    sha = entries["mirror"]["draft_sha256"]
    assert {m.name for m in from_json(EvalReport, report).of_draft(sha)} == {"causal"}
    assert "mirror at layer 1" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.slow
def test_quality_stands_beside_plain(world: World, evaluate: Callable, tmp_path: Path) -> None:
    """Bug: a task with references has no score, or the arms of a lossless method differ in greedy score."""
    path = tmp_path / "sums.jsonl"
    rows = [{"question": text, "answer": f"#### {i}"} for i, text in enumerate(world.texts[:3])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"name": "sums", "kind": "gsm8k", "path": str(path)}]
    assert evaluate("--tasks", json.dumps(tasks)).code == 0
    for entry in report_of(tmp_path / "out")["methods"]:
        (quality,) = entry["quality"]
        assert (quality["metric"], quality["prompts"], quality["difference"]) == (
            "exact match", 3, 0,
        )  # fmt: skip
        assert quality["value"] == quality["plain"]


# ---- lossless or not ----


@pytest.mark.slow
def test_bf16_lists_its_ties(world: World, evaluate: Callable, tmp_path: Path) -> None:
    """Bug: in bf16 every near-tie is a failure, or a margin is missing from the list."""
    path = worlds.write_prompts(tmp_path / "own.jsonl", world.texts)
    evaluate("--tasks", tasks_of(path), "--dtype", "bfloat16", "--max_new_tokens", 32).ok()
    for entry in (m for m in report_of(tmp_path / "out")["methods"] if m["task"] == "all"):
        verdict = entry["lossless"]
        assert verdict["greedy_identical"] is True, verdict["failures"]
        assert verdict["identical"] + len(verdict["ties"]) == 12
        assert all(abs(tie["gap"]) <= tie["noise"] for tie in verdict["ties"])


# ---- bad input destroys nothing ----


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--max_new_tokns", "3"], "did you mean 'max_new_tokens'"),
        (["--methods", "[{name: ngram, drft: x}]"], "drft"),
        (["--methods", "[{name: ngram, rule: exacct}]"], "exact, block, typical"),
        (["--compare", "hf-assisted", "--methods", "[{name: ngram}]"], "causal"),
        (["--compare", "hf-lookup", "--methods", "[{name: suffix}]"], "ngram"),
        (["--methods", "[{name: ngram, lookup: suffix}]"], "no model for a lookup"),
        (["--methods", "[{name: ngram, dtype: bfloat16}]"], "dtype"),
        (["--methods", "[{name: causal, draft: x, dtype: fp8}]"], "fp8"),
        (["--methods", "[{name: early-exit, layers: 1, lookup: n-gram}]"], "ngram or suffix"),
        (
            ["--methods", "[{name: early-exit, layers: 1, lookup: ngram, min_match: 0}]"],
            "min_match",
        ),
        (
            ["--methods", "[{name: early-exit, layers: 1, lookup: ngram, tree: {nodes: 4}}]"],
            "no tree",
        ),
        (["--methods", "[{name: early-exit, layers: 1, confidence: 1.5}]"], "confidence"),
        (["--methods", "[{name: ngram, confidence: 0.3}]"], "no model whose passes"),
        (["--methods", "[{name: ngram, mirror: {exit_layer: 1}}]"], "needs a small language model"),
        (["--methods", "[{name: ngram, learn: true}]"], "cannot learn while it serves"),
        (["--methods", "[{name: a, draft: x, learn: true}]", "--mode", "compiled"], "choose eager"),
        (
            ["--methods", "[{name: ngram, mirror: {exit_layer: 1}, lookup: suffix}]"],
            "drop confidence",
        ),
        (
            ["--methods", "[{name: early-exit, layers: 1, confidence: 0.3, tree: {nodes: 4}}]"],
            "no tree",
        ),
    ],
)
def test_bad_input_is_one_line_and_makes_no_folder(
    evaluate: Callable, tmp_path: Path, wrong: list, named: str
) -> None:
    """Bug: a typo is ignored, ends in a traceback, or shows only after the first method was measured."""
    assert named in evaluate(*wrong).error()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"prompt": "zq"}, {"prompt": "x" * CONTEXT}], ":2"),
        ([{"prompt": "zq"}, {"question": "zq"}], ":2"),
        ([{"prompt": "zq"}, {"messages": [{"role": "user", "content": "zq"}]}], "chat template"),
        ([{"prompt": "zq"}, {"prompt": 5}], ":2"),
        ([{"id": "1", "prompt": "zq"}, {"id": "1", "prompt": "qz"}], "1"),
        ([], "no prompts"),
    ],
)
def test_a_bad_task_file_is_named(
    evaluate: Callable, tmp_path: Path, rows: list, named: str
) -> None:
    """Bug: a prompt that cannot be measured ends in a traceback, is cut, or is passed over."""
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = evaluate("--tasks", tasks_of(path)).error()
    assert str(path) in error
    assert named in error
    assert not (tmp_path / "out").exists()
