"""Other engines on the same prompts: transformers' generate, its assisted generation, and vLLM.

Each decodes one prompt at a time, prompt ids in, ids out, ended at the same EOS, limit and stop strings. They run after
our own methods and not between them: `speedup` is only as good as the machine is quiet. Token ids, τ and counts are not
touched by that.
"""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from decode.drafts.base import read_facts
from decode.drafts.causal import CausalDraft
from decode.formats import VLLM_METHODS
from decode.sampling import Sampling
from decode.settings import UserError
from decode.target import Target, load_model
from eval.entries import POOLED
from eval.journal import Journal
from eval.options import Settings, engines_of
from eval.samples import MS_PER_SECOND, ratio
from eval.speed import Method, Run
from eval.stops import cut, trimmed
from eval.tasks import Item

Answer = dict[str, Any]
"""{ids, seconds, rounds, accepted}, or {error}; rounds and accepted are None where an engine does not tell."""


def check(s: Settings, methods: Sequence[Method]) -> None:
    """UserError if an engine that is asked for is missing, or has nothing to run."""
    wanted = engines_of(s)
    if "hf-assisted" in wanted and not any(isinstance(m.draft, CausalDraft) for m in methods):
        raise UserError("compare hf-assisted: give a method whose draft is a causal LM")
    if "vllm" in wanted:
        seek = "import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)"
        try:
            found = subprocess.run([s.vllm_python, "-c", seek], capture_output=True).returncode == 0
        except OSError:
            found = False
        if not found:
            raise UserError(
                f"compare vllm: {s.vllm_python!r} has no vLLM: install it there or drop vllm from --compare"
            )


def compare(
    s: Settings,
    target: Target,
    model: Any,
    methods: Sequence[Method],
    items: Sequence[Item],
    lines: Sequence[tuple[str, float, Run]],
    journal: Journal,
) -> list[dict[str, Any]]:
    """The `engines` field of a report: one element for each engine × draft × temperature × task, and pooled."""
    found = []
    for engine in engines_of(s):
        for method in _fitting(engine, methods, s):
            for temperature in s.temperatures:
                sampling = Sampling(temperature, s.top_k, s.top_p)
                answers = _answers(engine, s, target, model, method, items, sampling, journal)
                ours = {
                    (r.item.task, r.item.id): r
                    for name, t, r in lines
                    if (name, t) == ("plain", temperature)
                }
                found += _elements(s, engine, method, temperature, items, answers, ours)
    return found


def _fitting(engine: str, methods: Sequence[Method], s: Settings) -> list[Method | None]:
    """The methods that the engine can run beside ours; None: plain decoding."""
    if engine == "hf":
        return [None]
    if engine == "hf-assisted":
        return [m for m in methods if isinstance(m.draft, CausalDraft) and m.draft.shape is None]
    paths = {m.name: m.draft for m in s.methods if m.draft and not m.alpha}
    local = [m for m in methods if (Path(paths.get(m.name, "")) / "config.json").is_file()]
    return [None, *(m for m in local if m.draft is not None and m.draft.shape is None)]


def _answers(
    engine: str,
    s: Settings,
    target: Target,
    model: Any,
    method: Method | None,
    items: Sequence[Item],
    sampling: Sampling,
    journal: Journal,
) -> list[Answer]:
    key = ["engine", engine, method.name if method else "", sampling.temperature]
    if engine == "vllm":
        return journal.once(key, lambda: _vllm(s, target, method, items, sampling))
    run = _transformers(s, target, model, method, sampling)
    run(items[0])  # warm-up
    return [journal.once([*key, x.task, x.id], lambda x=x: run(x)) for x in items]  # type: ignore[misc]


def _transformers(
    s: Settings, target: Target, model: Any, method: Method | None, sampling: Sampling
) -> Callable[[Item], Answer]:
    """A function that answers a prompt with `generate`, assisted if there is a method."""
    how: dict[str, Any] = {}
    if method is not None:
        assert isinstance(method.draft, CausalDraft)
        path = next(m.draft for m in s.methods if m.name == method.name)
        assistant = load_model(path, "draft", str(model.device), s.dtype)
        assistant.generation_config.num_assistant_tokens = method.k
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0  # as many drafts as ours
        how = {"assistant_model": assistant}
    passes = [0]

    def count(*_: Any) -> None:
        passes[0] += 1

    def run(item: Item) -> Answer:
        ids = torch.tensor([item.prompt_ids], device=model.device)
        room = min(s.max_new_tokens, target.decoder.context - len(item.prompt_ids))
        settings: dict[str, Any] = {
            "do_sample": not sampling.greedy,
            "max_new_tokens": room,
            "eos_token_id": sorted(target.eos) or None,
            "pad_token_id": 0,
        }
        if not sampling.greedy:
            settings |= {"temperature": sampling.temperature, "top_k": sampling.top_k or None}
            settings |= {"top_p": sampling.top_p}
        torch.manual_seed(s.seed)
        passes[0] = 0
        counting = model.register_forward_hook(count)
        _finish(ids.device)
        start = time.perf_counter()
        try:
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(**settings),
                stopping_criteria=StoppingCriteriaList([Stop(item, target.tokenizer)]),
                **how,
            )
        except Exception as error:  # named in the report, like our own failures
            return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        finally:
            counting.remove()
        _finish(ids.device)
        seconds = time.perf_counter() - start
        answer = trimmed(out[0, ids.shape[1] :].tolist(), item.stop, target.tokenizer)
        return {"ids": answer, "seconds": seconds, "rounds": passes[0] - 1, "accepted": None}

    return run


class Stop(StoppingCriteria):
    """Ends `generate` where the task's stop strings end our own answers, so that none is timed on tokens it loses."""

    def __init__(self, item: Item, tokenizer: Any):
        self.item, self.tokenizer, self.seen = item, tokenizer, len(item.prompt_ids)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        start, answer = len(self.item.prompt_ids), input_ids[0].tolist()
        end = cut(answer[start:], self.item.stop, self.tokenizer, self.seen - start)
        self.seen = len(answer)
        return torch.tensor([end is not None], device=input_ids.device)


def _vllm(
    s: Settings, target: Target, method: Method | None, items: Sequence[Item], sampling: Sampling
) -> list[Answer]:
    """What vLLM does, in a process of its own. UserError with the end of its log when it fails."""
    longest = max(len(item.prompt_ids) for item in items) + s.max_new_tokens
    speculative = None
    if method is not None:
        path = next(m.draft for m in s.methods if m.name == method.name)
        family = read_facts(path).get("family", "causal")
        speculative = {
            "model": str(Path(path).resolve()),
            "method": VLLM_METHODS[family],
            "num_speculative_tokens": method.k,
        }
    job = {
        "target": str(Path(s.target).resolve()) if Path(s.target).exists() else s.target,
        "dtype": s.dtype,
        "speculative": speculative,
        "prompts": [item.prompt_ids for item in items],
        "stops": [list(item.stop) for item in items],
        "max_new_tokens": s.max_new_tokens,
        "max_model_len": min(target.decoder.context, longest + s.k + 1),
        "eos": sorted(target.eos),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": s.seed,
        "eager": s.mode == "eager",
    }
    script = Path(__file__).with_name("vllm_job.py")
    done = subprocess.run(
        [s.vllm_python, str(script)], input=json.dumps(job), capture_output=True, text=True, cwd="/"
    )
    if done.returncode != 0:
        raise UserError(f"vLLM failed:\n{done.stderr[-3000:]}")
    answers = json.loads(done.stdout.strip().splitlines()[-1])["answers"]
    for item, answer in zip(items, answers, strict=True):
        answer["ids"] = trimmed(answer["ids"], item.stop, target.tokenizer)
    return answers


def _elements(
    s: Settings,
    engine: str,
    method: Method | None,
    temperature: float,
    items: Sequence[Item],
    answers: Sequence[Answer],
    ours: dict[tuple[str, str], Run],
) -> list[dict[str, Any]]:
    found = []
    for task in [POOLED, *(task.name for task in s.tasks)]:
        pairs = [(x, a) for x, a in zip(items, answers, strict=True) if task in (POOLED, x.task)]
        done = [(x, a) for x, a in pairs if "error" not in a and (x.task, x.id) in ours]
        seconds = sum(a["seconds"] for _, a in done)
        tokens = sum(len(a["ids"]) for _, a in done)
        plain = [ours[x.task, x.id] for x, _ in done]
        plain_rate = ratio(
            sum(r.seconds for r in plain), sum(len(r.output.output_ids) for r in plain)
        )
        rounds = [a["rounds"] for _, a in done]
        own_rate = ratio(seconds, tokens)
        same = [a["ids"] == ours[x.task, x.id].output.output_ids for x, a in done]
        found.append(
            {
                "engine": engine,
                "name": method.name if method else "plain",
                "k": method.k if method else 0,
                "temperature": temperature,
                "batch_size": 1,
                "task": task,
                "prompts": len(done),
                "output_tokens": tokens,
                "tau": None if None in rounds else ratio(tokens - len(done), sum(rounds)),
                "tokens_per_second": ratio(tokens, seconds),
                "ms_per_token": None if own_rate is None else MS_PER_SECOND * own_rate,
                "speedup": (  # against our plain decoding, batch 1 as well
                    ratio(plain_rate, own_rate)
                    if s.batch_size == 1 and plain_rate is not None and own_rate
                    else None
                ),
                "same_as_ours": sum(same) if temperature == 0 else None,
                "failed": [
                    {"task": x.task, "id": x.id, "error": a["error"]}
                    for x, a in pairs
                    if "error" in a
                ],
                "transformers": transformers.__version__ if engine != "vllm" else None,
            }
        )
    return found


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
