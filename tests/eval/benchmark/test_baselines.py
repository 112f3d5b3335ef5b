"""Other engines take turns with ours and stop where ours do, and what is sent to vLLM is what ours got."""

import ast
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.drafts.lookup import NgramDraft
from decode.engine.engine import SpeculativeEngine
from decode.engine.records import DecodeRecord
from decode.model.loading import Target
from decode.serving.running import vllm_client, vllm_worker
from decode.verification.sampling import SamplingParams
from eval.benchmark import baselines, timing
from eval.benchmark.baselines import TransformersEngine
from eval.benchmark.methods import Method
from eval.benchmark.timing import TimingContext, TimingResult
from eval.benchmark.turns import EngineAnswer
from eval.checks.greedy_equivalence import reference_greedy_output
from eval.results.report import FailedPrompt
from eval.settings.evaluation import EvalConfig, MethodConfig
from eval.tasks.loading import Task, TaskPrompt
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
    whole = reference_greedy_output(model, prompt, NEW, target)
    text = target.tokenizer.decode(whole)
    stop = next(letter for letter in text[5:20] if letter not in text[:5] + "\ufffd")
    item = TaskPrompt("t", "a", prompt, stop=(stop,))
    s = EvalConfig(max_new_tokens=NEW)
    answer = TransformersEngine(s, target, model, None, SamplingParams()).answer(item)
    assert answer["ids"] == reference_greedy_output(model, prompt, NEW, target, (stop,))
    assert target.tokenizer.decode(answer["ids"]).endswith(stop)
    assert answer["rounds"] == len(answer["ids"]) - 1 < NEW - 1


def test_what_vllm_is_asked(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: vLLM decodes other prompts, at another temperature, past our EOS, or with another draft. A script that
    prints what it was sent stands for vLLM."""
    script = tmp_path / "vllm_worker.py"
    script.write_text(
        "import json, sys\nprint('log')\nfor job in json.load(sys.stdin)['jobs']:\n"
        "    row = {'seconds': 1.0, 'rounds': 2, 'accepted': 1, 'job': job}\n"
        "    print(json.dumps({'repaired': ['x'], 'answers': [row | {'ids': [p]} for p in job['prompts']]}))\n"
    )
    monkeypatch.setattr(vllm_client, "WORKER_SCRIPT", script)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "draftsmith.json").write_text(json.dumps({"family": "eagle3"}))
    s = EvalConfig(
        methods=[MethodConfig("e", draft=str(tmp_path / "draft"))],
        max_new_tokens=NEW,
        vllm_python=sys.executable,
    )
    items = [TaskPrompt("t", "a", [30, 31]), TaskPrompt("t", "b", [32], stop=("x",))]
    eos = replace(target, eos=frozenset([7, 3]))
    answers = baselines._run_vllm(s, eos, Method("e", None, 5), items, SamplingParams(0.5, 9, 0.8))
    assert [a["ids"] for a in answers] == [[30, 31], [32]]
    assert answers[0]["repaired"] == ["x"]
    job: dict[str, Any] = answers[0]["job"]
    assert job["prompts"] == [[30, 31], [32]]
    assert job["stops"] == [[], ["x"]]
    assert (job["eos"], job["max_new_tokens"]) == ([3, 7], NEW)
    assert (
        len({0, *sum(job["seeds"], [])}) == 3
    )  # nor the engine's, with which vLLM draws its drafts
    assert (job["temperature"], job["top_k"], job["top_p"]) == (0.5, 9, 0.8)
    assert job["speculative"] == {
        "model": str(tmp_path / "draft"), "method": "eagle3", "num_speculative_tokens": 5,
        "draft_tensor_parallel_size": 1,
    }  # fmt: skip
    assert (
        baselines._run_vllm(s, eos, None, items, SamplingParams())[0]["job"]["speculative"] is None
    )
    other = replace(s, vllm_target=str(tmp_path), vllm_dtype="bfloat16")
    job = baselines._run_vllm(other, eos, None, items, SamplingParams())[0]["job"]
    assert (job["target"], job["dtype"]) == (str(tmp_path), "bfloat16")
    for answer in (
        "raise SystemExit('no room for K/V')",
        """print('{"error": "no room for K/V"}')""",
    ):
        script.write_text(answer)
        with pytest.raises(UserError, match="no room"):
            baselines._run_vllm(s, eos, None, items, SamplingParams())


def test_what_vllm_counts_by_position() -> None:
    """Bug: α of a position is divided by all rounds, or by what was drafted, instead of by what was reached."""
    answers = [
        {"rounds": 6, "by_position": [4, 2, 0]},
        {"rounds": 4, "by_position": [4, 1, 0]},
    ]
    s = EvalConfig(dtype="w4a8", vllm_target="models/int8", vllm_dtype="bfloat16")
    found = baselines._vllm_described(s, answers)
    assert found == {"served": "int8 in bfloat16", "alpha_by_position": [0.8, 3 / 8, 0.0]}
    plain = baselines._vllm_described(EvalConfig(), [{"rounds": 3, "by_position": 0}])
    assert plain == {"served": "float32", "alpha_by_position": None}


def test_the_worker_is_there_and_imports_nothing_of_ours() -> None:
    """Bug: the script that vLLM's interpreter runs was moved, or needs packages that its environment does not have."""
    tree = ast.parse(vllm_client.WORKER_SCRIPT.read_text())
    modules = {name.name for x in ast.walk(tree) if isinstance(x, ast.Import) for name in x.names}
    modules |= {x.module or "" for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    outside = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert outside == {"torch", "vllm"}


def test_the_worker_takes_no_settings_of_the_targets_folder() -> None:
    """Bug: vLLM limits answers, and takes penalties, as generation_config.json says. A recorder stands for vLLM."""
    asked: dict[str, Any] = {}
    vllm = SimpleNamespace(LLM=lambda target, **settings: asked.update(settings))
    job = vllm_client.build_job("T", [[1]], max_new_tokens=3, max_model_len=9)
    vllm_worker.build_llm(vllm, job, vllm_worker.device_settings(job))
    assert asked["generation_config"] == "vllm"
    assert asked["enforce_eager"]
    assert "gpu_memory_utilization" not in asked


@pytest.mark.parametrize(("free", "share"), [(139, 0.88), (70, 0.44), (3, 0.01)])
@pytest.mark.parametrize("eager", [True, False])
def test_vllm_beside_us_on_one_gpu(
    free: int, share: float, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: vLLM asks for 0.9 of the memory beside our models and does not start, or runs without its CUDA graphs since
    our mode is eager. Planted values: those that it was given before."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free << 30, 141 << 30))
    asked: dict[str, Any] = {}
    vllm = SimpleNamespace(LLM=lambda target, **settings: asked.update(settings))
    job = vllm_client.build_job("T", [[1]], max_new_tokens=3, max_model_len=9, eager=eager)
    vllm_worker.build_llm(vllm, job, vllm_worker.device_settings(job))
    assert (asked["enforce_eager"], asked["gpu_memory_utilization"]) == (False, share)
    answers = [{"rounds": 3, "by_position": 0, "ran": vllm_worker.device_settings(job)}]
    served = baselines._vllm_described(EvalConfig(), answers)["served"]
    assert served == f"float32, CUDA graphs, {share:g} of the GPU's memory"


class Clock:
    """Stands for a decoder: says whose turn it is, and takes its time."""

    def __init__(self) -> None:
        self.turns: list[str] = []

    def arm(self, name: str, fails: str = "") -> Callable[[TaskPrompt], EngineAnswer]:
        def answer(item: TaskPrompt) -> EngineAnswer:
            self.turns.append(f"{name} {item.id}")
            if item.id == fails:
                return {"error": "RuntimeError: no room"}
            return {"ids": [1, 2], "seconds": 0.5, "rounds": 1, "accepted": None}

        return answer


def measured(
    target: Target, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, fails: str = "",
    batch_size: int = 1,
) -> TimingResult:  # fmt: skip
    """Three prompts by plain decoding, an n-gram draft and two other engines; `clock` sees every turn."""
    decode, run_first_rounds = timing.decode_batch, timing.run_first_rounds

    def warmed(engine: SpeculativeEngine, prompts: list[list[int]], *rest: Any) -> None:
        name = "plain" if engine.draft is None else engine.draft.name
        clock.turns.append(f"{name} warm-up of {len(prompts)}")
        run_first_rounds(engine, prompts, *rest)

    def seen(
        engine: SpeculativeEngine, method: Method, batch: Sequence[TaskPrompt], *rest: Any
    ) -> list[DecodeRecord]:
        clock.turns.append(" ".join([method.name, *(item.id for item in batch)]))
        return decode(engine, method, batch, *rest)

    monkeypatch.setattr("eval.benchmark.turns.MOST_REPEATS", 0)  # a busy machine stalls, too
    monkeypatch.setattr(timing, "run_first_rounds", warmed)
    monkeypatch.setattr(timing, "decode_batch", seen)
    items = [TaskPrompt("t", name, [20 + at, 30, 40]) for at, name in enumerate("abc")]
    others = {"hf plain": clock.arm("hf"), "hf-assisted d": clock.arm("assisted", fails)}
    journal = Journal(folder / "journal.jsonl", {})
    methods = [Method("ngram", NgramDraft(), 2)]
    context = TimingContext(target, items, 6)
    found = timing.time_methods(context, methods, 0.0, batch_size, journal, lambda: None, others)
    monkeypatch.setattr(timing, "run_first_rounds", run_first_rounds)
    monkeypatch.setattr(timing, "decode_batch", decode)
    return found


def test_engines_take_turns(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: other engines run when our methods are through, and what slowed the machine then is their fault; or none is
    warmed up."""
    clock = Clock()
    found = measured(target, tmp_path, clock, monkeypatch)
    order = ("plain", "ngram", "hf", "assisted", "plain")
    warm_up, turns = clock.turns[:4], clock.turns[4:]
    assert warm_up == ["plain warm-up of 1", "ngram warm-up of 1", "hf a", "assisted a"]
    assert turns == [f"{who} {item}" for item in "abc" for who in order]
    assert {name: len(said) for name, said in found.answers.items()} == {
        "hf plain": 3,
        "hf-assisted d": 3,
    }


def test_a_batch_is_answered_one_by_one(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: with larger batches the others lose prompts, or their order."""
    clock = Clock()
    measured(target, tmp_path, clock, monkeypatch, batch_size=2)
    turns = ["plain a b", "ngram a b", "hf a", "hf b", "assisted a", "assisted b", "plain a b"]
    assert [turn for turn in clock.turns if "warm-up" in turn] == [
        f"{name} warm-up of {rows}" for name in ("plain", "ngram") for rows in (2, 1)
    ]  # the last batch is smaller
    assert clock.turns[6:13] == turns


def test_turns_are_kept(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a rerun asks engines again at another time than our methods, forgets their errors, or takes what is kept of
    one engine for all."""
    first, again = Clock(), Clock()
    found = measured(target, tmp_path, first, monkeypatch, fails="b")
    assert [("error" in x) for x in found.answers["hf-assisted d"]] == [False, True, False]
    assert measured(target, tmp_path, again, monkeypatch).answers == found.answers
    assert again.turns == []
    path = tmp_path / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert [json.loads(line)["key"][0] for line in lines[1:]] == ["runs"] * 3
    path.write_text("".join(lines[:-1]) + lines[-1][:40])  # killed in the line of the last prompt
    measured(target, tmp_path, again, monkeypatch)
    assert again.turns[4:] == ["plain c", "ngram c", "hf c", "assisted c", "plain c"]


def element(engine: str, at: int = 0, base: Sequence[EngineAnswer] | None = None) -> dict[str, Any]:
    """The pooled element of six prompts of 5 tokens: ours takes 1 s for each, the other engine more and more."""
    items = [TaskPrompt("t", str(i), [20]) for i in range(6)]
    ids = [1, 2, 3, 4, 5]
    ours = {
        ("t", item.id): DecodeRecord([20], ids, [(0, 0)] * 4, "length", 0.1, seconds=1.0)
        for item in items
    }
    answers: list[EngineAnswer] = [
        {"ids": ids, "seconds": 2.0 + at + i / 10, "rounds": 2, "accepted": None, "by_position": 0}
        for i in range(6)
    ]
    answers[3] = {"error": "RuntimeError: no room"}
    s = EvalConfig(tasks=[Task("t")])
    return baselines._engine_entries(
        s, engine, Method("d", None, 3), 0.0, items, answers, base, ours
    )[0]


def test_speedups_have_intervals() -> None:
    """Bug: an interval over other prompts than the speed-up, a failure that counts, tokens that the prefill of assisted
    generation does not give (it verifies drafts), or a gain over our engine and not over the same one."""
    base: list[EngineAnswer] = [{"ids": [1] * 5, "seconds": 5.0, "rounds": 4} for _ in range(6)]
    base[5] = {"error": "RuntimeError: gone"}
    e = element("hf-assisted", base=base)
    seconds = [2.0, 2.1, 2.2, 2.4, 2.5]
    speedup, (low, high) = e.speedup
    assert speedup == pytest.approx(5 / sum(seconds))
    assert 1 / max(seconds) < low < speedup < high < 1 / min(seconds)
    gain, (low, high) = e.gain
    assert gain == pytest.approx(20 / sum(seconds[:4]))
    assert low < gain < high
    assert e.failed == [FailedPrompt("t", "3", "RuntimeError: no room")]
    assert (e.prompts, e.tau, e.in_turn) == (5, 2.5, True)
    apart = element("vllm")
    assert (apart.tau, apart.in_turn, apart.gain) == (2, False, (None, None))


@pytest.mark.parametrize("family", ["pard", "peagle"])
def test_vllm_drafts_a_block_in_one_pass(family: str, tmp_path: Path) -> None:
    """Catches a block draft that vLLM would run token by token, as a small LM or an EAGLE-3 head."""
    (tmp_path / "draftsmith.json").write_text(json.dumps({"family": family}))
    assert vllm_client.speculative_config(str(tmp_path), 6)["parallel_drafting"] is True


def test_vllm_is_given_the_folder_of_a_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: vLLM reads the file itself as a config, and fails after everything else was measured."""
    monkeypatch.setattr(
        vllm_client, "gguf_folder", lambda name, *_: str(tmp_path) if "gguf" in name else None
    )
    monkeypatch.chdir(tmp_path)
    for name, path in (("model.gguf", tmp_path), (".", tmp_path), ("org/name", "org/name")):
        assert vllm_client.build_job(name, [[1]], max_new_tokens=1, max_model_len=8)[
            "target"
        ] == str(path)
