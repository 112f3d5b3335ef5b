"""Tuning: predictions see nothing of what they predict, the choice is not flattered, and the command resumes."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from decode.checkpoints.draft_folder import draft_sha256
from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.common.target_record import TargetRecord
from decode.drafts.causal import CausalDraft
from decode.engine.engine import row_seeds
from decode.engine.records import DecodeRecord, RoundRecord
from decode.model.runner import ModelRunner
from decode.verification.tree import DynamicTree, StaticTree, optimal_static_tree, tree_from_paths
from eval.benchmark import timing
from eval.benchmark.methods import PLAIN_DECODING, Method, describe_tree
from eval.benchmark.timing import TimingContext, TimingResult, decode_batch
from eval.benchmark.turns import rounds_only
from eval.metrics.round_cost import recommended_k_range
from eval.results.report import TreeRecord
from eval.results.tuned import PredictedCell, TunedReport
from eval.settings.evaluation import MethodConfig, TuneConfig
from eval.tasks.loading import TaskPrompt
from eval.tuning.config import interleave_groups, tree_stage
from eval.tuning.selection import (
    cross_validated_predictions,
    fastest_setting,
    held_out_speedup,
    select_fastest_settings,
    summarize_predictions,
    sweep_cells,
)
from eval.tuning.sweep import (
    SweepStage,
    comb_tree,
    emitted_ranks,
    full_batches,
    measure_rank_accuracy,
    run_sweep,
)
from tests import worlds
from tests.tiny import noisy, tiny_model, tiny_prompts, tiny_target
from tests.worlds import Done, World

COMMAND = "eval/tune.py"
PLACE = {"method": "d", "task": "all", "temperature": 0.0, "batch_size": 1}


def sample(
    number: int, rounds: Sequence[tuple[int, int]], ms: float, task: str = "t"
) -> DecodeRecord:
    """A prompt whose rounds took `ms` each."""
    seconds = [ms / 1000] * len(rounds)
    tokens = 1 + sum(a + 1 for _, a in rounds)
    return DecodeRecord(
        [5] * 3, [5] * tokens, list(rounds), "length", 0.0, seconds, task, str(number),
        seconds=sum(seconds),
    )  # fmt: skip


def world_of(k: int, prompts: int, seed: int = 0) -> list[DecodeRecord]:
    """Rounds of K drafts, each accepted with 0.7, that take 10 + 2 K ms; K = 0 is plain decoding at 10 ms."""
    rng = random.Random(f"{seed} {k}")

    def accepted() -> int:
        return next((i for i in range(k) if rng.random() > 0.7), k)

    return [sample(i, [(k, accepted()) for _ in range(400)], 10 + 2 * k) for i in range(prompts)]


# ---- prediction ----


def test_predictions_are_right_where_the_model_is() -> None:
    """Catches costs or acceptance mixed up between draft lengths; 8 is extrapolated from 2 and 6."""
    samples = {k: world_of(k, 8) for k in (0, 1, 2, 3, 4, 6, 8)}
    found = cross_validated_predictions(samples, (2, 6), **PLACE)
    assert {(c.fold, c.k) for c in found} == {(f, k) for f in (0, 1) for k in (1, 2, 3, 4, 6, 8)}
    assert all(c.error < 0.05 for c in found)
    assert {c.k for c in found if c.counted} == {1, 3, 4, 8}
    whole = summarize_predictions(found)
    assert whole.counted == 8
    assert whole.median_error < 0.03


@pytest.mark.parametrize("odd", [0, 1])
def test_predictions_see_only_the_other_half(odd: int) -> None:
    """Catches the phases or acceptance of the very run that is predicted: what it did may be anything."""
    samples = {k: world_of(k, 8) for k in (0, 2, 3, 4, 6)}
    changed = {
        k: [sample(i, [(k, 0)] * 7, 99) if i % 2 == odd else x for i, x in enumerate(own)]
        for k, own in samples.items()
    }
    fold = 1 - odd  # calibrates on the half that stayed

    def cells(records: dict[int, list[DecodeRecord]]) -> dict[int, PredictedCell]:
        found = cross_validated_predictions(records, (2, 6), **PLACE)
        return {c.k: c for c in found if c.fold == fold}

    before, after = cells(samples), cells(changed)
    for k, cell in before.items():
        assert cell.predicted == after[k].predicted
        assert cell.measured != after[k].measured  # that is the half that changed
    # nor does the draft length that is predicted say anything on the calibrating half
    without = {**samples, 3: [sample(i, [(3, 0)] * 7, 99) for i in range(8)]}
    assert cells(without)[3].predicted == before[3].predicted


def test_too_little_is_not_predicted() -> None:
    """Catches an empty sweep that crashes, and two draft lengths that "predict" themselves."""
    assert (
        cross_validated_predictions({k: world_of(k, 4) for k in (0, 2, 6)}, (2, 6), **PLACE) == []
    )
    nothing = {k: [sample(i, [], 1) for i in range(4)] for k in (0, 2, 3, 6)}
    assert cross_validated_predictions(nothing, (2, 6), **PLACE) == []
    found = cross_validated_predictions({k: world_of(k, 4) for k in (0, 1, 3, 5)}, (2, 6), **PLACE)
    assert {c.k for c in found if c.counted} <= {1}  # 3 and 5 stood in for 2 and 6


# ---- choice ----


def test_the_choice_is_the_fastest_of_each_domain() -> None:
    """Catches one setting for all domains, and a speed-up taken from plain rounds of another stage."""

    def own(k: int, gain: dict[str, int], ms: float = 10) -> list[DecodeRecord]:
        rounds = {task: [(k, gain[task])] * 50 for task in gain}
        return [sample(i, rounds[t], ms, t) for i in range(4) for t in ("code", "prose")]

    chains = {
        PLAIN_DECODING: own(0, {"code": 0, "prose": 0}),
        Method("d", k=2): own(2, {"code": 1, "prose": 1}),
        Method("d", k=6): own(6, {"code": 5, "prose": 0}),
    }
    fixed = Method("d", k=4, shape=tree_from_paths([[0], [1], [0, 0]]))
    slow_day = {  # the machine was half as fast: compared with the other plain rounds the tree would lose
        PLAIN_DECODING: own(0, {"code": 0, "prose": 0}, 20),
        fixed: own(3, {"code": 2, "prose": 2}, 20),
    }
    stages = [
        (SweepStage("chains", (), 0.0, 1), TimingResult(chains)),
        (SweepStage("trees", (), 0.0, 1), TimingResult(slow_day)),
    ]
    found = {c.task: c for c in select_fastest_settings(stages, 0)}
    assert found["code"].k == 6
    assert found["code"].speedup.value == pytest.approx(6.0)
    assert found["code"].guide is not None
    assert found["prose"].tree == TreeRecord(paths=[[0], [1], [0, 0]])
    assert found["prose"].k == 2
    assert found["prose"].speedup.value == pytest.approx(3.0)
    assert found["all"].prompts == 8


def test_served_lengths_are_those_of_chains() -> None:
    """Catches a K that is a tree's depth, of another draft, of a lossy rule, of a large batch, or of one domain."""

    def own(k: int, gain: int, ms: float = 10) -> list[DecodeRecord]:
        return [sample(i, [(k, gain)] * 50, ms, t) for i in range(4) for t in ("code", "prose")]

    def stage(
        batch: int, temperature: float, gains: dict[Method, int]
    ) -> tuple[SweepStage, TimingResult]:
        arms = {arm: own(2 if arm.shape else arm.k, gain) for arm, gain in gains.items()}
        found = TimingResult({PLAIN_DECODING: own(0, 0), **arms})
        return SweepStage("chains", (), temperature, batch), found

    tree = Method("d", k=4, shape=tree_from_paths([[0], [1], [0, 0]]))
    lossy = Method("lossy", k=7, rule="typical")
    cold = {Method("d", k=3): 1, Method("d", k=2): 0, tree: 2, Method("ngram", k=6): 5, lossy: 6}
    stages = [
        stage(1, 1.0, {Method("d", k=2): 0, Method("d", k=5): 1}),
        stage(1, 0.0, cold),
        stage(8, 0.0, {Method("d", k=8): 7}),
    ]
    tuned = TunedReport(
        schema=1,
        target=TargetRecord("t"),
        drafts={"d": "ab", "lossy": "ab", "other": "cd"},
        chosen=select_fastest_settings(stages, 0),
        predictions=summarize_predictions([]),
        cells=[cell for one in stages for cell in sweep_cells(*one, 0)],
    )
    found = tuned.fastest_chains("ab")
    assert [(c.cell.temperature, c.cell.task, c.cell.k) for c in found] == [
        (0.0, "all", 3), (0.0, "code", 3), (0.0, "prose", 3), (1.0, "all", 5), (1.0, "code", 5), (1.0, "prose", 5),
    ]  # fmt: skip
    assert found[0].tried == [2, 3]
    assert found[0].cell.speedup.value == pytest.approx(2.0)
    assert found[0].held_out is None  # the tree was chosen
    assert found[3].held_out == pytest.approx(2.0)
    assert tuned.fastest_chains("cd") == []


def test_the_held_out_speedup_is_not_flattered() -> None:
    """Catches the luck of the best of many: 20 arms that are all worth 1.0 must not look faster when held out."""
    rng = random.Random(1)
    lucky, honest = [], []
    for _ in range(30):
        own = {PLAIN_DECODING: [sample(i, [(0, 0)] * 50, 10) for i in range(8)]}
        for k in range(1, 21):
            times = [10 * rng.uniform(0.7, 1.3) for _ in range(8)]
            own[Method("d", k=k)] = [sample(i, [(k, 0)] * 50, ms) for i, ms in enumerate(times)]
        options = [(arm, own) for arm in own if arm != PLAIN_DECODING]
        best = fastest_setting([own], "d", 0, task="all", temperature=0.0, batch_size=1)
        assert best is not None
        lucky.append(best.speedup.value)
        honest.append(held_out_speedup(options))
    assert sum(lucky) / len(lucky) > 1.08
    assert sum(honest) / len(honest) == pytest.approx(1.0, abs=0.03)


def test_guides() -> None:
    """Catches a guide for code given to prose, and for a strong draft withheld."""
    assert recommended_k_range("code", 0.6) == (4, 7)
    assert recommended_k_range("prose", None) == (3, 4)
    assert recommended_k_range("prose", 0.85) == (7, 10)
    assert recommended_k_range("arithmetic", 0.6) is None


def test_every_half_and_batch_holds_all_domains() -> None:
    """Catches halves that split by domain, because tasks alternate prompt by prompt."""
    groups = [
        [TaskPrompt(task, str(i), [1]) for i in range(n)]
        for task, n in (("a", 6), ("b", 6), ("c", 3))
    ]
    order = [item.task for item in interleave_groups(groups)]
    assert len(order) == 15
    for odd in (0, 1):
        assert set(order[odd::2]) == {"a", "b", "c"}
    assert set(order[:6]) == {"a", "b", "c"}


# ---- trees ----


def record(proposed: list[int], tokens: list[int]) -> RoundRecord:
    return RoundRecord(0, False, len(proposed), 0, proposed, tokens, None, 0.0)


def test_ranks_of_a_round() -> None:
    """Catches a rank counted below a node that was not the first choice, whose own accuracy it is not."""
    tree = comb_tree(3, 2)
    paths = [[0], [1], [0, 0], [0, 1], [0, 0, 0], [0, 0, 1]]
    assert describe_tree(tree) == TreeRecord(paths=paths)
    proposed = [10, 11, 20, 21, 30, 31]
    for tokens, ranks in (
        ([10, 20, 30, 99], [(0, 0), (1, 0), (2, 0)]),
        ([10, 21, 55], [(0, 0), (1, 1)]),
        ([11, 20], [(0, 1)]),
        ([77], [(0, None)]),
        ([10], [(0, 0)]),  # ended by EOS: nothing is known below
    ):
        assert emitted_ranks(record(proposed, tokens), tree) == ranks
    assert emitted_ranks(record(proposed[:4], [10, 20]), tree) == []  # cut at the context


def test_a_draft_with_few_levels_gets_the_trees_that_it_can_have(
    context: TimingContext, causal: Method, tmp_path: Path
) -> None:
    """Catches a sweep that ends after its chains, because one level of four choices has no tree of 16 nodes."""
    own = replace(causal, name="early-exit")
    s = TuneConfig(methods=[MethodConfig("early-exit", layers=1)], tree_nodes=[3, 4, 16])
    for levels, sizes in ((1, [3, 4]), (2, [3, 4, 16]), (0, [])):
        journal = Journal(tmp_path / f"{levels}.jsonl", {})
        journal.put(["ranks", "early-exit", 0.0], [[0.5, 0.2, 0.1, 0.1]] * levels)
        stage, expected = tree_stage(s, context, [own], 0.0, journal)
        fixed = [x.shape for x in stage.settings if isinstance(x.shape, StaticTree)]
        assert [len(shape.parents) for shape in fixed] == sizes
        assert len(expected) == len(sizes)


@pytest.mark.parametrize("nodes", [3, 7, 12])
def test_paths_make_the_tree_again(nodes: int) -> None:
    """Catches a tree that a configuration file cannot carry."""
    tree = optimal_static_tree([[0.6, 0.2, 0.1], [0.5, 0.2], [0.4, 0.3]], nodes)
    described = describe_tree(tree)
    assert described is not None
    assert tree_from_paths(described.paths or []) == tree
    assert describe_tree(DynamicTree(2, 5)) == TreeRecord(2, 5)
    assert describe_tree(None) is None


@pytest.fixture(scope="module")
def context() -> TimingContext:
    """A tiny target."""
    items = [TaskPrompt("t", str(i), ids) for i, ids in enumerate(tiny_prompts(3, 5, 4, 6))]
    return TimingContext(tiny_target(tiny_model("llama", seed=1)), items, 24)


@pytest.fixture(scope="module")
def causal(context: TimingContext) -> Method:
    """A draft close to the target."""
    draft = CausalDraft(ModelRunner(noisy(context.target.runner.model, 0.02)))
    return Method("causal", draft, 3)


def rounds_of(
    context: TimingContext, method: Method, items: Sequence[TaskPrompt], tokens: int
) -> Any:
    """(drafted, accepted) of every round, with a fresh engine."""
    engine = context.build_engine(method, context.sampling(0.0))
    records = decode_batch(engine, method, items, row_seeds(0, len(items)), tokens)
    return [pair for record in records for pair in record.rounds]


def test_rank_accuracy_predicts_what_trees_accept(context: TimingContext, causal: Method) -> None:
    """Catches accuracies of the wrong depth: the first choice alone must give what a chain is seen to accept."""
    accuracy = measure_rank_accuracy(context, causal, context.items, 0.0, levels=3, width=3)
    assert all(sum(row) <= 1 + 1e-9 for row in accuracy)
    assert accuracy[0][0] > accuracy[0][1]
    rounds = rounds_of(context, causal, context.items, 24)
    first = sum(a > 0 for _, a in rounds) / len(rounds)
    assert accuracy[0][0] == pytest.approx(first, abs=0.15)


def test_settings_share_a_draft_and_not_its_shape(context: TimingContext, causal: Method) -> None:
    """Catches a tree left over in a chain that is timed after it: both belong to one draft object."""
    shapes: list[StaticTree | DynamicTree | None] = [None, DynamicTree(2, 5), comb_tree(2, 3), None]
    settings = [replace(causal, shape=shape) for shape in shapes]
    engines = [context.build_engine(setting, context.sampling(0.0)) for setting in settings]
    drafted = []
    for engine, setting in zip(engines, settings, strict=True):
        (record,) = decode_batch(engine, setting, context.items[:1], [0], 12)
        drafted.append(max(d for d, _ in record.rounds))
    assert drafted == [3, 5, 6, 3]


def test_order_alternates_and_the_last_batch_is_full(
    context: TimingContext, causal: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an order that favours one setting, and a smaller batch that counts as a large one."""
    turns = []

    def seen(engine: Any, method: Method, batch: Sequence[TaskPrompt], *rest: Any) -> Any:
        turns.append((method.name, [item.id for item in batch]))
        return decode_batch(engine, method, batch, *rest)

    monkeypatch.setattr(timing, "decode_batch", seen)
    monkeypatch.setattr("eval.benchmark.turns.MOST_REPEATS", 0)  # a busy machine stalls, too
    items = [*context.items, replace(context.items[0], id="odd")]
    context = replace(context, items=items, max_new_tokens=4)
    stage = SweepStage("chains", (causal,), 0.0, 2)
    found = run_sweep(context, stage, Journal(tmp_path / "journal.jsonl", {}), lambda: None)
    assert full_batches(context, 2) == [items[:2], items[2:4]]
    assert turns == [
        ("plain", ["0", "1"]), ("causal", ["0", "1"]), ("causal", ["2", "3"]), ("plain", ["2", "3"]),
    ]  # fmt: skip
    for records in found.records.values():
        assert [(x.task, x.id, x.rows) for x in records] == [("t", f"t/{i}", 2) for i in range(4)]
        assert all(x.seconds == sum(x.round_seconds) for x in records)


def test_rounds_only() -> None:
    """Catches prefill counted as rounds, and domains of two tasks that share ids mixed up."""
    record = DecodeRecord(
        [5], [5], [(0, 0)], "eos", 9.0, [0.25, 0.5], "code", "7", "python", seconds=10.0
    )
    own = rounds_only(record)
    assert (own.task, own.id, own.seconds) == ("python", "code/7", 0.75)


# ---- the command ----


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), prompts=12)


def tasks(world: World, folder: Path) -> str:
    files = [
        worlds.write_prompts(folder / f"{name}.jsonl", texts)
        for name, texts in (("code", world.texts[:4]), ("prose", world.texts[4:8]))
    ]
    return json.dumps([{"name": file.stem, "path": str(file)} for file in files])


@pytest.fixture
def tune(world: World, tmp_path: Path) -> Callable[..., Done]:
    methods = [{"name": "ngram"}, {"name": "causal-base", "draft": str(world.draft)}]
    fixed = [
        "--target", world.target, "--methods", json.dumps(methods), "--tasks", tasks(world, tmp_path),
        "--temperatures", "[0.0]", "--ks", "[1, 2, 4]", "--batch_sizes", "[4]", "--batch_ks", "[1]",
        "--tree_nodes", "[4]", "--tree_levels", 2, "--tree_width", 3, "--max_new_tokens", 8,
        "--out", tmp_path / "out",
    ]  # fmt: skip
    return lambda *more: worlds.call(COMMAND, *fixed, *more)


@pytest.mark.slow
def test_command(tune: Callable[..., Done], world: World, tmp_path: Path) -> None:
    """Catches a sweep that leaves a setting out, and a rerun that measures twice."""
    done = tune().ok()
    out = tmp_path / "out"
    tuned = json.loads((out / "tuned.json").read_text())
    cells = {(c["method"], c["setting"], c["batch_size"], c["task"]) for c in tuned["cells"]}
    for task in ("all", "code", "prose"):
        for method in ("ngram", "causal-base"):
            assert {(method, f"K = {k}", 1, task) for k in (1, 2, 4)} <= cells
            assert (method, "K = 1", 4, task) in cells
        assert ("causal-base", "tree of 4, width 3, K = 2", 1, task) in cells
        assert any(c[0] == "causal-base" and "static tree of 4" in c[1] for c in cells)
        assert not any(c[0] == "ngram" and "tree" in c[1] for c in cells)
    assert all(
        c["tau"] == 1 and c["speedup"] == 1 for c in tuned["cells"] if c["method"] == "plain"
    )
    assert all(c["round_ms"]["variance"] is not None for c in tuned["cells"])
    assert {c["k"] for c in tuned["predictions"]["cells"]} == {1, 2, 4}
    assert tuned["trees"][0]["predicted_tau"] >= 1
    assert tuned["bandwidth"] > 0
    dropped = sum(tuned["dropped_turns"].values())
    said = f"{tuned['repeated_turns']} measured again, {dropped} dropped."
    assert said in (out / "tuned.md").read_text()
    assert tuned["drafts"] == {"causal-base": draft_sha256(str(world.draft))}
    assert json.loads(done.out.splitlines()[-1])["tuned"] == str(out / "tuned.json")
    assert len(list((out / "settings").iterdir())) == 6  # one temperature × two batch sizes × three

    journal = (out / "journal.jsonl").read_text()
    assert tune().code == 0
    assert (out / "journal.jsonl").read_text() == journal
    lines = journal.splitlines(keepends=True)
    (out / "journal.jsonl").write_text(
        "".join(lines[:5]) + lines[5][:20]
    )  # killed in the midst of a line
    assert tune().code == 0
    again = (out / "journal.jsonl").read_text().splitlines(keepends=True)
    assert again[:5] == lines[:5]
    measured = [[x for x in map(json.loads, own) if not is_repeat(x["value"])] for own in (again, lines)]  # fmt: skip
    keys, before = ([json.dumps(x["key"]) for x in own] for own in measured)
    assert len(set(keys)) == len(keys) == len(before)


def is_repeat(value: Any) -> bool:
    """Of a turn in which a busy machine stalled: it is a further line of the journal."""
    return isinstance(value, dict) and value.get("repeats", 0) > 0


def test_tuned_settings_run(tune: Callable[..., Done], tmp_path: Path) -> None:
    """Catches a tuned file that another command cannot use: fixed trees and draft lengths must come through."""
    assert tune("--ks", "[3]", "--batch_sizes", "[]", "--tree_nodes", "[]").code == 0
    path = tmp_path / "out" / "tuned.yaml"
    settings = yaml.safe_load(path.read_text())
    assert {m["name"]: m["k"] for m in settings["methods"]} == {"ngram": 3, "causal-base": 3}
    settings["methods"][1] |= {"tree": {"paths": [[0], [1], [0, 0]]}, "k": 0}
    path.write_text(yaml.safe_dump(settings))
    worlds.call("eval/run.py", "--config", path, "--phase_prompts", 0).ok()
    report = json.loads((Path(settings["out"]) / "report.json").read_text())
    found = {m["name"]: m for m in report["methods"] if m["task"] == "all"}
    assert found["causal-base"]["tree"] == {"paths": [[0], [1], [0, 0]]}
    assert found["causal-base"]["k"] == 2
    assert found["causal-base"]["lossless"]["greedy_identical"]
    page = (Path(settings["out"]) / "report.html").read_text()
    assert "Answers, token by token" in page


def test_exits_are_swept_with_every_length(tmp_path: Path) -> None:
    """Catches exits under one name that overwrite each other, and a tuned file without the exit that was chosen."""
    model = tiny_model(
        "llama", seed=1, vocab_size=268, num_hidden_layers=4, max_position_embeddings=512
    )
    with torch.no_grad():
        for layer in model.model.layers[2:]:  # an exit after two layers is always right
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target = worlds.save(tmp_path / "target", model, worlds.byte_tokenizer())
    prompts = worlds.write_prompts(tmp_path / "few.jsonl", ["abc", "xyz q", "de", "fgh i"])
    worlds.call(
        COMMAND, "--target", target, "--methods", "[{name: early-exit}, {name: ngram}]", "--layers", "[1, 2, 3]",
        "--tasks", json.dumps([{"name": "few", "path": str(prompts)}]), "--temperatures", "[0.0]", "--ks", "[1, 2, 4]",
        "--batch_sizes", "[]", "--tree_nodes", "[4]", "--tree_levels", 2, "--tree_width", 2, "--max_new_tokens", 16,
        "--device", "cpu", "--out", tmp_path / "out",
    ).ok()  # fmt: skip
    tuned = json.loads((tmp_path / "out" / "tuned.json").read_text())
    cells = {
        (c["layers"], c["k"]): c
        for c in tuned["cells"]
        if c["method"] == "early-exit" and c["tree"] is None
    }
    assert set(cells) == {(e, k) for e in (1, 2, 3) for k in (1, 2, 4)}
    assert [cells[e, 2]["alpha"] == 1 for e in (1, 2, 3)] == [False, True, True]
    assert cells[3, 4]["setting"] == "E = 3, K = 4"
    own = [*tuned["predictions"]["cells"], *(c for c in tuned["cells"] if c["tree"])]
    assert {c["layers"] for c in own if c["method"] == "early-exit"} == {1, 2, 3}
    assert all(c["layers"] == 0 for c in tuned["cells"] if c["method"] == "ngram")
    (chosen,) = (c for c in tuned["chosen"] if c["method"] == "early-exit")
    settings = yaml.safe_load((tmp_path / "out" / "tuned.yaml").read_text())
    assert settings["methods"][0]["layers"] == chosen["layers"] > 0
    assert settings["methods"][0]["k"] == chosen["k"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layers", "[2]"], "are for the method early-exit"),
        (["--layers", "[1, 1]"], "every number once"),
        (["--batch_sizes", "[16]"], "8 prompts are too few"),
        (["--methods", "[{name: early-exit, layers: 1, confidence: 0.3}]"], "drop it from the"),
        (["--methods", "[{name: early-exit, layers: 1, learn: true}]"], "what others taught"),
    ],
)
def test_bad_settings(
    tune: Callable[..., Done], flags: list[str], message: str, tmp_path: Path
) -> None:
    """Catches a traceback, and a folder made before the mistake shows."""
    assert message in tune(*flags).error()
    assert not (tmp_path / "out").exists()


def test_a_draft_s_limits_are_named_and_the_rest_is_measured(world: World) -> None:
    """Catches a sweep that ends at the first setting that a draft cannot do."""

    class Short(CausalDraft):
        def begin_batch(self, request: Any) -> None:
            if request.k > 2:
                raise UserError("this draft has 2 heads")
            super().begin_batch(request)

    model = tiny_model("llama", seed=1)
    target = tiny_target(model)
    items = [TaskPrompt("t", str(i), ids) for i, ids in enumerate(tiny_prompts(3, 5))]
    context = TimingContext(target, items, 6)
    short = Method("short", Short(ModelRunner(noisy(model, 0.02))))
    journal = Journal(world.target.parent / "journal.jsonl", {})
    stage = SweepStage("chains", (replace(short, k=2), replace(short, k=3)), 0.0, 1)
    found = run_sweep(context, stage, journal, lambda: None)
    assert found.refused == {Method("short", k=3): "this draft has 2 heads"}
    assert set(found.records) == {PLAIN_DECODING, Method("short", k=2)}
