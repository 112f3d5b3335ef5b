"""What the commands say and write on tiny models is what tests/golden holds (tests/goldens.py says how it is compared).

Commands are run by their files with relative paths, in one folder: nothing here knows how they are built inside.
"""

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from decode.common.errors import UserError
from decode.common.settings import parse_settings
from decode.constraints.grammar import ConstraintConfig, build_matcher
from decode.drafts.mirror import MirrorConfig
from decode.engine.engine import SpeculativeEngine
from decode.model.loading import Target, load_target
from eval.benchmark import config
from eval.benchmark.methods import build_methods
from eval.reporting import render
from eval.settings.evaluation import EvalConfig, MethodConfig, TreeConfig
from tests import worlds
from tests.drafts import referee
from tests.goldens import FOLDER, check, counted_time, difference, masked, tensors, to_text
from tests.train.doctor_checks import sets
from tests.train.doctor_checks.test_planted_defects import (
    add_loops,
    cut_off,
    say_a_special_token,
)
from tests.worlds import Done

ENGINES = ("vllm", "sglang", "trtllm", "transformers")
FAMILIES: dict[str, str] = {
    "causal": "--draft.init draft",
    "pard": "--draft.init draft --draft.block 4",
    "medusa": "--draft.heads 3",
    "eagle1": "",
    "eagle3": "--draft.vocab 64 --draft.steps 3 --draft.taps [1,2,3]",
    "peagle": "--draft.vocab 64 --draft.block 4 --draft.taps [1,2,3] --draft.retention 0.7",
    "dflash": "--draft.vocab null --draft.block 4 --draft.depth 1 --draft.taps [1,2,3]",
    "dspark": "--draft.vocab null --draft.block 4 --draft.depth 1 --draft.taps [1,2,3] --draft.markov_rank 8",
    "mtp": "--draft.steps 3",
    "medusa2": "--draft.heads 3 --draft.target_lora_rank 2",
    "layerskip": "--draft.exit_layer 1",
    "layerskip2": "--draft.exit_layer 1 --draft.target_lora_rank 2",
}
"""Each trained family and its settings here."""
QUICK = ("causal", "medusa", "eagle3", "dspark", "ngram")
"""What the fast suite looks at where a look takes longer; the rest is slow."""
TRAINING = (
    "--target target --data samples --loop.steps 3 --loop.batch_size 4 --loop.micro_batch 4 --loop.eval_every 0 "
    "--loop.max_length 64 --loop.log_every 1 --check.prompts 1 --check.max_new_tokens 4 --wandb disabled "
    "--loop.lr 0.001 --loop.min_lr 0.1 --loop.warmup 50 --loop.clip 1.0 --loss forward_kl --weights.decay 0.8"
)
TASKS = "[{name: own, path: prompts.txt, limit: 3}]"
FOUR = TASKS.replace("3", "4")
LOSSES = ("step", "train/loss", "train/grad_norm")


def quick_first(names: Iterable[str], *also: str) -> list[Any]:
    """Parameters: those that are not in QUICK, or are in `also`, are marked slow."""
    slow = [name for name in names if name not in QUICK or name in also]
    return [pytest.param(x, marks=pytest.mark.slow) if x in slow else x for x in names]


@dataclass(frozen=True)
class Lab:
    """A folder with a tiny target, prompts, a sampled set and a draft of every family."""

    folder: Path

    def call(self, command: str, *words: object, code: int = 0) -> Done:
        """The command in the folder, under a clock that counts its work."""
        with contextlib.chdir(self.folder), counted_time():
            done = worlds.call(command, *words)
        assert done.code == code, done.err
        return done

    def read(self, path: str) -> Any:
        return json.loads((self.folder / path).read_text())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("goldens")
    world = worlds.build(folder, prompts=24, layers=4)
    texts = [text for text in world.texts if len(text) > 8]
    (folder / "prompts.txt").write_text("\n\n".join(texts[:8]) + "\n")
    own = Lab(folder)
    sources = json.dumps([{"kind": "file", "path": "prompts.jsonl"}])
    own.call(
        "train/sample.py", "--target", "target", "--sources", sources, "--out", "samples",
        "--max_new_tokens", 24, "--device", "cpu",
    )  # fmt: skip
    for family, more in FAMILIES.items():
        words = f"{TRAINING} --draft.family {family} {more} --out {family}"
        own.call("train/distill.py", *words.split())
    return own


# ---- drafts of every family ----


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_draft_has_its_files(lab: Lab, family: str) -> None:
    """draftsmith.json, config.json, the tensors, and the first three losses."""
    folder = lab.folder / family
    check(f"drafts/{family}/draftsmith.json", lab.read(f"{family}/draftsmith.json"), lab.folder)
    check(f"drafts/{family}/config.json", lab.read(f"{family}/config.json"), lab.folder)
    check(f"drafts/{family}/tensors.json", tensors(load_file(folder / "model.safetensors")))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [{key: line[key] for key in LOSSES} for line in lines if "train/loss" in line]
    assert len(losses) == 3
    check(f"drafts/{family}/losses.json", losses)


@pytest.mark.parametrize("family", quick_first(FAMILIES))
def test_engines_find_the_same(lab: Lab, family: str) -> None:
    """The findings of every engine's rules."""
    found = {}
    for engine in ENGINES:
        words = (family, "--engine", engine, "--target", "target", "--json", "true")
        with contextlib.chdir(lab.folder):
            done = worlds.call("scripts/check_draft.py", *words)
        found[engine] = json.loads(done.out.splitlines()[-1])["findings"]
        assert done.code == int(any(f["effect"] != "ignored" for f in found[engine]))
    check(f"drafts/{family}/findings.json", found, lab.folder)


@pytest.mark.parametrize("family", quick_first(FAMILIES))
def test_a_published_folder_is_the_same(lab: Lab, family: str) -> None:
    """The card and the serving files of a draft that was not measured."""
    out = publish(lab, family)
    check(f"drafts/{family}/card.md", (out / "README.md").read_text(), lab.folder)
    check(f"drafts/{family}/serving.txt", texts_below(out / "serving"), lab.folder)


def publish(lab: Lab, family: str, *more: object) -> Path:
    out = lab.folder / f"published-{family}-{len(more)}"
    lab.call(
        "scripts/publish.py", "--draft", family, "--repo", "me/draft", "--out", out.name,
        "--labels.base_model", "org/target", "--labels.license", "mit", *more,
    )  # fmt: skip
    return out


def texts_below(folder: Path) -> str:
    """All files below a folder, one behind the other under their names."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(f"==== {path.relative_to(folder)}\n{path.read_text()}" for path in files)


# ---- measuring: reports, tuning, pages ----


def measure(lab: Lab, out: str, methods: Sequence[dict[str, Any]], *more: object) -> Path:
    """eval/run.py into the folder `out`."""
    lab.call(
        "eval/run.py", "--target", "target", "--methods", json.dumps(methods), "--tasks", TASKS,
        "--k", 3, "--phase_prompts", 0, "--device", "cpu", "--out", out, *more,
    )  # fmt: skip
    return lab.folder / out


@pytest.fixture(scope="module")
def report(lab: Lab) -> Path:
    """A report of three methods, and transformers' own methods beside them."""
    methods = [
        {"name": "ngram"},
        {"name": "causal", "draft": "causal", "lookup": "ngram", "rule": "block"},
        {"name": "eagle3", "draft": "eagle3"},
    ]
    return measure(
        lab, "report", methods, "--max_new_tokens", 8, "--compare", "hf,hf-lookup",
        "--acceptance.pairs", "[[causal, eagle3]]", "--acceptance.prompts", 3,
    )  # fmt: skip


def test_a_report_is_the_same(lab: Lab, report: Path) -> None:
    check("report/report.json", lab.read("report/report.json"), lab.folder)


def test_the_pages_of_a_report_are_the_same(lab: Lab, report: Path) -> None:
    """report.md whole, of report.html what is no style, script or drawing."""
    check("report/report.md", (report / "report.md").read_text(), lab.folder)
    check("report/report.html", body_of((report / "report.html").read_text()), lab.folder)


def body_of(page: str) -> str:
    """The tables and texts of a page, an element a line."""
    for kind in ("style", "script"):
        page = re.sub(rf"<{kind}.*?</{kind}>", f"<{kind}>", page, flags=re.DOTALL)
    return re.sub(r"(</(?:tr|p|h\d|section|summary|details|li)>)\n*", r"\1\n", page)


@pytest.fixture(scope="module")
def tuned(lab: Lab) -> Path:
    methods = json.dumps([{"name": "eagle3", "draft": "eagle3"}, {"name": "ngram"}])
    lab.call(
        "eval/tune.py", "--target", "target", "--methods", methods, "--tasks", FOUR, "--temperatures", "[0.0]",
        "--ks", "[1, 2, 3]", "--calibrate", "[1, 3]", "--tree_nodes", "[4]", "--tree_levels", 3,
        "--batch_sizes", "[2]", "--batch_ks", "[1]", "--max_new_tokens", 8, "--device", "cpu", "--out", "tuned",
    )  # fmt: skip
    return lab.folder / "tuned"


@pytest.mark.slow
def test_a_tuning_is_the_same(lab: Lab, tuned: Path) -> None:
    found = lab.read("tuned/tuned.json")
    # a copy of memory is timed, in which no layer computes
    found.pop("bandwidth_gb_s", None)
    check("tuned/tuned.json", found, lab.folder)
    check("tuned/tuned.md", (tuned / "tuned.md").read_text(), lab.folder)
    check("tuned/tuned.yaml", (tuned / "tuned.yaml").read_text(), lab.folder)


@pytest.mark.slow
def test_a_report_is_rendered_again(lab: Lab, report: Path) -> None:
    """eval/report.py writes what eval/run.py wrote."""
    names = ("report.json", "report.md", "report.html")
    before = [(report / name).read_bytes() for name in names]
    lab.call("eval/report.py", "report")
    for name, content in zip(names, before, strict=True):
        assert masked((report / name).read_text()) == masked(content.decode()), name


@pytest.mark.slow
def test_a_measured_draft_is_published_the_same(lab: Lab, report: Path, tuned: Path) -> None:
    """The card with all evidence, and what of the evidence is public."""
    sha = lab.read("eagle3/draftsmith.json")["draft_sha256"]
    (lab.folder / "referee.json").write_text(json.dumps(referee(sha)))
    out = publish(
        lab, "eagle3", "--report", "report/report.json", "--tuned", "tuned/tuned.json",
        "--referee", "referee.json",
    )  # fmt: skip
    check("published/card.md", (out / "README.md").read_text(), lab.folder)
    check("published/serving.txt", texts_below(out / "serving"), lab.folder)
    for file in sorted(out.glob("*.json")):
        # of the report and the tuning every field's value is in their own golden files
        content = json.loads(file.read_text())
        check(f"published/{file.stem}.fields.txt", "\n".join(fields_of(content)) + "\n")
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    check("published/files.txt", "\n".join(names) + "\n")


def fields_of(value: Any, name: str = "") -> list[str]:
    """The fields of a JSON in their order, [] for any element of a list."""
    if isinstance(value, dict):
        own = [name] if name else []
        return own + [line for key, x in value.items() for line in fields_of(x, f"{name}.{key}")]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        lines = [line for x in value for line in fields_of(x, f"{name}[]")]
        return list(dict.fromkeys(lines))
    return [name]


def test_a_sampled_set_is_published_the_same(lab: Lab) -> None:
    """The manifest, and the card of the set."""
    check("samples/manifest.json", lab.read("samples/manifest.json"), lab.folder)
    lab.call(
        "scripts/publish.py", "--samples", "samples", "--repo", "me/samples", "--out", "set",
        "--labels.base_model", "org/target", "--labels.license", "mit",
    )  # fmt: skip
    check("samples/card.md", (lab.folder / "set/README.md").read_text(), lab.folder)


def test_the_doctor_finds_the_same(lab: Lab) -> None:
    """All that it says of a set with defects, and of prompts before sampling."""
    folder = lab.folder / "chat"
    tokenizer = sets.save_target(folder)
    rows = sets.clean_rows(tokenizer)
    for plant in (cut_off, add_loops, say_a_special_token):
        plant(tokenizer, rows)
    rows[1]["loss_spans"][0][0] += 1
    rows[2]["loss_spans"] = []
    sets.save_set(lab.folder / "ill", tokenizer, rows)
    done = lab.call("train/doctor.py", "--data", "ill", "--target", "chat")
    check("doctor/set.json", json.loads(done.out.splitlines()[-1]), lab.folder)
    sources = json.dumps([{"kind": "file", "path": "prompts.jsonl"}])
    done = lab.call("train/doctor.py", "--sources", sources, "--target", "target")
    check("doctor/prompts.json", json.loads(done.out.splitlines()[-1]), lab.folder)


def test_advice_and_rescoring_are_the_same(lab: Lab, report: Path) -> None:
    lab.call("eval/advise.py", "report/report.json", "--out", "advice.md")
    check("report/advice.md", (lab.folder / "advice.md").read_text(), lab.folder)
    for engine, dump in (("vllm", "after"), ("sglang", "metrics"), ("llamacpp", "metrics")):
        log = worlds.ROOT / f"tests/golden/engine_logs/{engine}_{dump}.txt"
        lab.call("eval/rescore.py", log, "--json", f"{engine}.json")
        check(f"rescored/{engine}.json", lab.read(f"{engine}.json"), lab.folder)


# ---- decoding ----

TREE = {"width": 2, "nodes": 5}
PATHS = {"paths": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]}
METHODS: list[dict[str, Any]] = [
    {"name": "ngram"},
    {"name": "suffix"},
    {"name": "early-exit", "layers": 2},
    {"name": "swift", "layers": 1},
    *({"name": family, "draft": family} for family in FAMILIES if not family.endswith("2")),
    {"name": "causal-tree", "draft": "causal", "tree": TREE},
    {"name": "causal-paths", "draft": "causal", "tree": PATHS},
    {"name": "causal-lookup", "draft": "causal", "lookup": "suffix", "min_match": 1},
    {"name": "causal-confidence", "draft": "causal", "confidence": 0.3},
    {"name": "causal-mirror", "draft": "causal", "mirror": {"exit_layer": 2, "overlap": False}},
    {"name": "causal-block", "draft": "causal", "rule": "block"},
    {"name": "causal-typical", "draft": "causal", "rule": "typical"},
    {"name": "medusa-tree", "draft": "medusa", "tree": TREE},
    {"name": "medusa-paths", "draft": "medusa", "tree": PATHS},
    {"name": "eagle1-tree", "draft": "eagle1", "tree": TREE},
    {"name": "eagle3-tree", "draft": "eagle3", "tree": TREE},
    {"name": "dflash-tree", "draft": "dflash", "tree": TREE},
    {"name": "dspark-paths", "draft": "dspark", "tree": PATHS},
    {"name": "layerskip-tree", "draft": "layerskip", "tree": TREE},
]  # fmt: skip
GRAMMAR = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def streams(folder: Path) -> dict[str, list[str]]:
    """{method at a temperature: its texts}: ids, and behind a bar the drafted and accepted tokens of every round."""
    found: dict[str, list[str]] = {}
    for line in map(json.loads, (folder / "outputs.jsonl").read_text().splitlines()):
        ids = " ".join(map(str, line["output_ids"]))
        rounds = " ".join(f"{drafted}:{accepted}" for drafted, accepted in line["rounds"])
        key = f"{line['method']} at {line['temperature']:g}"
        found.setdefault(key, []).append(f"{ids} | {rounds} | {line['finish_reason']}")
    return found


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of many methods without their pages, which take as long as decoding."""
    monkeypatch.setattr(render, "write_pages", lambda *args: None)


@pytest.mark.slow
def test_token_streams_are_the_same(lab: Lab, no_pages: None) -> None:
    """Every method's ids and rounds."""
    more = ["--max_new_tokens", 9, "--temperatures", "[0, 1]", "--seed", 3]
    found = streams(measure(lab, "streams", METHODS, *more))
    for temperature in (0, 1):
        own = {key: value for key, value in found.items() if key.endswith(f" at {temperature}")}
        check(f"streams/temperature{temperature}.json", own)


def test_a_few_token_streams_are_the_same(lab: Lab, report: Path) -> None:
    """Those of the report, at both temperatures."""
    check("streams/report.json", streams(report))


@pytest.mark.slow
def test_other_streams_are_the_same(lab: Lab, no_pages: None) -> None:
    """Batches, truncated sampling, drafts whose target was trained too, and answers that follow a grammar."""
    some = [
        m for m in METHODS if m["name"] in ("ngram", "causal", "medusa", "causal-tree", "eagle3")
    ]
    more = ["--max_new_tokens", 10, "--temperatures", "[1]", "--batch_size", 3, "--top_p", 0.9]
    more += ["--top_k", 40]
    check("streams/batch.json", streams(measure(lab, "batch", some, *more)))
    for family, target in (("medusa2", "medusa2/target"), ("layerskip2", "layerskip2")):
        methods = [{"name": family, "draft": family}]
        out = measure(lab, f"own-{family}", methods, "--target", target, "--max_new_tokens", 10)
        check(f"streams/{family}.json", streams(out))
    pytest.importorskip("llguidance")
    forced = [
        {"name": "grammar"},
        *(m for m in METHODS if m["name"] in ("causal", "eagle3", "causal-lookup")),
    ]
    more = ["--max_new_tokens", 16, "--constraint.json_schema", GRAMMAR]
    check("streams/grammar.json", streams(measure(lab, "forced", forced, *more)))


# ---- what works with what ----

KINDS: dict[str, dict[str, Any]] = {
    **{m["name"]: m for m in METHODS if "-" not in m["name"] or m["name"] == "early-exit"},
    "grammar": {"name": "grammar"},
}
ADDED: dict[str, dict[str, Any]] = {
    "tree": {"tree": TreeConfig(**TREE)}, "lookup": {"lookup": "ngram"},
    "confidence": {"confidence": 0.3}, "mirror": {"mirror": MirrorConfig(2, overlap=False)},
    "constraint": {},
}  # fmt: skip
MODES: tuple[Literal["eager", "compiled", "graph"], ...] = ("eager", "compiled", "graph")


@pytest.fixture(scope="module")
def target(lab: Lab) -> Target:
    return load_target(str(lab.folder / "target"), "cpu")


def sets_of(kind: str) -> list[tuple[tuple[str, ...], MethodConfig]]:
    """(names of what is added, the method with it) for every subset of ADDED."""
    found = []
    for count in range(len(ADDED) + 1):
        for names in itertools.combinations(ADDED, count):
            method = dict(KINDS[kind])
            for name in names:
                method |= ADDED[name]
            found.append((names, MethodConfig(**method)))
    return found


def refusal(lab: Lab, target: Target, s: EvalConfig) -> str:
    """Why eval/run.py refuses the only method of the settings; empty: it decodes. Nothing is compiled."""
    gpu = mock.patch.object(config, "pick_device", return_value="cuda")
    prompt = [50, 60, 70]
    try:
        with contextlib.chdir(lab.folder):
            with gpu if s.mode == "graph" else contextlib.nullcontext():
                config.check(s)
            (method,) = build_methods(s, target)
        if s.mode == "graph":  # whose engine needs a GPU
            return ""
        engine = SpeculativeEngine(target, method.draft, k=method.k, mode=s.mode)
        if s.mode == "eager":
            matcher = build_matcher(s.constraint, target)
            matchers = None if matcher is None else [matcher]
            for _ in engine.speculate([prompt], max_new_tokens=4, matchers=matchers):
                pass
    except UserError as error:
        return str(error)
    except RuntimeError as error:  # no one refused it, and it does not work either
        return f"FAILS: {error}"
    return ""


@pytest.mark.parametrize("kind", quick_first(KINDS, "causal", "eagle3", "dspark"))
def test_the_same_combinations_are_refused(lab: Lab, target: Target, kind: str) -> None:
    """Every draft with every set of tree, lookup, confidence, mirror and constraint, in each mode: one line a set."""
    pytest.importorskip("llguidance")
    rows, reasons = [], set()
    for names, method in sets_of(kind):
        constraint = ConstraintConfig(GRAMMAR if "constraint" in names else "")
        said = []
        for mode in MODES:
            s = EvalConfig(
                methods=[method], mode=mode, temperatures=[0.0], k=3, constraint=constraint
            )
            said.append(refusal(lab, target, s))
        reasons |= set(said) - {""}
        rows.append(f"{' '.join(map(verdict, MODES, said))}  {' + '.join(names) or 'alone'}")
    check(f"combinations/{kind}.txt", "\n".join(rows) + "\n")
    check(f"combinations/{kind}.reasons.txt", "\n".join(sorted(reasons)) + "\n", lab.folder)


def verdict(mode: str, said: str) -> str:
    return f"{mode}: {'fails' if said.startswith('FAILS') else 'no' if said else 'yes':5}"


# ---- settings of every command ----

REQUIRED = {"sources": "[]"}
"""Values for settings without a default; of others a path."""


def commands() -> dict[str, str]:
    """{file name of each command: its path}."""
    packages = ("decode", "eval", "train", "scripts")
    files = [file for package in packages for file in (worlds.ROOT / package).rglob("*.py")]
    paths = {
        file.stem: str(file.relative_to(worlds.ROOT))
        for file in files
        if "\n    run_command(main" in file.read_text()
    }
    return dict(sorted(paths.items()))


def settings_of(path: str) -> type:
    """The settings class of a command."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    (parameter,) = inspect.signature(module.main).parameters.values()
    kind: type = parameter.annotation
    return kind


@pytest.mark.parametrize("name", commands())
def test_settings_are_the_same(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What --print_config says."""
    path = commands()[name]
    settings = settings_of(path)
    missing = dataclasses.MISSING
    needed = [
        f.name
        for f in dataclasses.fields(settings)
        if f.default is missing and f.default_factory is missing
    ]
    words = [word for field in needed for word in (f"--{field}", REQUIRED.get(field, "x"))]
    with pytest.raises(SystemExit) as end:
        parse_settings(settings, "", [*words, "--print_config"])
    assert end.value.code in (None, 0)
    check(f"settings/{name}.yaml", capsys.readouterr().out)


def test_no_command_is_gone() -> None:
    """Bug: a command that was lost while files moved, with its golden file left alone."""
    assert [file.stem for file in sorted((FOLDER / "settings").glob("*.yaml"))] == list(commands())


# ---- how it is compared ----


def test_differences_are_seen() -> None:
    """Bug: a comparison that would pass a lost field, another order, another whole number or a moved fraction."""
    value = {"tau": 1.2345, "k": 3, "names": ["a", "b"], "rows": [{"x": 1e-05}]}
    golden = to_text(masked(value))
    assert difference(golden, to_text(masked(value | {"tau": 1.2355}))) == ""
    assert json.loads(golden) == value | {"tau": 1.234}
    for change in ({"tau": 1.25}, {"k": 4}, {"names": ["b", "a"]}, {"rows": [{"x": 1e-06}]}):
        assert difference(golden, to_text(masked(value | change))) != "", change
    assert difference(golden, to_text(masked(dict(reversed(value.items()))))) != ""
    assert difference(golden, to_text(masked({**value, "new": None}))) != ""
    assert difference("| a | 1.00× |\n", "| a | 1.01× |\n") == ""
    assert difference("| a | 1.00× |\n", "| a | 1.05× |\n") != ""
    assert difference("1 2 3 | 3:0\n", "1 2 4 | 3:0\n") != ""


def test_what_varies_is_hidden() -> None:
    sha = "0123456789abcdef" * 4
    value = {"git": sha, "where": f"{worlds.ROOT}/x at 2026-11-25", "weights": sha, "n": 123456}
    hidden = masked(value)
    assert hidden == {
        "git": "<hidden>", "where": "$ROOT/x at <date>", "weights": "<hex>", "n": 123456,
    }  # fmt: skip
    assert masked("| hardware device | Some CPU |") == "| hardware device | <hidden> |"


def test_the_clock_counts_work() -> None:
    """Bug: a clock that stands still, or one that runs by how often it is read."""
    with counted_time():
        start = time.perf_counter()
        for _ in range(1000):
            time.perf_counter()
        read = time.perf_counter() - start
        torch.nn.Linear(4, 4)(torch.zeros(8, 4))
        work = time.perf_counter() - start - read
    assert 0 < read < 1e-5 < 1e-4 < work < 1e-3
