"""The audit of served drafts: it names what was planted, and nothing for a draft that is served as it was trained."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.common.errors import UserError
from decode.drafts.registry import load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target
from decode.serving.checker import check_draft_files
from decode.serving.log_counts import RequestCounts
from decode.serving.rules import read_draft, read_target
from eval.served import parity
from eval.served.audit import ServedCounts, audit_draft, vllm_counts
from eval.served.reading import Edit, combine, copy_files, set_config
from eval.served.suspects import readings
from eval.settings.served import AuditConfig, RefereeConfig
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts
from scripts import audit
from tests.eval.served.mistakes import drop, set_rope_theta
from tests.heads import INNER, knowing_net, save
from tests.params import slow_except
from tests.scripts.test_referee import answers_of, reply, stand_in
from tests.tiny import tiny_model, tiny_prompts, tiny_target

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = ("eagle3", "eagle1", "medusa")
PROMPTS = 12
"""With so many, swapped labels can give p-values below 0.05 ÷ the number of readings."""


class World:
    """A tiny target with heads of each family that know most of its answers by heart."""

    def __init__(self, folder: Path):
        self.folder = folder
        model = tiny_model("llama", num_hidden_layers=4, max_position_embeddings=64)
        model.save_pretrained(folder / "target")
        self.target: Target = tiny_target(model)
        prompts = tiny_prompts(*range(5, 5 + PROMPTS))
        answers = decode(self.target, None, prompts, k=1, max_new_tokens=10)
        texts = [(p, a.output_ids) for p, a in zip(prompts, answers, strict=True)]
        self.items = [TaskPrompt("own", str(i), p) for i, p in enumerate(prompts)]
        for family in FAMILIES:
            net = knowing_net(family, self.target, texts, forget=0.2)
            inner = {} if family == "medusa" else {"intermediate_size": INNER}
            save(folder / family, family, net, self.target, torch.float32, **inner)

    def settings(self, draft: Path) -> RefereeConfig:
        target = str(self.folder / "target")
        return RefereeConfig(draft=str(draft), target=target, k=3, max_new_tokens=8)

    def edited(self, family: str, edit: Edit, out: Path) -> Path:
        """A copy of the draft with an edit, without draftsmith.json."""
        copy_files(read_draft(str(self.folder / family)), out)
        edit(out)
        return out

    def counts(self, draft: Path) -> list[RequestCounts]:
        """What an engine accepts that reads the files as they are written."""
        loaded = load_draft(str(draft), self.target)
        prompts = [item.prompt_ids for item in self.items]
        return parity.decode_counts(self.settings(draft), self.target, loaded, prompts, 16)

    def audit(
        self, draft: Path, served: ServedCounts | None, out: Path, rules: bool = True
    ) -> dict[str, Any]:
        s = self.settings(draft)
        findings = check_draft_files(str(draft), "vllm", target=s.target) if rules else []
        return audit_draft(s, self.target, self.items, served, findings, "float32", str(out))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("audit"))


def abouts(result: dict[str, Any]) -> list[str]:
    return [cause["about"] for cause in result["causes"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_draft_raises_no_alarm(family: str, world: World, tmp_path: Path) -> None:
    """Catches a reading that is called better by chance, and a rule that blames a good draft."""
    draft = world.folder / family
    counts = world.counts(draft)
    assert sum(x.accepted for x in counts) > 2 * PROMPTS  # without that nothing could show
    found = world.audit(draft, ServedCounts("engine", counts), tmp_path)
    assert found["causes"] == []
    assert found["written"]["same"] == PROMPTS
    assert found["first_difference"] is None
    assert "both read the files alike; nothing is suspect" in found["verdict"]
    assert list(tmp_path.iterdir()) == []  # the copies are gone


BIASES = [f"blocks.{i}.layers.0.bias" for i in range(3)]
PROJECTIONS = ["lm_heads.1.weight", "lm_heads.2.weight"]
OTHERWISE: dict[str, tuple[str, str, Edit]] = {
    "another convention of taps": ("eagle3", "taps", set_config(eagle_aux_hidden_state_layer_ids=[1, 2, 3])),
    "norm_output on": ("eagle3", "norms", set_config(norm_output=True)),
    "norm_before_residual on": ("eagle3", "norms", set_config(norm_before_residual=True)),
    "another base of RoPE": ("eagle1", "rope", combine(set_rope_theta(1e4), set_config(rope_theta=1e4))),
    "no biases": ("medusa", "biases", combine(set_config(medusa_fc_bias=False), *map(drop, BIASES))),
    "one projection": ("medusa", "matrices", combine(set_config(original_lm_head=True), *map(drop, PROJECTIONS))),
}  # fmt: skip
"""{what an engine does otherwise: (family, cause to name, the same as an edit of the files)}."""


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name", slow_except(OTHERWISE, ["another convention of taps", "no biases"])
)
def test_what_the_engine_does_otherwise_is_named(name: str, world: World, tmp_path: Path) -> None:
    """Catches a suspect that is not switched, and a cause that is named for another reason than its counts."""
    family, about, edit = OTHERWISE[name]
    draft = world.folder / family
    if about == "rope":  # the files say another base than the usual one, which the engine takes
        written = combine(set_rope_theta(30.0), set_config(rope_theta=30.0))
        draft = world.edited(family, written, tmp_path / "written")
    counts = world.counts(world.edited(family, edit, tmp_path / "otherwise"))
    found = world.audit(draft, ServedCounts("engine", counts), tmp_path, rules=False)
    assert not found["written"]["agrees"]
    assert found["first_difference"] is not None
    assert about in abouts(found), found["causes"]
    (cause,) = (cause for cause in found["causes"] if cause["about"] == about)
    assert "12 of 12 prompts the same" in cause["evidence"][0]


@pytest.mark.parametrize(
    ("family", "about", "edit"),
    [
        ("eagle3", "norms", set_config(norm_before_residual=True)),
        ("medusa", "matrices", set_config(original_lm_head=True)),
        slow("eagle3", "taps", set_config(eagle_aux_hidden_state_layer_ids=[1, 2, 3])),
        slow("eagle3", "vocabulary map", drop("d2t")),
        slow("eagle3", "biases", set_config(attention_bias=True)),
    ],
)
def test_what_is_wrong_for_both_is_named(
    family: str, about: str, edit: Edit, world: World, tmp_path: Path
) -> None:
    """Catches files that both sides read alike, or that we refuse, passed as good: another reading accepts more."""
    draft = world.edited(family, edit, tmp_path / "damaged")
    found = world.audit(draft, None, tmp_path, rules=False)
    refused = "refused" in found["written"]
    if refused:  # nothing to compare with: an engine that accepts nothing
        good = world.counts(world.folder / family)
        nothing = [replace(x, rounds=7, accepted=0, accepted_at=(0, 0, 0)) for x in good]
        found = world.audit(draft, ServedCounts("engine", nothing), tmp_path, rules=False)
        assert "our decoder refuses" in found["verdict"]
    assert abouts(found)[0] == about, found["causes"]
    assert any("accepts more" in text for text in found["causes"][0]["evidence"])


def test_what_no_suspect_explains_is_said(world: World, tmp_path: Path) -> None:
    """Catches a cause that is named although no reading gives the served counts."""
    draft = world.folder / "eagle3"
    counts = world.counts(draft)
    first, *later = counts[0].accepted_at
    counts[0] = replace(counts[0], accepted_at=(first + 1, *later))
    found = world.audit(draft, ServedCounts("engine", counts), tmp_path)
    assert found["causes"] == []
    assert "no single suspect gives what is served" in found["verdict"]
    assert "11 of 12" in found["verdict"]
    other = [replace(x, output_ids=((1, 2),)) for x in counts]
    found = world.audit(draft, ServedCounts("engine", other), tmp_path)
    assert "its target is not ours" in found["verdict"]


def test_a_refusal_is_no_acceptance(world: World, tmp_path: Path) -> None:
    """Catches a draft that the engine refused counted as one that accepts nothing, and the rule that says why lost."""
    draft = world.edited("eagle1", set_config(bias=True), tmp_path / "damaged")
    refused = vllm_counts({"error": "ValueError: no such\n  layer"}, exact=True)
    found = world.audit(draft, refused, tmp_path)
    assert "refuses the draft (ValueError: no such layer)" in found["verdict"]
    assert abouts(found) == ["biases"]
    assert "bias-flags" in found["causes"][0]["evidence"][-1]


def test_readings_differ_from_the_files(world: World) -> None:
    """Catches two readings of one name, which a report could not tell apart."""
    for family in FAMILIES:
        target = read_target(str(world.folder / "target"), tokenizer=False)
        d = read_draft(str(world.folder / family), target)
        says = [reading.says for reading in readings(d)]
        assert len(set(says)) == len(says) > 1


def test_readings_of_heads_without_a_projection_can_be_saved(world: World, tmp_path: Path) -> None:
    """Catches an edit that gives two heads one tensor, which safetensors does not save."""
    damaged = world.edited("medusa", drop("lm_heads.1.weight"), tmp_path / "damaged")
    d = read_draft(str(damaged), read_target(str(world.folder / "target"), tokenizer=False))
    for number, reading in enumerate(readings(d)):
        copy_files(d, tmp_path / str(number))
        reading.edit(tmp_path / str(number))
        assert (tmp_path / str(number) / "model.safetensors").is_file()


# ---- the command ----


def settings(tmp_path: Path, **changes: Any) -> AuditConfig:
    base: dict[str, Any] = {name: str(ROOT / "assets" / name) for name in ("draft", "target")}
    base |= {"device": "cpu", "out": str(tmp_path / "out")}
    base |= {"tasks": [Task("code", limit=2)], "k": 3, "max_new_tokens": 6, "temperature": 0.0}
    return AuditConfig(**(base | changes))


@pytest.fixture(scope="module")
def bundled() -> tuple[list[RequestCounts], list[int]]:
    """What our decoder accepts of the bundled draft, and how long the prompts are."""
    s = RefereeConfig(
        str(ROOT / "assets/draft"), str(ROOT / "assets/target"), k=3, max_new_tokens=6
    )
    target = replace(load_target(s.target, "cpu"), eos=frozenset())
    prompts = [item.prompt_ids for item in load_task_prompts(Task("code", limit=2), target)]
    return parity.run_ours(s, target, prompts), [len(prompt) for prompt in prompts]


Capture = pytest.CaptureFixture[str]


def test_the_command_with_vllm(
    bundled: tuple[list[RequestCounts], list[int]], tmp_path: Path, capsys: Capture
) -> None:
    """Catches a command that asks vLLM for something else than it decodes itself, or whose verdict is not printed."""
    python = stand_in(tmp_path, f"print(json.dumps({reply(answers_of(bundled[0]))}))")
    audit.main(settings(tmp_path, python=python))
    result = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert result["causes"] == []
    assert result["served"]["engine"] == "vLLM 9.9"
    assert result["written"]["same"] == 2
    assert "both read the files alike" in capsys.readouterr().out
    assert json.loads((tmp_path / "asked").read_text())["max_new_tokens"] == 6


def kept(x: RequestCounts, tokens: int) -> dict[str, Any]:
    """A line of what an engine accepted of a prompt."""
    at = [x.rounds, *x.accepted_at, 0]
    rounds = [
        [3, accepted] for accepted in range(4) for _ in range(at[accepted] - at[accepted + 1])
    ]
    return {"prompt_ids": [0] * tokens, "rounds": rounds}


@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda lengths: lengths, "both read the files alike"), (lambda lengths: [9, 9], "another chat template")],
)  # fmt: skip
def test_the_command_with_a_log(
    change: Callable[[list[int]], list[int]], says: str,
    bundled: tuple[list[RequestCounts], list[int]], tmp_path: Path, capsys: Capture,
) -> None:  # fmt: skip
    """Catches a log that is compared although its prompts are others, and one whose counts are misread."""
    lines = [kept(x, n) for x, n in zip(bundled[0], change(bundled[1]), strict=True)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    audit.main(settings(tmp_path, served=str(log)))
    assert says in capsys.readouterr().out
    one = settings(
        tmp_path, served=str(log), tasks=[Task("code", limit=1)], out=str(tmp_path / "o2")
    )
    with pytest.raises(UserError, match="2 answers and there are 1 prompts"):
        audit.main(one)
