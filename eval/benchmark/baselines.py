"""Other engines on the same prompts: transformers' generate, its assisted generation and prompt lookup, llama.cpp and
vLLM.

Each decodes one prompt at a time, prompt ids in, ids out, ended at the same EOS, limit and stop strings.

transformers and llama.cpp take turns with our own methods, prompt by prompt (eval/benchmark/timing.py), so a machine
that slows down slows all alike. vLLM runs afterwards: it is another process, and two engines would share one device.
Its `speedup` is only as reliable as the machine is quiet; token ids, τ and counts do not depend on that.

`speedup` compares with our plain decoding, one prompt at a time. Where ours decodes batches, the others still take
turns but have no speed-up: a batch's seconds are not those of one prompt.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import StoppingCriteria, StoppingCriteriaList

from decode.common.errors import UserError, first_line
from decode.common.journal import Journal
from decode.common.typed_json import Estimate
from decode.drafts.causal import CausalDraft
from decode.drafts.lookup import NgramDraft
from decode.engine.records import DecodeRecord
from decode.model.loading import Target, load_model
from decode.model.seq2seq import (
    generated_ids,
    generation_settings,
    prepare_generate,
)
from decode.model.vision import ImageInputs, image_arguments
from decode.serving.running import vllm_client
from decode.verification.sampling import SamplingParams
from eval.benchmark import llamacpp_baseline
from eval.benchmark.config import is_plain_chain, requested_engines, vllm_dtype
from eval.benchmark.llamacpp_baseline import LlamaCppEngine
from eval.benchmark.machine_load import MachineWatch, busy_reason, typical_probe
from eval.benchmark.methods import PLAIN_DECODING, Method
from eval.benchmark.timing import synchronize
from eval.benchmark.turns import STALLED, Attempt, EngineAnswer, stalled_columns
from eval.metrics.acceptance import Arm, over_best_arm, timed_places
from eval.metrics.bootstrap import (
    ALL_TASKS,
    MS_PER_SECOND,
    Ratio,
    paired_ratio,
    quotient,
    ratio_or_none,
)
from eval.results.report import EngineResult, FailedPrompt, RivalSpeedup
from eval.settings.evaluation import EvalConfig
from eval.tasks.loading import TaskPrompt, read_images
from eval.tasks.stop_strings import StopMatcher, trim_at_stop

UNASSISTED_ENGINE = {"hf-assisted": "hf", "hf-lookup": "hf", "llamacpp": "llamacpp", "vllm": "vllm"}
"""{engine: the engine to compare it with, which is the same one without a draft}."""
DRAFT_BEFORE_PREFILL = ("hf-assisted", "hf-lookup")
"""Engines whose first pass reads the prompt and verifies drafts too, so that it counts as a round."""


def engine_label(engine: str, method: Method | None) -> str:
    return f"{engine} {method.name if method else 'plain'}"


def check(s: EvalConfig, target: Target, methods: Sequence[Method]) -> None:
    """UserError if an engine in `compare` is missing, or no method can run on it."""
    needs = {
        "hf-assisted": "give a method whose draft is a causal LM, no tree",
        "hf-lookup": "give the method ngram, whose k it takes",
    }
    for engine in requested_engines(s):
        if engine in needs and not _supported_methods(engine, methods, s):
            raise UserError(f"compare {engine}: {needs[engine]}")
        if engine == "llamacpp":
            llamacpp_baseline.check(s, target)
        if engine == "vllm" and target.is_encoder_decoder:
            raise UserError("compare vllm: it serves no encoder-decoders, drop vllm from --compare")
        if engine == "vllm" and not vllm_client.has_vllm(s.vllm_python):
            raise UserError(
                f"compare vllm: {s.vllm_python!r} has no vLLM: install it there or drop vllm from --compare"
            )


def interleaved_baselines(
    s: EvalConfig, target: Target, model: Any, methods: Sequence[Method], sampling: SamplingParams,
    context: int, block: ExitStack,
) -> dict[str, Callable[[TaskPrompt], EngineAnswer]]:  # fmt: skip
    """{label: function that decodes one prompt} of the engines that take turns with our methods; none of them raises.

    An answer is {ids, seconds, rounds, accepted}, or {error}; rounds and accepted are None where an engine does not
    report them. `context` is the tokens of the longest request with its answer. What an engine needs until the last
    answer is entered into `block`.
    """
    found: dict[str, Callable[[TaskPrompt], EngineAnswer]] = {}
    for engine in requested_engines(s):
        file = llamacpp_baseline.target_file(s, block) if engine == "llamacpp" else None
        for method in _supported_methods(engine, methods, s) if engine != "vllm" else []:
            label = engine_label(engine, method)
            if file:
                served = LlamaCppEngine(s, target, method, sampling, file, context, block)
                found[label] = served.answer
            else:
                found[label] = TransformersEngine(s, target, model, method, sampling).answer
    return found


def compare_engines(
    s: EvalConfig,
    target: Target,
    methods: Sequence[Method],
    items: Sequence[TaskPrompt],
    records: Mapping[float, Mapping[Method, Sequence[DecodeRecord]]],
    answers: Mapping[float, Mapping[str, Sequence[EngineAnswer]]],
    journal: Journal,
) -> tuple[list[EngineResult], list[RivalSpeedup]]:
    """The `engines` field of a report: one element for each engine × draft × temperature × task, and pooled; and its
    `rivals`.

    By temperature: our `records`, and the `answers` of the engines that took turns; vLLM decodes now, unless the
    journal has its answers.
    """
    wanted = [(x, m) for x in requested_engines(s) for m in _supported_methods(x, methods, s)]
    entries: list[EngineResult] = []
    rivals: list[RivalSpeedup] = []
    for temperature in s.temperatures:
        sampling = SamplingParams(temperature, s.top_k, s.top_p)
        ours = {(r.task, r.id): r for r in records[temperature][PLAIN_DECODING]}
        apart: dict[str, Sequence[EngineAnswer]] = {}
        for engine, method in wanted:
            if engine == "vllm":
                key = ["engine", engine, method.name if method else "", temperature]
                run = partial(_run_vllm, s, target, method, items, sampling)
                apart[engine_label(engine, method)] = journal.get_or_measure(key, run)
        judged = _judge_apart(items, ours if s.batch_size == 1 else {}, apart)
        by_label = {**answers[temperature], **judged}
        for engine, method in wanted:
            base = by_label.get(engine_label(UNASSISTED_ENGINE.get(engine, ""), None))
            entries += _engine_entries(
                s, engine, method, temperature, items, by_label[engine_label(engine, method)],
                base if method else None, ours,
            )  # fmt: skip
        if s.batch_size == 1 and wanted:
            arms = {
                e: {x: by_label[engine_label(e, x)] for y, x in wanted if y == e} for e, _ in wanted
            }
            rivals += _rival_speedups(s, temperature, items, records[temperature], arms)
    return entries, rivals


def _rival_speedups(
    s: EvalConfig,
    temperature: float,
    items: Sequence[TaskPrompt],
    records: Mapping[Method, Sequence[DecodeRecord]],
    answers: Mapping[str, Mapping[Method | None, Sequence[EngineAnswer]]],
) -> list[RivalSpeedup]:
    """Of each method that is not void over the best arm of each engine, transformers' three being one; by task."""
    arms: dict[str, dict[str, Arm]] = {}
    for engine, by_method in answers.items():
        for method, own in by_method.items():
            label = engine_label(engine, method)
            arms.setdefault(UNASSISTED_ENGINE.get(engine, engine), {})[label] = {
                (item.task, item.id): (x["seconds"], len(x["ids"]))
                for item, x in zip(items, own, strict=True)
                if "error" not in x and not x.get("untimed")
            }
    found = []
    for method, decoded in records.items():
        void = timed_places([r.untimed for r in decoded])[1]
        if method == PLAIN_DECODING or void:
            continue
        timed = {(r.task, r.id): (r.seconds, r.output_tokens) for r in decoded if not r.untimed}
        for (engine, rival), task in product(arms.items(), [ALL_TASKS, *(x.name for x in s.tasks)]):
            shared = {key: x for key, x in timed.items() if task in (ALL_TASKS, key[0])}
            arm, prompts, speedup = over_best_arm(shared, rival, s.seed)
            if arm:
                found.append(
                    RivalSpeedup(method.name, engine, arm, task, temperature, prompts, speedup)
                )
    return found


def _judge_apart(
    items: Sequence[TaskPrompt],
    ours: Mapping[tuple[str, str], DecodeRecord],
    answers: Mapping[str, Sequence[EngineAnswer]],
) -> dict[str, list[EngineAnswer]]:
    """Answers that were not timed in turn, those that stalled marked as untimed; `ours` say which prompts are slow."""
    turns = []
    for i, item in enumerate(items):
        plain = ours.get((item.task, item.id))
        records = {} if plain is None else {PLAIN_DECODING.label: [plain]}
        turns.append(Attempt(records, {}, {x: [own[i]] for x, own in answers.items()}))
    stalled = stalled_columns(turns, of_rounds=False)
    return {
        label: [
            {"untimed": STALLED if ("answers", label) in found else "", **answer}
            for answer, found in zip(own, stalled, strict=True)
        ]
        for label, own in answers.items()
    }


def _supported_methods(
    engine: str, methods: Sequence[Method], s: EvalConfig
) -> list[Method | None]:
    """The methods that the engine can run; None: plain decoding."""
    if engine == "hf":
        return [None]
    if engine == "hf-assisted":
        return [m for m in methods if type(m.draft) is CausalDraft and m.shape is None]
    if engine == "hf-lookup":
        return [m for m in methods if isinstance(m.draft, NgramDraft)]
    if engine == "llamacpp":
        return [None, *llamacpp_baseline.drafts_of(methods, s)]
    served = {
        m.name
        for m in s.methods
        if is_plain_chain(m)
        if m.draft and (Path(m.draft) / "config.json").is_file()
    }
    return [None, *(m for m in methods if m.name in served and m.shape is None)]


def _run_vllm(
    s: EvalConfig,
    target: Target,
    method: Method | None,
    items: Sequence[TaskPrompt],
    sampling: SamplingParams,
) -> list[EngineAnswer]:
    """vLLM's answers, from a process of its own. UserError with its message when it fails."""
    prompts = [item.prompt_ids for item in items]
    speculative, k = None, 0
    if method is not None:
        path, k = next(m.draft for m in s.methods if m.name == method.name), method.k
        speculative = vllm_client.speculative_config(path, k)
    job = vllm_client.build_job(
        s.vllm_target or s.target,
        prompts,
        dtype=vllm_dtype(s),
        speculative=speculative,
        stops=[item.stop for item in items],
        max_new_tokens=s.max_new_tokens,
        max_model_len=min(
            target.runner.context, vllm_client.context_length(prompts, k, s.max_new_tokens)
        ),
        eos=sorted(target.eos),
        sampling=sampling,
        seed=s.seed,
        eager=s.mode == "eager",
        repair=not sampling.greedy,
    )
    watch = MachineWatch()
    watch.begin()
    (done,) = vllm_client.run_jobs(s.vllm_python, [job])
    evidence = watch.end()
    busy = busy_reason(evidence, typical_probe([evidence]))
    if "error" in done:
        raise UserError(f"vLLM failed: {done['error'][:3000]}")
    answers: list[EngineAnswer] = done["answers"]
    for item, answer in zip(items, answers, strict=True):
        answer["ids"] = trim_at_stop(answer["ids"][0], item.stop, target.tokenizer)
        answer["repaired"], answer["ran"] = done["repaired"], done.get("ran", {})
        answer |= {"untimed": busy} if busy else {}
    return answers


def _engine_entries(
    s: EvalConfig,
    engine: str,
    method: Method | None,
    temperature: float,
    items: Sequence[TaskPrompt],
    answers: Sequence[EngineAnswer],
    base: Sequence[EngineAnswer] | None,
    ours: Mapping[tuple[str, str], DecodeRecord],
) -> list[EngineResult]:
    """One element for each task and pooled; `base` are the engine's own answers without a draft, if there are any."""
    entries = []
    for task in [ALL_TASKS, *(task.name for task in s.tasks)]:
        at = [i for i, x in enumerate(items) if task in (ALL_TASKS, x.task)]
        done = [i for i in at if "error" not in answers[i] and (items[i].task, items[i].id) in ours]
        own = [answers[i] for i in done]
        plain = [ours[items[i].task, items[i].id] for i in done]
        rounds = [answer["rounds"] for answer in own]
        places, void = timed_places(
            [x.get("untimed") or y.untimed for x, y in zip(own, plain, strict=True)]
        )
        timed = {done[place] for place in places}
        tokens = sum(len(answer["ids"]) for answer in own)
        seconds = sum(answers[i]["seconds"] for i in timed)
        rate = ratio_or_none(seconds, sum(len(answers[i]["ids"]) for i in timed))
        prefilled = 0 if engine in DRAFT_BEFORE_PREFILL else len(done)
        pairs = {i: (base[i], answers[i]) for i in done if base and "error" not in base[i]}
        alone = {
            i: ({"ids": r.output_ids, "seconds": r.seconds}, answers[i])
            for i, r in zip(done, plain, strict=True)
            if s.batch_size == 1  # a batch's seconds are not those of one prompt
        }
        speedup = _paired_speedup(alone, timed, s.seed)
        gain = _paired_speedup(
            pairs, [i for i in timed if void or not (base and base[i].get("untimed"))], s.seed
        )
        same = [answer["ids"] == r.output_ids for answer, r in zip(own, plain, strict=True)]
        entries.append(
            EngineResult(
                engine=engine,
                name=method.name if method else "plain",
                k=method.k if method else 0,
                temperature=temperature,
                batch_size=1,
                in_turn=engine != "vllm",
                task=task,
                prompts=len(done),
                output_tokens=tokens,
                tau=None if None in rounds else ratio_or_none(tokens - prefilled, sum(rounds)),
                tokens_per_second=None if not rate else 1 / rate,
                ms_per_token=None if rate is None else MS_PER_SECOND * rate,
                speedup=speedup[0],
                speedup_of_sums=speedup[1],
                gain=gain[0],
                gain_of_sums=gain[1],
                stalled=len(done) - len(timed) if not void else len(done),
                void=void,
                same_as_ours=sum(same) if temperature == 0 else None,
                failed=[
                    FailedPrompt(items[i].task, items[i].id, answers[i]["error"])
                    for i in at
                    if "error" in answers[i]
                ],
                transformers=transformers.__version__ if engine.startswith("hf") else None,
                **(llamacpp_baseline.described(s) if engine == "llamacpp" else {}),
                **(_vllm_described(s, own) if engine == "vllm" else {}),
                repaired=answers[0].get("repaired", []),
            )
        )
    return entries


def _vllm_described(s: EvalConfig, answers: Sequence[EngineAnswer]) -> dict[str, Any]:
    """The fields of a result that say what vLLM served, and α at each position of its drafts."""
    dtype = vllm_dtype(s)
    served = f"{Path(s.vllm_target).name} in {dtype}" if s.vllm_target else dtype
    share = answers[0].get("ran", {}).get("gpu_memory_utilization") if answers else None
    if share is not None:
        served += f", CUDA graphs, {share:g} of the GPU's memory"
    counts = [[a["rounds"], *(a["by_position"] or [])] for a in answers]
    reached = [sum(x) for x in zip(*counts, strict=True)]
    alpha = [*map(ratio_or_none, reached[1:], reached)]
    return {"served": served, "alpha_by_position": alpha or None}


def _paired_speedup(
    pairs: Mapping[int, tuple[EngineAnswer, EngineAnswer]], timed: Collection[int], seed: int
) -> tuple[Estimate, float | None]:
    """Of (slow, fast) answers to the prompts, the seconds per token of the slow ones ÷ those of the fast ones: on those
    whose seconds count, and on all."""

    def rates(places: Iterable[int]) -> tuple[Ratio, Ratio]:
        sides = [[pairs[i][side] for i in places] for side in (0, 1)]
        slow, fast = (Ratio([x["seconds"] for x in y], [len(x["ids"]) for x in y]) for y in sides)
        return slow, fast

    own = rates([i for i in pairs if i in timed])
    return paired_ratio(*own, seed), quotient(*(x.value for x in rates(pairs)))


class TransformersEngine:
    """transformers' generate, assisted by the method's draft, or by its prompt lookup for the method ngram."""

    def __init__(
        self,
        s: EvalConfig,
        target: Target,
        model: Any,
        method: Method | None,
        sampling: SamplingParams,
    ):
        self.s, self.target, self.model = s, target, model
        self.method, self.sampling = method, sampling
        prepare_generate(model)
        self.assistant: dict[str, Any] = {}
        self.passes = 0
        """Forward passes of the target for the current prompt."""
        self.lookup = method.k if method is not None and isinstance(method.draft, NgramDraft) else 0
        if method is not None and not self.lookup:
            assert isinstance(method.draft, CausalDraft)
            own = next(m for m in s.methods if m.name == method.name)
            assistant = load_model(own.draft, "draft", str(model.device), own.dtype or s.dtype)
            prepare_generate(assistant)
            config = assistant.generation_config
            config.num_assistant_tokens = method.k
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0  # as many drafts as ours
            self.assistant = {"assistant_model": assistant}

    def answer(self, item: TaskPrompt) -> EngineAnswer:
        """{ids, seconds, rounds, accepted}, or {error}; rounds are counted by a hook on the target."""
        ids = torch.tensor([item.prompt_ids], device=self.model.device)
        [images] = read_images([item])
        torch.manual_seed(self.s.seed)
        self.passes = 0
        counting = self.model.register_forward_hook(self._count_pass)
        synchronize(ids.device)
        start = time.perf_counter()
        try:
            out = self._generate(ids, item, images)
        except Exception as error:  # named in the report, like our own failures
            return {"error": f"{type(error).__name__}: {first_line(error)}"}
        finally:
            counting.remove()
        synchronize(ids.device)
        seconds = time.perf_counter() - start
        found = generated_ids(self.model, out[0], ids.shape[1])
        answer = trim_at_stop(found, item.stop, self.target.tokenizer)
        rounds = self.passes - (self.method is None)  # assisted, the first pass verifies drafts too
        return {"ids": answer, "seconds": seconds, "rounds": rounds, "accepted": None}

    def _generate(
        self, ids: torch.Tensor, item: TaskPrompt, images: ImageInputs | None
    ) -> torch.Tensor:
        room = self.target.runner.context - len(item.prompt_ids)
        settings = generation_settings(
            self.model,
            self.target.eos,
            min(self.s.max_new_tokens, room),
            **vars(self.sampling),
            prompt_lookup_num_tokens=self.lookup or None,
        )
        start = 1 if self.model.config.is_encoder_decoder else len(item.prompt_ids)
        stopping = StopStringCriteria(item, self.target.tokenizer, start)
        out: torch.Tensor = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([stopping]),
            **self.assistant,
            **image_arguments(self.model, images),
        )
        return out

    def _count_pass(self, *_: Any) -> None:
        self.passes += 1


class StopStringCriteria(StoppingCriteria):
    """Ends `generate` where stop strings end our own answers, so that it is not timed on tokens that are cut off."""

    def __init__(self, item: TaskPrompt, tokenizer: Any, start: int):
        """`start`: where the answer begins in what `generate` has written."""
        self.matcher, self.seen = StopMatcher(item.stop, tokenizer), start

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        end = self.matcher.add(input_ids[0, self.seen :].tolist())
        self.seen = input_ids.shape[1]
        return torch.tensor([end is not None], device=input_ids.device)
