"""Other engines stop where ours do, and what is sent to vLLM is what ours got."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.sampling import Sampling
from decode.settings import UserError
from decode.target import Target
from eval import engines
from eval.lossless import reference_greedy
from eval.options import MethodSettings, Settings
from eval.speed import Method
from eval.tasks import Item
from tests.tiny import tiny_model, tiny_target
from tests.worlds import byte_tokenizer

NEW = 40


@pytest.fixture
def target() -> Target:
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    return replace(tiny_target(model), tokenizer=tokenizer)


def test_generate_ends_at_stop_strings(target: Target) -> None:
    """Bug: generate runs on to the limit, and the seconds of what is then cut off count against it."""
    model = tiny_model("llama", vocab_size=268, max_position_embeddings=512)
    prompt = target.tokenizer("zq")["input_ids"]
    whole = reference_greedy(model, prompt, NEW, target)
    text = target.tokenizer.decode(whole)
    stop = next(letter for letter in text[5:20] if letter not in text[:5] + "\ufffd")
    item = Item("t", "a", prompt, stop=(stop,))
    run = engines._transformers(Settings(max_new_tokens=NEW), target, model, None, Sampling())
    answer = run(item)
    assert answer["ids"] == reference_greedy(model, prompt, NEW, target, (stop,))
    assert target.tokenizer.decode(answer["ids"]).endswith(stop)
    assert answer["rounds"] == len(answer["ids"]) - 1 < NEW - 1


def test_what_vllm_is_asked(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: vLLM decodes other prompts, at another temperature, past our EOS, or with another draft.

    A script that prints what it was sent stands for vLLM.
    """
    script = tmp_path / "vllm_job.py"
    script.write_text(
        "import json, sys\njob = json.load(sys.stdin)\nprint('log')\n"
        "print(json.dumps({'answers': [{'ids': p, 'seconds': 1.0, 'rounds': 2, 'accepted': 1, 'job': job}"
        " for p in job['prompts']]}))\n"
    )
    monkeypatch.setattr(engines, "__file__", str(tmp_path / "engines.py"))
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "draftsmith.json").write_text(json.dumps({"family": "eagle3"}))
    s = Settings(
        methods=[MethodSettings("e", draft=str(tmp_path / "draft"))],
        max_new_tokens=NEW,
        vllm_python=sys.executable,
    )
    items = [Item("t", "a", [30, 31]), Item("t", "b", [32], stop=("x",))]
    eos = replace(target, eos=frozenset([7, 3]))
    answers = engines._vllm(s, eos, Method("e", None, 5), items, Sampling(0.5, 9, 0.8))
    assert [a["ids"] for a in answers] == [[30, 31], [32]]
    job: dict[str, Any] = answers[0]["job"]
    assert job["prompts"] == [[30, 31], [32]]
    assert job["stops"] == [[], ["x"]]
    assert (job["eos"], job["max_new_tokens"]) == ([3, 7], NEW)
    assert (job["temperature"], job["top_k"], job["top_p"]) == (0.5, 9, 0.8)
    assert job["speculative"] == {
        "model": str(tmp_path / "draft"), "method": "eagle3", "num_speculative_tokens": 5,
    }  # fmt: skip
    assert engines._vllm(s, eos, None, items, Sampling())[0]["job"]["speculative"] is None
    script.write_text("raise SystemExit('no room for K/V')")
    with pytest.raises(UserError, match="no room"):
        engines._vllm(s, eos, None, items, Sampling())
