"""What slows a machine turns no speed-up: a turn is repeated or dropped for all, or the row is void."""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decode.common.journal import Journal
from decode.common.typed_json import to_json
from decode.drafts.causal import CausalDraft
from decode.drafts.lookup import NgramDraft
from decode.engine.records import DecodeRecord
from decode.model.runner import ModelRunner
from eval.benchmark import baselines, machine_load, timing, turns
from eval.benchmark.machine_load import TurnEvidence
from eval.benchmark.methods import PLAIN_DECODING, Method
from eval.benchmark.timing import TimingContext, TimingResult
from eval.benchmark.turns import EngineAnswer
from eval.metrics.round_cost import round_speedup
from eval.results.report import sections_of
from eval.tasks.loading import TaskPrompt
from eval.tuning.selection import select_fastest_settings, sweep_cells
from eval.tuning.sweep import SweepStage, run_sweep
from tests import drafts
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target

DRAFT = Method("draft", NgramDraft(), 4)
OTHER = Method("other", NgramDraft(), 2)
Stall = Callable[[str, int, int], float]
"""(method, batch, how often the method has decoded that batch before) → seconds."""
PROMPTS = 24


class Machine:
    """Stands for decoding: a request takes 0.5 to 2 s, of a text and acceptance of its own, and 2 % of noise.

    `stall` says which pass stalls, and `prefill` whether it does so before the first round. `speed` is how slow the
    machine is by then: it may drift."""

    def __init__(self, stall: Stall = lambda *_: 0.0, *, prefill: bool = False) -> None:
        self.stall, self.prefill = stall, prefill
        self.calls: Counter[tuple[str, int]] = Counter()
        self.neighbour: Callable[[int], float] = lambda _: (
            0.0
        )  # cores that another process has, by call
        self.traffic: Callable[[int], float] = lambda _: (
            0.0
        )  # by how much memory is slower, by call
        self.jump: Callable[[int], float] = lambda _: 0.0  # seconds that the clock jumps, by call
        self.clock = self.calendar = self.others = 0.0
        self.said: set[float] = set()  # all seconds that the clock gave
        self.speed: Callable[[int], float] = lambda _: 1.0
        self.prompt_tokens: Callable[[int], int] = lambda at: 20 + 13 * (at % 7)
        self.tokens: Callable[[int], int] = lambda at: 25 + (at * 29) % 60
        self.text: Callable[[str, int, int], int] = lambda *_: 7

    def decode(self, _: Any, method: Method, batch: Any, *__: Any) -> list[DecodeRecord]:
        number = int(batch[0].id) // len(batch)
        before = self.calls[method.name, number]
        self.calls[method.name, number] += 1
        noise = np.random.default_rng([len(method.name), number, before])
        slow = self.speed(sum(self.calls.values()))
        own = [self.request(method, int(item.id)) for item in batch]
        most = max(len(rounds) for _, rounds in own)
        cost, call = 0.02 + 0.003 * method.k, sum(self.calls.values())
        taken = 0.9 * self.neighbour(call) + self.traffic(
            call
        )  # plain decoding, which reads most, suffers most
        slow *= 1 + taken * (1 if method.k == 0 else 0.5)
        seconds = slow * cost * (1 + 0.02 * noise.standard_normal(most))
        first = slow * 0.0005 * sum(self.prompt_tokens(int(item.id)) for item in batch)
        stall = self.stall(method.name, number, before)
        if self.prefill:
            first += stall
        else:
            seconds[most // 2] += stall
        real = float(first + seconds.sum())
        seconds[most // 3] += self.jump(call)
        self.calendar += real
        self.clock += float(first + seconds.sum())
        self.others += real * self.neighbour(call)
        share = (first + seconds.sum()) / len(batch)
        self.said.add(float(share))
        return [
            DecodeRecord(
                [5] * self.prompt_tokens(int(item.id)), [self.text(method.name, number, before)] * count,
                rounds, "length", first, list(map(float, seconds[: len(rounds)])), "t", item.id,
                seconds=float(share), rows=len(batch),
            )
            for item, (count, rounds) in zip(batch, own, strict=True)
        ]  # fmt: skip

    def request(self, method: Method, at: int) -> tuple[int, list[tuple[int, int]]]:
        """(tokens, rounds): some texts are drafted well and some are not."""
        tokens, rounds = self.tokens(at), list[tuple[int, int]]()
        accepted = 0 if method.k == 0 else 1 + at % 3
        while 1 + sum(a + 1 for _, a in rounds) < tokens:
            rounds.append((method.k, min(accepted, method.k)))
        return tokens, rounds

    def answer(self, name: str) -> Callable[[TaskPrompt], EngineAnswer]:
        def decoded(item: TaskPrompt) -> EngineAnswer:
            (record,) = self.decode(None, Method(name, None, 0), [item])
            rounds = len(record.rounds)
            return {"ids": record.output_ids, "seconds": record.seconds, "rounds": rounds}

        return decoded


@dataclass
class FakeWatch:
    """Reads what a Machine has done, as MachineWatch reads the real one."""

    machine: Machine

    def begin(self) -> None:
        self.then = clocks_of(self.machine)

    def end(self) -> TurnEvidence:
        clock, calendar, others = (
            now - then for now, then in zip(clocks_of(self.machine), self.then, strict=True)
        )
        call = sum(self.machine.calls.values())
        probes = [0.001 * (1 + self.machine.traffic(at)) for at in (call - 2, call)]
        return TurnEvidence(clock, calendar, others, 0.0, 2, probes)


def clocks_of(machine: Machine) -> tuple[float, float, float]:
    return machine.clock, machine.calendar, machine.others


def context(count: int = PROMPTS) -> TimingContext:
    items = [TaskPrompt("t", str(at), [5]) for at in range(count)]
    target = SimpleNamespace(runner=SimpleNamespace(device="cpu"))
    return TimingContext(target, items, 100)  # type: ignore[arg-type]


def run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, journal: Journal, *, rows: int = 1,
    count: int = PROMPTS, methods: tuple[Method, ...] = (DRAFT,), others: tuple[str, ...] = (),
) -> TimingResult:  # fmt: skip
    """Every prompt by the methods on this machine."""
    use(machine, monkeypatch)
    arms = {name: machine.answer(name) for name in others}
    return timing.time_methods(context(count), methods, 0.0, rows, journal, lambda: None, arms)


def use(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(self: timing.InterleavedTimer, _: Any) -> dict[str, str]:
        self.engines = dict.fromkeys(self.methods)  # type: ignore[assignment]
        return {}

    monkeypatch.setattr(timing.InterleavedTimer, "warm_up", warm_up)
    monkeypatch.setattr(timing, "decode_batch", machine.decode)
    monkeypatch.setattr(timing, "MachineWatch", lambda _: FakeWatch(machine))
    monkeypatch.setattr(turns, "busy_reason", machine_load.busy_reason)
    monkeypatch.setattr(turns, "all_busy", machine_load.all_busy)


def figures(found: TimingResult, method: Method = DRAFT) -> dict[str, Any]:
    own, plain = found.records[method], found.records[PLAIN_DECODING]
    return to_json(drafts.measured(own, method.k, plain))


def assert_unmoved(own: dict[str, Any], clean: dict[str, Any]) -> None:
    """By less than 3 %, and the interval is less than 20 % wider."""
    assert own["speedup"] == pytest.approx(clean["speedup"], rel=0.03)
    assert own["ms_per_token"] == pytest.approx(clean["ms_per_token"], rel=0.03)
    width, before = (x["speedup_ci"][1] - x["speedup_ci"][0] for x in (own, clean))
    assert width < 1.2 * before
    assert own["latency_ms"]["mean"] == pytest.approx(clean["latency_ms"]["mean"], rel=0.03)
    assert own["decode"]["seconds"] == pytest.approx(clean["decode"]["seconds"], rel=0.03)


def once(method: str, *at: int, seconds: float = 2.0, times: tuple[int, ...] = (0,)) -> Stall:
    return lambda name, number, before: (
        seconds if name == method and number in at and before in times else 0.0
    )


STALLS: dict[str, tuple[Stall, bool]] = {
    "method": (once("draft", 3), False),
    "plain, first pass": (once("plain", 4), False),
    "plain, second pass": (once("plain", 4, times=(1,)), False),
    "the first turn": (once("draft", 0), False),
    "the last turn": (once("draft", 5), False),
    "prefill": (once("draft", 2), True),
    "prefill of plain": (once("plain", 2), True),
    "small ones": (once("draft", 1, 3, seconds=0.4), False),
    "method and plain": (lambda *x: once("draft", 1)(*x) + once("plain", 4)(*x), False),
}


def assert_honest(found: TimingResult, clean: TimingResult, machine: Machine) -> None:
    """Void and praised nowhere, or within 5 % of the quiet machine. No second but those that the clock gave."""
    own, expected = figures(found), figures(clean)
    assert own["void"] or own["speedup"] == pytest.approx(expected["speedup"], rel=0.05)
    assert own["tau"] == expected["tau"]
    best = sections_of([drafts.measured(found.records[DRAFT], 4, found.records[PLAIN_DECODING])])[0]
    assert (best.fastest is None) == bool(own["void"])
    assert {x.seconds for x in found.records[DRAFT]} <= machine.said
    for x in found.records[PLAIN_DECODING]:
        assert any(
            2 * x.seconds == pytest.approx(a + b) for a in machine.said for b in machine.said
        )


@pytest.mark.parametrize("repeats", [0, 2])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", STALLS)
def test_a_stall_turns_no_speedup(
    name: str, rows: int, repeats: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches two seconds in one of 24 requests that turn 1.34 × into 1.01 ×, with repeats and without."""
    monkeypatch.setattr(turns, "MOST_REPEATS", repeats)
    stall, prefill = STALLS[name]
    clean = run(Machine(), monkeypatch, Journal(tmp_path / "a", {}), rows=rows)
    machine = Machine(stall, prefill=prefill)
    found = run(machine, monkeypatch, Journal(tmp_path / "b", {}), rows=rows)
    own, quiet = figures(found), figures(clean)
    assert (quiet["stalled"], quiet["void"], clean.dropped_turns) == (0, "", {})
    assert_honest(found, clean, machine)
    stalled_turns = {"small ones": 2, "method and plain": 2}.get(name, 1)
    assert found.repeated_turns == (stalled_turns if repeats else 0)
    if repeats:  # a new measurement
        assert (own["stalled"], own["void"]) == (0, "")
        assert_unmoved(own, quiet)
    else:  # for all methods alike
        assert found.dropped_turns == {turns.STALLED: stalled_turns}
        assert own["stalled"] == figures(found, PLAIN_DECODING)["stalled"] == rows * stalled_turns
        assert bool(own["void"]) == (stalled_turns * rows > PROMPTS // 4)


NEIGHBOURS: dict[str, tuple[str, Callable[[int], float], bool]] = {
    "one core": ("neighbour", lambda _: 1.0, True),
    "both cores": ("neighbour", lambda _: 2.0, True),
    "a third of a core": ("neighbour", lambda _: 0.33, True),
    "the second half": ("neighbour", lambda call: 1.0 * (call > 36), True),
    "every other turn": ("neighbour", lambda call: 1.0 * ((call - 1) // 3 % 2), False),
    "plain decoding alone": ("neighbour", lambda call: 1.0 * (call % 3 == 1), True),
    "two turns": ("neighbour", lambda call: 2.0 * (13 <= call <= 18), False),
    "memory, the second half": ("traffic", lambda call: 1.5 * (call > 36), True),
    "memory, one turn": ("traffic", lambda call: 1.5 * (13 <= call <= 15), False),
    "a clock that jumps on": ("jump", lambda call: 2.0 * (call == 20), False),
    "a clock that jumps back": ("jump", lambda call: -0.7 * (call == 20), False),
    "a clock that jumps a little": ("jump", lambda call: -0.015 * (call > 3), False),
    "a clock that jumps all along": ("jump", lambda call: 0.6 * (call % 3 == 1), True),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_busy_machine_praises_nobody(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches "2.14 × [1.85, 2.40]" at τ 1.36, which another process made, and a row that a clock made."""
    what, by_call, void = NEIGHBOURS[name]
    clean = run(Machine(), monkeypatch, Journal(tmp_path / "a", {}))
    machine = Machine()
    setattr(machine, what, by_call)
    found = run(machine, monkeypatch, Journal(tmp_path / "b", {}))
    assert_honest(found, clean, machine)
    own = figures(found)
    assert bool(own["void"]) == void == bool(figures(found, PLAIN_DECODING)["void"])
    mended = 0 if void else PROMPTS // 2  # a quarter of the turns may be repeated in vain
    assert found.repeated_turns <= PROMPTS // 4 + mended


def test_short_turns_of_a_busy_machine_are_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches turns so short that each one's CPU counters hide a neighbour, which the sum of them shows."""
    machine = Machine()
    machine.speed = lambda _: 0.005
    machine.neighbour = lambda _: 0.5
    found = run(machine, monkeypatch, Journal(tmp_path / "a", {}))
    assert found.dropped_turns == {machine_load.BUSY: PROMPTS}
    assert figures(found)["void"] == f"{machine_load.BUSY} (24 of 24 prompts)"


@pytest.mark.parametrize("name", ["method", "plain, first pass", "small ones"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_stall_turns_no_round_of_a_sweep(
    name: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for eval/tune.py: a stalled setting is not passed over, and a stalled baseline flatters none."""
    stage = SweepStage("chains", (DRAFT, OTHER), 0.0, rows)

    def swept(machine: Machine, file: str) -> TimingResult:
        use(machine, monkeypatch)
        return run_sweep(context(), stage, Journal(tmp_path / file, {}), lambda: None)

    clean, found = swept(Machine(), "a"), swept(Machine(STALLS[name][0]), "b")
    for setting in (DRAFT, OTHER):
        own, before = (
            round_speedup(x.records[PLAIN_DECODING], x.records[setting]) for x in (found, clean)
        )
        assert own.value == pytest.approx(before.value, rel=0.03)
        assert own.ci is not None
        assert before.ci is not None
        assert own.ci[1] - own.ci[0] < 1.2 * (before.ci[1] - before.ci[0])
    assert found.repeated_turns == (2 if name == "small ones" else 1)
    chosen, expected = (select_fastest_settings([(stage, x)], 0) for x in (found, clean))
    assert [x.setting for x in chosen] == [x.setting for x in expected]


@pytest.mark.parametrize("name", ["two turns", "both cores"])
def test_a_sweep_beside_others(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a dropped turn that stays in a sweep, and a setting that is chosen by void seconds."""
    monkeypatch.setattr(turns, "MOST_REPEATS", 0)
    stage = SweepStage("chains", (DRAFT,), 0.0, 1)
    machine = Machine()
    machine.neighbour = NEIGHBOURS[name][1]
    use(machine, monkeypatch)
    found = run_sweep(context(), stage, Journal(tmp_path / "a", {}), lambda: None)
    (cell,) = [x for x in sweep_cells(stage, found, 0) if x.method == "draft"]
    if name == "two turns":  # of two passes each, so three turns
        assert (cell.prompts, cell.void, len(found.records[DRAFT])) == (21, "", 21)
        assert len(select_fastest_settings([(stage, found)], 0)) == 1
    else:
        assert (cell.speedup.value, cell.tokens_per_second) == (None, None)
        assert cell.void == f"{machine_load.BUSY} (24 of 24 prompts)"
        assert select_fastest_settings([(stage, found)], 0) == []


@pytest.mark.parametrize("repeats", [0, 2])
def test_other_engines_that_take_turns(
    repeats: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a stall while transformers decodes is part of what transformers takes."""
    monkeypatch.setattr(turns, "MOST_REPEATS", repeats)
    stall = once("hf plain", 7)
    names = ("hf plain", "hf-assisted d")
    clean = run(Machine(), monkeypatch, Journal(tmp_path / "a", {}), others=names)
    machine = Machine(stall)
    found = run(machine, monkeypatch, Journal(tmp_path / "b", {}), others=names)
    for name in names:
        own, before = (
            [x["seconds"] for x in each.answers[name] if not x["untimed"]]
            for each in (found, clean)
        )
        assert len(own) == PROMPTS - (0 if repeats else 1)
        assert sum(own) / len(own) == pytest.approx(sum(before) / len(before), rel=0.05)
        assert set(own) <= machine.said
    assert found.repeated_turns == (1 if repeats else 0)
    assert [x.id for x in found.records[DRAFT] if x.untimed] == [] if repeats else ["7"]


def test_an_engine_that_runs_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is timed apart: our own plain decoding says which prompts take long."""
    found = run(Machine(), monkeypatch, Journal(tmp_path / "a", {}))
    ours = {(x.task, x.id): x for x in found.records[PLAIN_DECODING]}
    machine = Machine(once("vllm d", 11))
    machine.tokens = lambda at: 25 + (at * 29) % 60
    items = context().items
    answers = {
        name: [machine.answer(name)(item) for item in items] for name in ("vllm plain", "vllm d")
    }
    answers["vllm plain"][3] = {"error": "RuntimeError: no room"}
    judged = baselines._judge_apart(items, ours, answers)
    assert [i for i, x in enumerate(judged["vllm d"]) if x["untimed"]] == [11]
    assert [x["untimed"] for x in judged["vllm plain"]] == [""] * PROMPTS
    for label, own in answers.items():
        assert [{**x, "untimed": ""} for x in own] == [{**x, "untimed": ""} for x in judged[label]]


@pytest.mark.parametrize("drift", [0.3, -0.3])
def test_a_machine_that_drifts_does_not_stall(
    drift: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 30 % from the first turn to the last: nothing is repeated, nothing taken off, the speed-up is right."""
    expected = figures(run(Machine(), monkeypatch, Journal(tmp_path / "a", {})))
    machine = Machine()
    machine.speed = lambda calls: 1 + drift * calls / (3 * PROMPTS)
    found = run(machine, monkeypatch, Journal(tmp_path / "b", {}))
    own = figures(found)
    assert found.repeated_turns == own["stalled"] == figures(found, PLAIN_DECODING)["stalled"] == 0
    assert own["void"] == ""
    assert own["speedup"] == pytest.approx(expected["speedup"], rel=0.01)


@pytest.mark.parametrize("what", ["prompts", "answers", "both"])
def test_long_prompts_and_answers_do_not_stall(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sixth prompt takes twenty times as long, or its answer ten times as long."""
    machine = Machine()
    if what != "answers":
        machine.prompt_tokens = lambda at: 4000 if at % 6 == 5 else 200
    if what != "prompts":
        machine.tokens = lambda at: 400 if at % 6 == 5 else 40
    found = run(machine, monkeypatch, Journal(tmp_path / "a", {}))
    assert found.repeated_turns == 0
    assert found.dropped_turns == {}


@pytest.mark.parametrize("share", [6, 1])
def test_what_a_method_does_itself_is_no_stall(
    share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a method that works for two seconds on every sixth prompt, or on every one, looks faster than it is. What it
    does again in the repeat, or in most turns, stays."""
    machine = Machine(lambda name, number, _: 2.0 * (name == "draft" and number % share == 0))
    found = run(machine, monkeypatch, Journal(tmp_path / "a", {}))
    assert found.repeated_turns == (4 if share == 6 else 0)
    own = figures(found)
    assert own["stalled"] == 0
    assert own["speedup"] == own["speedup_of_sums"]
    clean = figures(run(Machine(), monkeypatch, Journal(tmp_path / "b", {})))
    extra = 2.0 * PROMPTS / share
    assert own["decode"]["seconds"] == pytest.approx(clean["decode"]["seconds"] + extra, rel=0.02)


def test_a_machine_that_stalls_all_the_time_comes_to_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of all passes stall, of repeats too: those repeats that mend nothing come to an end."""
    stalls = np.random.default_rng(0).random(10_000) < 1 / 3
    machine = Machine(lambda *_: 2.0 * stalls[sum(machine.calls.values())])
    found = run(machine, monkeypatch, Journal(tmp_path / "a", {}))
    turns_decoded = sum(n for (name, _), n in machine.calls.items() if name == "draft")
    assert PROMPTS < turns_decoded <= 2 * PROMPTS
    assert 0 < found.repeated_turns <= PROMPTS


@pytest.mark.parametrize("fails", [False, True])
def test_a_repeat_that_does_not_compare_is_left_out(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: seconds of one text beside tokens of another, or a failure in a repeat loses what was measured before."""

    def text(name: str, number: int, before: int) -> int:
        if before > 1 and fails:
            raise RuntimeError("no room")
        return 8 if before > 1 else 7

    machine = Machine(once("draft", 5))
    machine.text = text
    monkeypatch.setattr(timing.TimingContext, "build_engine", lambda *_: None)
    clean = figures(run(Machine(), monkeypatch, Journal(tmp_path / "a", {})))
    found = run(machine, monkeypatch, Journal(tmp_path / "b", {}))
    error = capsys.readouterr().err
    assert error.count("the repeat of a turn gave") == 2
    assert ("no room" if fails else "other tokens") in error
    assert not any(found.failures.values())
    assert {token for x in found.records[PLAIN_DECODING] for token in x.output_ids} == {7}
    assert figures(found)["speedup"] == pytest.approx(clean["speedup"], rel=0.05)
    assert (figures(found)["stalled"], found.repeated_turns) == (1, 1)


def test_repeats_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a rerun forgets that a turn was repeated, repeats it again, or gives other figures."""
    path = tmp_path / "journal.jsonl"
    first = run(Machine(once("draft", 5)), monkeypatch, Journal(path, {}))
    again = Machine(lambda *_: 1e9)
    found = run(again, monkeypatch, Journal(path, {}))
    assert not again.calls
    assert found == first
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))  # killed before the repeat was kept
    repeated = Machine()
    assert run(repeated, monkeypatch, Journal(path, {})).repeated_turns == 1
    assert set(repeated.calls) == {("plain", 5), ("draft", 5)}


def test_journals_of_earlier_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the mean of plain decoding's passes: it is read as it was, and a stall in it is found."""
    path, old = tmp_path / "new", tmp_path / "old"
    monkeypatch.setattr(turns, "MOST_REPEATS", 0)
    clean = figures(run(Machine(), monkeypatch, Journal(tmp_path / "clean", {})))
    run(Machine(once("draft", 5)), monkeypatch, Journal(path, {}))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    label = PLAIN_DECODING.label
    for line in lines[1:]:
        value = line["value"]
        for x, y in zip(value["records"][label], value.pop("again")[label], strict=True):
            x["seconds"] = (x["seconds"] + y["seconds"]) / 2
        line["value"] = {name: value[name] for name in ("records", "answers")}
        for x in [record for own in value["records"].values() for record in own]:
            del x["untimed"]
            x["measured_seconds"] = 0.0
    old.write_text("".join(json.dumps(line) + "\n" for line in lines))
    machine = Machine()
    found = run(machine, monkeypatch, Journal(old, {}))
    assert not machine.calls
    assert figures(found)["speedup"] == pytest.approx(clean["speedup"], rel=0.05)
    assert figures(found)["stalled"] == 1


def test_seconds_alone_tell_a_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stall between rounds, of which no round knows."""
    monkeypatch.setattr(turns, "MOST_REPEATS", 0)
    machine = Machine()
    decode = machine.decode

    def stalled(*args: Any) -> list[DecodeRecord]:
        records = decode(*args)
        extra = 2.0 * (args[1].name == "draft" and args[2][0].id == "9")
        return [replace(x, seconds=x.seconds + extra) for x in records]

    clean = run(Machine(), monkeypatch, Journal(tmp_path / "a", {}))
    monkeypatch.setattr(machine, "decode", stalled)
    found = run(machine, monkeypatch, Journal(tmp_path / "b", {}))
    assert figures(found)["speedup"] == pytest.approx(figures(clean)["speedup"], rel=0.05)
    assert [x.id for x in found.records[PLAIN_DECODING] if x.untimed] == ["9"]


class SleepyDraft(CausalDraft):
    """Sleeps once, in the middle of a prompt."""

    calls = 0

    def propose(self, *args: Any, **settings: Any) -> Any:
        self.calls += 1
        if self.calls == self.asleep_at:
            time.sleep(1.5)
        return super().propose(*args, **settings)

    asleep_at = 60


def test_a_real_stall(tmp_path: Path) -> None:
    """A draft of a tiny model sleeps once, for as long as many requests: its turn is repeated with the same tokens."""
    target = tiny_target(tiny_model("llama", num_hidden_layers=1, max_position_embeddings=128))
    near = ModelRunner(noisy(target.runner.model, 0.01))
    items = [TaskPrompt("t", str(i), ids) for i, ids in enumerate(tiny_prompts(*[8] * 8))]
    found = timing.time_methods(
        TimingContext(target, items, 24), [Method("sleepy", SleepyDraft(near), 3)], 0.0, 1,
        Journal(tmp_path / "j", {}), lambda: None,
    )  # fmt: skip
    (sleepy,) = (m for m in found.records if m != PLAIN_DECODING)
    assert sleepy.draft is not None
    assert sleepy.draft.calls > SleepyDraft.asleep_at  # type: ignore[attr-defined]
    assert found.repeated_turns >= 1
    assert max(x.seconds for x in found.records[sleepy]) < 1.5
    plain = [x.output_ids for x in found.records[PLAIN_DECODING]]
    assert [x.output_ids for x in found.records[sleepy]] == plain


def test_a_repeat_in_fewer_rounds_does_not_count() -> None:
    """Catches a draft that has learned a text in the first attempt, whose repeat would be timed as its speed."""
    first = DecodeRecord([1], [2, 3, 4], [(2, 0), (2, 0), (2, 0)])
    turn = turns.Turn([turns.Attempt({"learning": [first]}, {}, {}, None)])
    assert turn.add_repeat(turns.Attempt({"learning": [first]}, {}, {}, None))
    faster = replace(first, rounds=[(2, 2)])
    assert not turn.add_repeat(turns.Attempt({"learning": [faster]}, {}, {}, None))
    assert len(turn.attempts) == 2
