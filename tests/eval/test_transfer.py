"""Transfer to another target: its own target keeps a draft, a distant one does not, and prompts are paired."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eval.scaling import data_curve, transfer
from eval.scaling.power_law import PowerLaw
from tests import worlds
from tests.worlds import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), prompts=12)


def counts(emitted: list[int], rounds: list[int]) -> np.ndarray:
    """As count_acceptance has them, with two drafted tokens reached in every round."""
    accepted = [a - b for a, b in zip(emitted, rounds, strict=True)]
    return np.array([emitted, rounds, accepted, [2 * n for n in rounds]]).T


def compare(own: np.ndarray, other: np.ndarray) -> transfer.TransferEntry:
    return transfer.compare(own, other, 0.95, 0.4, target="t", dtype="d", temperature=0.0)


def test_the_share_is_of_accepted_tokens_a_round() -> None:
    """Catches a share of τ, which is 0.5 for a draft of which nothing is accepted any more."""
    own, other = counts([40, 60, 20], [20, 30, 10]), counts([60, 45, 15], [40, 30, 10])
    found = compare(own, other)
    assert found.share.value == pytest.approx(0.5)  # τ is 2 and 1.5
    assert (found.tau, found.alpha) == (pytest.approx(1.5), pytest.approx(0.25))
    assert found.share.ci == pytest.approx((0.5, 0.5))  # every prompt loses half
    assert found.verdict == transfer.FINE_TUNE
    assert compare(own, own).verdict == transfer.KEEP
    nothing = compare(own, counts([9, 9, 9], [9, 9, 9]))
    assert (nothing.share.value, nothing.verdict) == (0.0, transfer.RETRAIN)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.96, 1.02), "keep"),
        ((0.94, 1.02), "not clear"),
        ((0.6, 0.9), "fine-tune"),
        ((0.4, 0.6), "fine-tune"),
        ((0.3, 0.49), "retrain"),
        (None, "not clear"),
    ],
)
def test_a_verdict_needs_the_whole_interval(
    interval: tuple[float, float] | None, verdict: str
) -> None:
    assert transfer.judge(interval, 0.95, 0.5) == verdict


def test_missing_tokens_follow_the_law() -> None:
    """Catches the law read backwards: a draft of half the acceptance lacks the tokens since τ was that low."""
    law = PowerLaw(largest=1e6, level=2.0, slope=0.2, exponent=0.0)  # τ = 2 + 0.2 ln(n / 1e6)
    assert data_curve.missing_tokens(law, 1.0) == 0
    at_half = 1e6 * math.exp(-0.5 / 0.2)
    assert data_curve.missing_tokens(law, 0.5) == pytest.approx(1e6 - at_half, rel=0.01)
    assert data_curve.missing_tokens(law, -9.0) == pytest.approx(1e6, rel=0.01)


def test_the_command_tells_a_copy_from_a_changed_target(world: World, tmp_path: Path) -> None:
    """A perturbed copy of the target accepts less of the draft; another tokenizer is refused and named."""
    model = AutoModelForCausalLM.from_pretrained(world.target)
    changed = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in changed.model.layers.parameters():
            p += 0.5 * p.std() * torch.randn_like(p) if p.ndim > 1 else 0.0
    for name, one in (("copy", model), ("changed", changed)):
        worlds.save(tmp_path / name, one, worlds.byte_tokenizer())
    targets = [
        str(world.target), str(tmp_path / "copy"), str(tmp_path / "changed"), str(world.stranger),
    ]  # fmt: skip
    done = worlds.call(
        "eval/transfer.py", world.draft, "--targets", json.dumps(targets), "--k", 3, "--max_new_tokens", 24,
        "--tasks", json.dumps([{"name": "own", "path": str(world.prompts)}]), "--out", tmp_path / "transfer.json",
    ).ok()  # fmt: skip
    facts = json.loads(done.out.splitlines()[-1])
    assert facts == json.loads((tmp_path / "transfer.json").read_text())
    by_target = {x["target"]: x for x in facts["targets"] if x["temperature"] == 0}
    own, same, other, stranger = (by_target[name] for name in targets)
    assert own["tau"] > 1.1  # else nothing could be lost
    assert (own["verdict"], same["verdict"]) == ("keep", "keep")
    assert (same["share"], same["share_ci"]) == (1.0, [1.0, 1.0])
    assert other["share"] < 0.8
    assert other["share_ci"][1] < 1
    assert stranger["verdict"] == "refused"
    assert "tokenizer" in stranger["why"]
    assert [x["temperature"] for x in facts["targets"]] == [0, 1] * 4


def test_a_target_is_compared_with_itself_in_eight_bits(world: World) -> None:
    """Bug: the second dtype is not used, or a list of another length is cut."""
    pytest.importorskip("torchao")
    twice = json.dumps([str(world.target)] * 2)
    arguments: list[object] = [
        "eval/transfer.py", world.draft, "--targets", twice, "--k", 3, "--max_new_tokens", 24,
        "--tasks", json.dumps([{"name": "own", "path": str(world.prompts)}]), "--temperatures", "[0.0]",
    ]  # fmt: skip
    done = worlds.call(*arguments, "--dtype", "[float32, int8]").ok()
    own, rounded = json.loads(done.out.splitlines()[-1])["targets"]
    assert (own["dtype"], rounded["dtype"]) == ("float32", "int8")
    assert own["share"] == 1
    assert rounded["tau"] != own["tau"]
    for bad in ("float32", "[float32, int8, int8]", "[float32, float32]", "[float32, int7]"):
        assert worlds.call(*arguments, "--dtype", bad).code == 2
