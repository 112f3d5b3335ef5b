"""Fidelity of a dtype: numbers of a comparison written out, texts of tasks and of sampled sets, paired intervals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from decode.common.errors import UserError
from decode.engine.engine import decode
from decode.model.loading import load_target
from eval import dtype_fidelity as fidelity
from eval.checks.target_drift import compare_on_text
from eval.dtype_fidelity import AnsweredText, DtypeScores
from eval.settings.evaluation import FidelityConfig, Task
from eval.tasks.loading import load_task_prompts
from tests import worlds
from tests.tiny import noisy, tiny_model, tiny_target
from tests.worlds import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return worlds.build(tmp_path_factory.mktemp("world"), prompts=12)


def test_numbers_of_a_text_are_those_of_plain_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: positions off by one, KL the other way round, TV not halved, rows of pieces that are lost."""
    monkeypatch.setattr("eval.checks.target_drift.ROWS", 3)
    old, new = tiny_model("llama"), noisy(tiny_model("llama"), 0.05)
    text, first = [5, 9, 2, 44, 17, 3, 8, 1, 90], 2
    found = compare_on_text(tiny_target(old), tiny_target(new), text, first)
    with torch.no_grad():
        p, q = (
            m(torch.tensor([text])).logits[0, first:-1].double().softmax(-1) for m in (old, new)
        )
    labels = torch.tensor(text[first + 1 :])
    wanted = {
        "tv": (p - q).abs().sum(-1) / 2,
        "kl": (p * (p / q).log()).sum(-1),
        "same": (p.argmax(-1) == q.argmax(-1)).double(),
        "nll_old": -p.log()[torch.arange(len(labels)), labels],
        "nll_new": -q.log()[torch.arange(len(labels)), labels],
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(vars(found)[name], value.numpy(), atol=1e-4, err_msg=name)


def test_answers_and_first_positions_are_apart() -> None:
    """Bug: tokens of the prompt are counted, or those of the answer one place off."""
    old, new = tiny_target(tiny_model("llama")), tiny_target(noisy(tiny_model("llama"), 0.05))
    ids = [5, 9, 2, 44, 17, 3, 8, 1, 90, 4]
    scores = fidelity.score(old, new, [AnsweredText(ids, np.array([6, 8]))])
    whole = compare_on_text(old, new, ids)
    assert scores.answers[0].kl.tolist() == whole.kl[[5, 7]].tolist()
    assert scores.first[0].kl.tolist() == whole.kl[:4].tolist()


def test_a_dtype_is_compared_on_the_target_s_answers(world: World, tmp_path: Path) -> None:
    """Bug: the reference against itself, a dtype that is not loaded, intervals that do not hold their value."""
    out = tmp_path / "fidelity.json"
    tasks = json.dumps([{"name": "own", "path": str(world.prompts)}])
    done = worlds.call(
        "eval/fidelity.py", world.target, "--tasks", tasks, "--max_new_tokens", 24, "--dtypes", "[w8a8, bfloat16]",
        "--out", out,
    )  # fmt: skip
    assert done.code == 0, done.err
    facts = json.loads(done.out.splitlines()[-1])
    assert facts == json.loads(out.read_text())
    assert facts["texts"] == 12
    w8a8, bf16 = facts["dtypes"]
    assert (w8a8["dtype"], bf16["dtype"]) == ("w8a8", "bfloat16")
    assert w8a8["weights"] == bf16["weights"]
    for one in (w8a8, bf16):
        assert 0 < one["tv_ci"][0] <= one["tv"] <= one["tv_ci"][1] < 0.2
        assert 0.8 < one["same_top1"] <= 1
        assert one["kl_quantiles"]["0.5"] <= one["kl"] * 2
    assert w8a8["reference_perplexity"] == bf16["reference_perplexity"]
    assert bf16["tv_difference"] == pytest.approx(bf16["tv"] - w8a8["tv"])
    assert w8a8["tv_difference_ci"] == [0, 0]


def test_greedy_answers_are_scored(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the reference's answers are taken for the dtype's, or scores are of other prompts or not greedy."""
    path = tmp_path / "gsm8k.jsonl"
    rows = [{"question": f"zq{n} and {n}", "answer": f"#### {n}"} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Task("gsm8k", str(path))
    old, new = (load_target(str(world.target), "cpu", dtype) for dtype in ("float32", "bfloat16"))
    items = load_task_prompts(task, old)
    own, other = (
        {x.id: decode(t, None, [x.prompt_ids], max_new_tokens=16)[0].output_ids for x in items} for t in (old, new)
    )  # fmt: skip
    monkeypatch.setattr(
        fidelity, "score_answer", lambda item, ids, tokenizer, run_code: float(ids == own[item.id])
    )
    s = FidelityConfig(
        target=str(world.target), dtypes=["bfloat16"], scored=[task], max_new_tokens=16, rows=4, device="cpu",
        tasks=[Task("own", str(world.prompts))],
    )  # fmt: skip
    [found] = fidelity.compare_dtypes(s, Console(quiet=True))[0][0].scores
    equal = sum(own[x] == other[x] for x in own) / len(own)
    assert equal < 1
    assert (found.metric, found.prompts, found.plain) == ("exact match", 6, 1.0)
    assert found.value.value == pytest.approx(equal)
    assert found.difference.value == pytest.approx(equal - 1)


def test_code_is_not_scored_without_running_it(world: World, tmp_path: Path) -> None:
    """Bug: targets answer a task of code for minutes, and nothing can be scored."""
    path = tmp_path / "humaneval.jsonl"
    row = {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "test": "def check(f): pass",
        "entry_point": "f",
    }
    path.write_text(json.dumps(row | {"canonical_solution": "    return 1\n"}) + "\n")
    s = FidelityConfig(target=str(world.target), scored=[Task("humaneval", str(path))])
    target = load_target(str(world.target), "cpu", "float32")
    with pytest.raises(UserError, match="run_code true"):
        fidelity.scored_prompts(s, target)
    s.run_code = True
    assert [item.metric for item in fidelity.scored_prompts(s, target)] == ["code"]


def test_texts_of_a_sampled_set(world: World, tmp_path: Path) -> None:
    """Bug: prompts that are taken for answers, and a limit that takes all."""
    from train.data.sample_store import write_shard

    rows = [
        {"id": str(n), "source": "s", "origin": "target", "input_ids": [20, 21, 22, 23 + n, 24], "finish_reason": "eos"}
        | {"loss_spans": [[0, 1], [3, 5]]}
        for n in range(3)
    ]  # fmt: skip
    write_shard(tmp_path, rows)
    target = load_target(str(world.target), "cpu")
    texts = fidelity.answered_texts(FidelityConfig(samples=str(tmp_path), limit=2), target)
    assert [text.ids for text in texts] == [[20, 21, 22, 23, 24], [20, 21, 22, 24, 24]]
    assert [text.labels.tolist() for text in texts] == [[3, 4], [3, 4]]


def test_intervals_are_of_prompts() -> None:
    """Bug: tokens are resampled as if they were independent, or prompts count alike whatever their length."""

    def drift(values: list[float]) -> fidelity.TokenDrift:
        return fidelity.TokenDrift(*[np.array(values)] * 5)

    scores = DtypeScores([drift([0.1] * 90), drift([0.9] * 10)], [])
    ratio = scores.ratio("tv")
    assert ratio.value == pytest.approx(0.18)
    assert ratio.estimate(0).ci == pytest.approx((0.1, 0.9))
