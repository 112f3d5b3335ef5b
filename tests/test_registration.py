"""A draft family and a verification rule are each one registration: both are added from outside and used whole.

The toy family (`tests/toy_family.py`) is a bigram table, the toy rule accepts every drafted token. They go through
training, the dry run, decoding, the evaluation report and the published folder, without a change to any other file.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from decode.checkpoints import layouts
from decode.checkpoints.draft_folder import read_metadata
from decode.common.errors import UserError
from decode.common.published import Word
from decode.common.settings import parse_settings
from decode.common.typed_json import from_json
from decode.drafts.registry import DRAFT_FAMILIES, DraftFamily, load_draft, register_family
from decode.engine.engine import decode
from decode.model.loading import load_target
from decode.verification.registry import (
    VERIFICATION_RULES,
    DraftedTokens,
    VerificationRule,
    register_rule,
)
from decode.verification.rules import NO_DRAFT, VerificationResult, count_accepted
from tests import toy_family, worlds
from tests.tiny import tiny_model
from tests.toy_family import BIGRAM, BigramSettings, TrainableBigram
from tests.train.data import test_packing
from tests.train.families import test_heads_training, test_overfit
from tests.train.planning import test_shape_run
from tests.worlds import ROOT, World
from train.families.builders import BUILDERS, register_trained
from train.families.registry import TRAINED_FAMILIES, family_settings
from train.families.settings.base import FamilySettings
from train.hub.evidence import Evidence
from train.hub.publish import build_draft_folder
from train.planning.shape_run import ShapeRun, made_up_rows
from train.settings.training import HubLabels
from train.trainer.settings import DistillConfig

STEPS = 3

# ---- a verification rule ----


def accept_all(drafted: DraftedTokens) -> VerificationResult:
    """Keeps all drafted tokens of a chain, whatever the target's distributions are."""
    assert drafted.parents is None
    accepted = count_accepted(drafted.tokens != NO_DRAFT)
    row = torch.arange(len(accepted), device=accepted.device)
    return VerificationResult(accepted, drafted.logits.argmax(-1)[row, accepted])


ACCEPT_ALL = VerificationRule("accept-all", False, accept_all, "keeps every drafted token")


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    toy_family.register()
    register_rule(ACCEPT_ALL)
    yield
    del (
        BUILDERS[BigramSettings],
        DRAFT_FAMILIES["bigram"],
        TRAINED_FAMILIES["bigram"],
        VERIFICATION_RULES["accept-all"],
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), prompts=12)


@pytest.fixture(scope="module")
def data(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.sampled(world, tmp_path_factory.mktemp("data"), "--max_new_tokens", 20)


def distill(world: World, data: Path, out: Path, *more: object) -> worlds.Done:
    return worlds.call(
        "train/distill.py", "--target", world.target, "--data", data, "--out", out,
        "--draft.family", "bigram", "--loop.steps", STEPS, "--loop.batch_size", 4,
        "--loop.eval_every", STEPS, "--loop.lr", 0.5, "--check.prompts", 1,
        "--check.max_new_tokens", 4, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(world: World, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "draft"
    distill(world, data, out).ok()
    return out


def test_it_is_trained(trained: Path) -> None:
    """Catches a family that training does not learn of by its registration."""
    assert read_metadata(str(trained)).family == "bigram"
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert any("accept/tau" in line for line in lines)
    assert load_file(trained / layouts.WEIGHTS_FILE)["table"].abs().max() > 0


def test_a_dry_run_estimates_it(world: World, data: Path, tmp_path: Path) -> None:
    """Catches an estimate that knows only the families of this repository."""
    done = distill(world, data, tmp_path / "out", "--dry_run", "true").ok()
    found = json.loads(done.out.splitlines()[-1])
    vocab = len(load_target(str(world.target), "cpu").tokenizer)
    assert found["estimated"]["trained"] == vocab**2
    assert found["measured"]["accept/tau"] >= 1
    assert "bigram" in done.err


def test_it_decodes(world: World, trained: Path) -> None:
    """Catches a loader that is not found, and a toy that would not be lossless under the exact rule."""
    target = load_target(str(world.target), "cpu")
    draft, prompt = load_draft(str(trained), target), [40, 50, 60]
    (plain,) = decode(target, None, [prompt], max_new_tokens=12)
    (drafted,) = decode(target, draft, [prompt], k=3, max_new_tokens=12)
    assert drafted.output_ids == plain.output_ids
    (lossy,) = decode(target, draft, [prompt], k=3, max_new_tokens=12, rule="accept-all")
    assert lossy.output_ids != plain.output_ids


@pytest.fixture(scope="module")
def report(world: World, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of eval/run.py on the draft under the exact and the toy rule."""
    folder = tmp_path_factory.mktemp("evaluated")
    prompts = worlds.write_prompts(folder / "few.jsonl", world.texts[:4])
    methods = [
        {"name": rule, "draft": str(trained), "k": 3, "rule": rule}
        for rule in ("exact", "accept-all")
    ]
    worlds.call(
        "eval/run.py", "--target", world.target, "--methods", json.dumps(methods),
        "--tasks", json.dumps([{"name": "few", "path": str(prompts)}]), "--device", "cpu",
        "--temperatures", "[0.0]", "--max_new_tokens", 12, "--phase_prompts", 0,
        "--out", folder / "out",
    ).ok()  # fmt: skip
    found: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    return found


def test_the_report_calls_the_rule_lossy(report: dict[str, Any]) -> None:
    """Catches a report that learns from a rule's name whether it is lossy."""
    lossy = {m["name"]: m["lossy"] for m in report["methods"]}
    assert lossy["exact"] is False
    assert lossy["accept-all"] is True
    exact = [m for m in report["methods"] if m["name"] == "exact"]
    assert all(m["lossless"]["greedy_identical"] for m in exact)


def test_its_folder_is_published(report: dict[str, Any], trained: Path, tmp_path: Path) -> None:
    """Catches a card or serving files that only exist for the families of this repository."""
    out = tmp_path / "published"
    build_draft_folder(
        trained, from_json(Evidence, {"report": report}), "me/bigrams",
        HubLabels("org/target", "mit"), out, DistillConfig,
    )  # fmt: skip
    card = (out / "README.md").read_text()
    assert "a table of bigrams" in card
    assert "decode/generate.py" in card
    assert "vLLM has no method for drafts of family bigram" in card
    assert "bigram" in yaml.safe_load(card.split("---")[1])["tags"]


def test_a_family_from_another_folder_is_trained_and_decodes(
    world: World, data: Path, tmp_path: Path
) -> None:
    """Catches a family that has to stand in this tree. The commands know it by the variable alone."""
    shutil.copy(toy_family.__file__, tmp_path / "my_bigrams.py")
    (tmp_path / "my_family.py").write_text("import my_bigrams\n\nmy_bigrams.register()\n")
    out = tmp_path / "draft"
    arguments = ("--target", world.target, "--draft.family", "bigram", "--data", data, "--out", out,
                 "--loop.steps", STEPS, "--loop.batch_size", 4, "--loop.eval_every", 0)  # fmt: skip
    env = {"PYTHONPATH": str(tmp_path), "DRAFTSMITH_PLUGINS": "my_family"}
    worlds.run("train/distill.py", *arguments, env=env).ok()
    prompt = ("--target", world.target, "--prompt", "abc", "--max_new_tokens", 4, "--draft", out)
    assert worlds.run("decode/generate.py", *prompt, env=env).ok().out
    unknown = worlds.run("decode/generate.py", *prompt)
    assert (unknown.code, "family 'bigram'; known: " in unknown.err) == (2, True)
    absent = worlds.run("decode/generate.py", *prompt, env={"DRAFTSMITH_PLUGINS": "not_there"})
    assert (absent.code, absent.err.count("\n")) == (2, 1)
    assert "DRAFTSMITH_PLUGINS names 'not_there'" in absent.err


# ---- every family has all its parts ----


def missing_parts(settings: type[FamilySettings], configs: list[dict[str, Any]]) -> list[str]:
    """What a family that can be trained lacks; `configs` are the settings of all files in configs/."""
    missing, family = [], DRAFT_FAMILIES[settings().family]
    if family.load is None:
        missing.append("loader")
    missing += [name for name in ("description", "hub_tag") if not hasattr(settings, name)]
    if settings in BUILDERS:
        config = tiny_model("llama", num_hidden_layers=8).config
        run = ShapeRun(DistillConfig(draft=settings().having(layers=[0])), config)
        assert run.step(made_up_rows(1, 16, 8, run.vocab), mixed=True).flops > 0 < run.trained
    else:
        missing.append("builder")
    if not any((c.get("draft") or {}).get("family", "causal") == family.name for c in configs):
        missing.append("YAML in configs/")
    tested = {
        *(draft.family for draft in test_heads_training.DRAFTS.values()),
        *(draft.family for draft in test_overfit.DRAFTS.values()),
        *(draft.family for draft in test_packing.FAMILY.values()),
    }
    if family.name not in tested:
        missing.append("row in the parametrised tests")
    return missing


def distill_configs() -> list[dict[str, Any]]:
    """The settings in configs/ that are those of train/distill.py, and what scripts/reproduce.sh changes of them."""
    texts = [path.read_text() for path in sorted((ROOT / "configs").rglob("*.yaml"))]
    script = (ROOT / "scripts" / "reproduce.sh").read_text()
    texts = [text for text in texts if text.startswith("# command: train/distill.py")]
    drafts = re.findall(r"^family \S+ '(.*)'$", script, re.MULTILINE)
    return [yaml.safe_load(t) for t in [*texts, *(f"draft: {{family: {d}}}" for d in drafts)]]


OWN = [name for name in TRAINED_FAMILIES if name != "bigram"]


@pytest.mark.parametrize("name", OWN)
def test_a_family_has_all_its_parts(name: str) -> None:
    """Catches a family that was registered and then forgotten somewhere."""
    assert missing_parts(TRAINED_FAMILIES[name], distill_configs()) == []


def test_missing_parts_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above is blind if these go unseen."""
    forgotten = ["YAML in configs/", "row in the parametrised tests"]
    assert missing_parts(BigramSettings, distill_configs()) == forgotten
    monkeypatch.setitem(DRAFT_FAMILIES, "bigram", replace(BIGRAM, load=None))
    parts = ["loader", "description", "hub_tag", "builder"]
    assert missing_parts(Unfinished, distill_configs()) == [*parts, *forgotten]


@dataclass
class Unfinished(FamilySettings):
    family: Word = "bigram"


FOREIGN = {name: [] for name in OWN} | {
    "dspark": ["steps 3", "retention 0.5", "exit_layer 2", "heads 2", "lora_rank 4"],
    "eagle3": ["markov_rank 8", "block 4"],
    "medusa": ["layers [0]", "vocab 60", "target_lora_rank 2"],
    "eagle1": ["vocab 60", "taps [1, 2]"],
    "layerskip2": ["init x", "exit_width 3", "activation_checkpointing true"],
}


@pytest.mark.parametrize("family", OWN)
def test_a_family_has_its_own_settings_alone(
    family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: --draft.family dspark --draft.steps 3 taken for an EAGLE-3 head, or a setting that nobody reads."""
    with pytest.raises(SystemExit):
        parse_settings(DistillConfig, "", ["--draft.family", family, "--help_all"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--draft.")]
    assert 3 <= len(lines) <= 14
    assert {line.removeprefix("--draft.") for line in lines} == set(
        vars(TRAINED_FAMILIES[family]())
    )
    for given in FOREIGN[family]:
        name, value = given.split(" ", 1)
        owners = [x for x, cls in TRAINED_FAMILIES.items() if name in vars(cls())]
        said = f"draft.{name} is a setting of {', '.join(owners)}, and draft.family is {family}"
        with pytest.raises(UserError, match=said):
            parse_settings(DistillConfig, "", ["--draft.family", family, f"--draft.{name}", value])


def test_every_trained_family_is_counted() -> None:
    """Guards the parametrised test of estimates: its families are those of the registry."""
    assert {case[0] for case in test_shape_run.CASES} >= set(OWN)


def test_bad_names_are_refused() -> None:
    """Catches a name that is registered twice, and a setting with an unknown family."""
    with pytest.raises(UserError, match="already"):
        register_family(BIGRAM)
    with pytest.raises(UserError, match="load"):
        register_family(DraftFamily("nothing"))
    with pytest.raises(UserError, match="already"):
        register_trained(BigramSettings, TrainableBigram)
    for read in (
        family_settings,
        lambda name: parse_settings(DistillConfig, "", ["--draft.family", name]),
    ):
        with pytest.raises(UserError, match="choose one of causal, pard, medusa"):
            read("eagle4")
