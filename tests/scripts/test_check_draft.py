"""The checker of drafts against engines' rules: no findings for good drafts, each corruption found by its rule."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.checkpoints import eagle_layouts, importers, layouts
from decode.checkpoints.draft_folder import METADATA_FILE, draft_sha256
from decode.checkpoints.draft_vocab import VOCAB_FILE, save_ids
from decode.common.errors import UserError
from decode.drafts.eagle_model import Eagle3Model, llama_config
from decode.model.hidden_states import HiddenStateSpec
from decode.model.loading import load_tokenizer, tokenizer_fingerprint
from decode.serving.checker import ENGINES, check_draft_files
from decode.serving.rules import REFUSED, SILENT, read_draft, read_target
from eval.served.reading import edit_tensors, rename
from eval.served.suspects import readings
from tests import worlds
from tests.decode.checkpoints.test_importers import exported
from tests.decode.checkpoints.test_layouts import LAYERS, V, small_target
from tests.eval.served.mistakes import Mistake, mistakes
from tests.heads import fields, ids_of, net_of, randomise
from tests.scripts import test_check_blocks

ASSETS, COMMAND = worlds.ROOT / "assets", "scripts/check_draft.py"
DAMAGE = [
    pytest.param(family, mistake, id=name)
    for family, own in mistakes(LAYERS).items()
    for name, mistake in own.items()
]
SERVED = {
    "eagle3": ("vllm", "sglang", "trtllm", "llamacpp"),
    "narrow": ("vllm", "sglang", "trtllm", "llamacpp"),
    "eagle1": ("vllm", "sglang"),
    "medusa": ("vllm",),
    "causal": ("vllm", "sglang", "trtllm", "llamacpp", "transformers"),
}
"""Which engines serve a family as it is saved."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    small_target().runner.model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, target: str) -> dict[str, Path]:
    """A good draft of each family, as training saves it."""
    home, own = tmp_path_factory.mktemp("drafts"), small_target()
    training: dict[str, Any] = {"draft": {"taps": []}}
    for family in ("eagle3", "narrow", "eagle1", "medusa"):
        folder = home / family
        if family in ("eagle3", "narrow"):
            ids, width = ids_of(family, V), 8 if family == "narrow" else 0
            size = V if ids is None else len(ids)
            config = eagle_layouts.eagle3_config(own.runner.config, V, size, (2, 4, 5), width)
            net: Any = randomise(
                Eagle3Model(llama_config(config), HiddenStateSpec((2, 4, 5)), ids), 0
            )
        else:
            config, net, ids = fields(family, own), net_of(family, own), None
        layouts.save_heads(folder, config, net, torch.bfloat16, ids)
        name = "eagle3" if family == "narrow" else family
        hashed = own.fingerprint
        state(
            folder, family=name, training=training, tokenizer_hash=hashed, target={"name": target}
        )
    shutil.copytree(ASSETS / "draft", home / "causal", ignore=shutil.ignore_patterns("*.md"))
    tokenizer = tokenizer_fingerprint(load_tokenizer(str(ASSETS / "target")))
    (home / "causal" / METADATA_FILE).unlink(missing_ok=True)
    state(home / "causal", family="causal", tokenizer_hash=tokenizer)
    return {family: home / family for family in SERVED}


def target_of(family: str, target: str) -> str:
    return str(ASSETS / "target") if family == "causal" else target


def said(path: Path, engine: str, target: str, version: str = "") -> list[str]:
    return [f"{f.rule}: {f.what}" for f in check_draft_files(str(path), engine, version, target)]


@pytest.mark.parametrize(
    ("family", "engine"), [(f, engine) for f, served in SERVED.items() for engine in served]
)
def test_a_good_draft_has_nothing_to_report(
    family: str, engine: str, good: dict[str, Path], target: str
) -> None:
    """Catches a checker that cries wolf: with and without its target."""
    assert said(good[family], engine, target_of(family, target)) == []
    assert said(good[family], engine, "") == []


def test_what_no_engine_serves_is_refused(good: dict[str, Path], target: str) -> None:
    """Catches the heads that an engine does not have passed as served: each finding refuses."""
    for family, served in SERVED.items():
        for engine in set(ENGINES) - set(served):
            found = check_draft_files(str(good[family]), engine, "", target_of(family, target))
            assert [f.effect for f in found] == [REFUSED], (family, engine, found)


@pytest.mark.parametrize(("family", "mistake"), DAMAGE)
def test_every_damage_is_seen(
    family: str, mistake: Mistake, good: dict[str, Path], target: str, tmp_path: Path
) -> None:
    """Catches a pitfall of formats.md that would go out unseen, named by its own rule and not by chance by another; and
    rules that blame an engine for what it reads as it was meant."""
    folder = tmp_path / "draft"
    shutil.copytree(good[family], folder)
    mistake.edit(folder)
    assert mistake.rules
    for engine in SERVED[family]:
        found = check_draft_files(str(folder), engine, "", target_of(family, target))
        rules = {finding.rule for finding in found}
        if engine in mistake.rules:
            assert mistake.rules[engine] in rules, (engine, found)
        else:
            assert rules == set(), (engine, found)
    known = read_target(target_of(family, target), tokenizer=False)
    suspects = [reading.about for reading in readings(read_draft(str(folder), known))]
    assert mistake.suspect in ("", *suspects)


def test_what_changed_since_training_is_seen(
    good: dict[str, Path], target: str, tmp_path: Path
) -> None:
    """Catches a draft that was edited in a way that no other rule can see: two heads exchanged."""
    folder = tmp_path / "draft"
    shutil.copytree(good["medusa"], folder)
    state(folder, draft_sha256=draft_sha256(str(folder)))
    assert said(folder, "vllm", target) == []
    one, other = "lm_heads.0.weight", "lm_heads.1.weight"
    edit_tensors(lambda t: t.update({one: t[other], other: t[one]}))(folder)
    assert [line.split(":")[0] for line in said(folder, "vllm", target)] == [
        "changed-since-training"
    ]


def state(folder: Path, **facts: Any) -> None:
    """Adds to draftsmith.json."""
    file = folder / METADATA_FILE
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | facts))


def test_versions_differ(good: dict[str, Path], target: str) -> None:
    """Catches rules of one version applied to all: Medusa went in vLLM 0.33, and 0.0.9 compares below 0.0.10."""
    assert said(good["medusa"], "vllm", target, "0.31.0") == []
    assert "removed" in said(good["medusa"], "vllm", target, "0.33.0")[0]
    assert said(good["eagle3"], "vllm", target, "0.33.0") == []
    with pytest.raises(UserError, match="give numbers"):
        said(good["medusa"], "vllm", target, "latest")


def test_the_layers_name_is_judged_by_version(
    good: dict[str, Path], target: str, tmp_path: Path
) -> None:
    """Catches `layers.0.` passed for SGLang versions that drop such tensors."""
    folder = tmp_path / "draft"
    shutil.copytree(good["eagle3"], folder)
    for name in importers.raw_tensors(str(folder)):
        rename(name, name.replace("midlayer.", "layers.0."))(folder)
    assert said(folder, "sglang", target, "0.5.23") == []
    assert said(folder, "vllm", target) == []
    assert "layer-name" in said(folder, "sglang", target, "0.5.3")[0]


@pytest.mark.parametrize("layers", [(1, 4, 6), (3, 6)])
def test_taps_are_right_in_every_engine_or_said(
    layers: tuple[int, ...], good: dict[str, Path], target: str, tmp_path: Path
) -> None:
    """Catches layers other than the default ones read as those: vLLM and SGLang find them, TensorRT-LLM is told."""
    own, ids = small_target(), ids_of("eagle3", V)
    assert ids is not None
    config = eagle_layouts.eagle3_config(own.runner.config, V, len(ids), layers)
    net: Any = randomise(Eagle3Model(llama_config(config), HiddenStateSpec(layers), ids), 0)
    layouts.save_heads(tmp_path, config, net, torch.float32, ids)
    shutil.copyfile(good["eagle3"] / METADATA_FILE, tmp_path / METADATA_FILE)
    state(tmp_path, training={"draft": {"taps": layers}})
    assert said(tmp_path, "vllm", target) == []
    assert said(tmp_path, "sglang", target) == []
    (line,) = said(tmp_path, "trtllm", target)
    assert str([i - 1 for i in layers]) in line


def test_the_nested_export_is_good_for_vllm(
    good: dict[str, Path], target: str, tmp_path: Path
) -> None:
    """Catches an exporter and a checker that disagree."""
    out = exported(str(good["eagle3"]), tmp_path / "nested", "speculators", target=target)
    assert said(Path(out), "vllm", target) == []
    assert any(line.startswith("nested-config") for line in said(Path(out), "sglang", target))


def test_numbered_heads_are_good_for_tensorrt(
    good: dict[str, Path], target: str, tmp_path: Path
) -> None:
    """Catches the advice to export that would not help."""
    assert "--format medusa-legacy" in said(good["medusa"], "trtllm", target)[0]
    out = exported(str(good["medusa"]), tmp_path / "legacy", "medusa-legacy", target=target)
    assert said(Path(out), "trtllm", target) == []
    assert "old-names" in [line.split(":")[0] for line in said(Path(out), "vllm", target, "0.31.0")]


@pytest.mark.parametrize("engine", SERVED["causal"])
def test_a_reduced_vocabulary_is_read_by_no_engine(
    engine: str, good: dict[str, Path], tmp_path: Path
) -> None:
    """Catches a draft called fit although the engine drafts with rows of the LM head that were not trained."""
    folder = tmp_path / "draft"
    shutil.copytree(good["causal"], folder)
    save_ids(folder, torch.arange(9))
    [found] = check_draft_files(str(folder), engine, "", target_of("causal", ""))
    assert (found.rule, found.effect) == ("whole-head", SILENT)
    assert VOCAB_FILE in found.what


def test_rules_of_a_family_have_different_names() -> None:
    """Catches two rules that a report could not tell apart."""
    for name, engine in ENGINES.items():
        for family in SERVED:
            rules = [rule.name for rule in engine.rules if family in rule.families]
            assert len(set(rules)) == len(rules), (name, family)


def test_every_rule_of_heads_is_tested() -> None:
    """Catches a rule that no mistake shows to work."""
    shown = {
        (engine, family, rule)
        for family, own in mistakes(LAYERS).items()
        for mistake in own.values()
        for engine, rule in mistake.rules.items()
    }
    shown |= {
        (engine, family, rule) for family, engine, rule, _ in test_check_blocks.DAMAGE.values()
    }
    # These have tests of their own above.
    elsewhere = {"changed-since-training", "removed", "medusa", "eagle1", "heads"}
    elsewhere |= {"layout", "layer-name", "taps", "old-names", "whole-head"}
    elsewhere |= {"parallel", "mtp-target"}  # in test_check_blocks.py
    elsewhere |= {"context", "context-rope"}  # in test_check_agrees.py
    elsewhere |= {"runner"}  # in tests/decode/checkpoints/test_speculators.py
    elsewhere |= {"correction", "unserved"}  # in tests/decode/checkpoints/test_specforge.py
    elsewhere |= {"target-states", "states", "peagle", "mtp"}  # in test_gguf_heads.py
    for name, engine in ENGINES.items():
        for rule in engine.rules:
            shown_for = [family for family in rule.families if (name, family, rule.name) in shown]
            assert shown_for or rule.name in elsewhere, (name, rule)


def test_the_command(good: dict[str, Path], target: str, tmp_path: Path) -> None:
    """Catches exit codes that no script could rely on: 0 as trained, 1 wrong, 2 no draft; and JSON beside noise."""
    words = ("--engine", "vllm", "--target", target, "--json", "true")
    fine = worlds.call(COMMAND, good["eagle3"], *words)
    assert (fine.code, json.loads(fine.out)["findings"]) == (0, []), fine.err
    folder = tmp_path / "draft"
    shutil.copytree(good["eagle3"], folder)
    mistakes(LAYERS)["eagle3"]["d2t is missing"].edit(folder)
    bad = worlds.call(COMMAND, folder, "--engine", "vllm")
    assert bad.code == 1
    assert "map-missing" in bad.out
    nothing = worlds.call(COMMAND, tmp_path / "nowhere", "--engine", "vllm")
    assert nothing.error()
    assert nothing.out == ""


def test_a_family_without_rules_is_not_called_fit(good: dict[str, Path], tmp_path: Path) -> None:
    """Catches a draft that no rule looked at and that passes for one that keeps them all."""
    folder = tmp_path / "draft"
    shutil.copytree(good["eagle3"], folder)
    state(folder, family="toy")
    [found] = check_draft_files(str(folder), "vllm")
    assert (found.rule, found.effect) == ("unchecked", SILENT)
    assert "toy" in found.what
