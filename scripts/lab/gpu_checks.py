"""What gpu_smoke.py does: its stages, each in a process of its own with a limit, until the time is up."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from decode.common import files, provenance
from decode.common.errors import UserError, first_line
from decode.common.run_dir import check_file
from decode.common.typed_json import to_json
from decode.devices.choice import pick_device
from decode.drafts.base import Draft, check_request
from decode.drafts.registry import load_draft
from decode.engine.engine import SpeculativeEngine
from decode.engine.modes import pick_mode
from decode.engine.records import collect_outputs
from decode.model import attention
from decode.model.gpu import kernel_choice
from decode.model.layer_stack import layer_stack
from decode.model.loading import (
    Target,
    find_dtype,
    load_config,
    load_model,
    load_target,
    usual_dtype,
)
from decode.model.names import check_name
from decode.serving.running import vllm_client
from decode.verification.sampling import SamplingParams
from eval.benchmark.timing import synchronize
from eval.checks.greedy_equivalence import find_mismatches, measure_pair
from eval.settings.evaluation import Task
from eval.tasks.loading import TaskPrompt, load_task_prompts
from scripts.lab.settings import GpuSmokeConfig
from train.data.batching import collate
from train.data.sample_store import SampleRow
from train.families.base import FamilyContext
from train.families.builders import build_trainable
from train.families.settings.eagle import Eagle3Settings
from train.settings.training import LoopConfig
from train.trainer.launch import attention_in_force
from train.trainer.loop import build_optimizers
from train.trainer.settings import DistillConfig

LEAST = 10.0
"""Seconds below which no stage is begun any more: a process that loads torch takes as long."""
TRAINING_STEPS = 4


class Skip(Exception):
    """A stage that this machine cannot run; `str` says why. It is no problem."""


@dataclass
class Work:
    """What a stage has at hand. No text ends early: otherwise rounds may be over before their waits are looked for."""

    s: GpuSmokeConfig
    dtype: str
    target: Target

    @classmethod
    def load(cls, s: GpuSmokeConfig, dtype: str = "") -> "Work":
        dtype = dtype or (usual_dtype(s.target, s.device) if s.dtype == "auto" else s.dtype)
        target = load_target(s.target, s.device, dtype)
        return cls(s, dtype, replace(target, eos=frozenset()))

    @property
    def device(self) -> torch.device:
        return self.target.runner.device

    @cached_property
    def items(self) -> list[TaskPrompt]:
        tasks = [Task(name, limit=self.s.rows) for name in ("code", "prose")]
        return [item for task in tasks for item in load_task_prompts(task, self.target)]

    @cached_property
    def prompts(self) -> list[list[int]]:
        return [item.prompt_ids for item in self.items]

    @cached_property
    def draft(self) -> Draft:
        """The draft of the settings, else a new EAGLE-3 head: it has learned nothing, and its rounds cost the same."""
        if self.s.draft:
            return load_draft(self.s.draft, self.target, dtype=self.dtype)
        return new_head(self.target, sample_rows(self.prompts, 2, 64)).to_draft()

    @cached_property
    def texts(self) -> list[list[int]]:
        """Those of plain decoding in eager rounds."""
        return self.decode("eager", None)["ids"]  # type: ignore[no-any-return]

    @cached_property
    def reference(self) -> Any:
        return load_model(self.s.target, "target", str(self.device), self.dtype)

    def mode(self, wanted: str) -> str:
        """`wanted` on a GPU; on a CPU the one that launches the same kernels one by one."""
        launched = {"captured": "eager", "graph": "compiled"}
        return wanted if self.device.type == "cuda" else launched[wanted]

    def decode(self, mode: str, draft: Draft | None) -> dict[str, Any]:
        """{ids, first and second: seconds of the two turns, tokens_per_second of the second, waits} of the prompts."""
        s, device = self.s, self.device
        engine = SpeculativeEngine(self.target, draft, k=s.k, mode=mode)
        seconds, ids = list[float](), list[list[int]]()
        for _ in range(2):  # the first turn loads, compiles and captures
            synchronize(device)
            start = time.perf_counter()
            rounds = engine.speculate(self.prompts, rows=s.rows, max_new_tokens=s.max_new_tokens)
            ids = [record.output_ids for record in collect_outputs(self.prompts, rounds)]
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        few = self.prompts[: s.rows]
        records = engine.speculate(few, rows=s.rows, max_new_tokens=s.max_new_tokens)
        for _ in range(3 * s.rows):  # first tokens come from prefill, which may upload its prompts
            next(records, None)
        waits = find_waits(device, lambda: [next(records, None) for _ in range(8)])
        times = {"first": seconds[0], "second": seconds[1]}
        return {
            "ids": ids,
            **times,
            "tokens_per_second": sum(map(len, ids)) / seconds[1],
            "waits": waits,
        }

    def judged(self, name: str, mode: str, draft: Draft | None) -> tuple[dict[str, Any], list[str]]:
        """(a row of the result, its problems): texts that leave those of plain eager rounds where rounding does not
        explain it, and waits."""
        wanted = self.texts
        found = self.decode(mode, draft)
        ids = found.pop("ids")

        def measure(item: TaskPrompt, answer: list[int], pair: tuple[int, int]) -> Sequence[float]:
            return measure_pair(self.reference, item.prompt_ids, answer, pair, self.s.k)

        left = find_mismatches(self.items, wanted, ids, measure)
        problems = [
            f"{name}, {mode}: prompt {m.id} leaves plain decoding at token {m.position}, by {m.gap}, and rounding "
            f"explains {m.noise}"
            for m in left
            if not m.tie
        ]
        problems += [f"{name}, {mode}: the host waits at {place}" for place in found["waits"]]
        same = {"same": len(ids) - len(left), "ties": sum(m.tie for m in left), "of": len(ids)}
        return {"draft": name, "mode": mode, **same, **found}, problems

    def compare(self, *cases: tuple[str, str, Draft | None]) -> dict[str, Any]:
        """{rows, problems} of each (name, mode, draft); one that fails is a problem, and the others go on."""
        rows, problems = list[Any](), list[str]()
        for name, mode, draft in cases:
            try:
                row, own = self.judged(name, mode, draft)
            except Exception as error:
                problems.append(f"{name}, {mode}: {type(error).__name__}: {first_line(error)}")
                continue
            rows.append(row)
            problems += own
        return {"rows": rows, "problems": problems}


def find_waits(device: torch.device, work: Callable[[], Any]) -> list[str]:
    """Places (file:line) in `work` where torch saw the host wait for the device; on a CPU it looks for none."""
    watch = torch.cuda.set_sync_debug_mode if device.type == "cuda" else lambda mode: None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch("warn")
        try:
            work()
        finally:
            watch("default")
    waits = (w for w in caught if "called a synchronizing" in str(w.message))
    return sorted({f"{w.filename}:{w.lineno}" for w in waits})


def sample_rows(prompts: Sequence[list[int]], count: int, length: int) -> list[SampleRow]:
    """`count` samples of `length` tokens of the prompts, repeated; the second half of each is an answer."""
    tokens = cycle([token for prompt in prompts for token in prompt])
    return [
        SampleRow(
            id=str(i), source="smoke", origin="target", input_ids=list(islice(tokens, length)),
            loss_spans=[[length // 2, length]], finish_reason="length",
        )
        for i in range(count)
    ]  # fmt: skip


def new_head(target: Target, rows: list[SampleRow]) -> Any:
    """A new EAGLE-3 head in training, which reads a low, a middle and a high layer of the live target."""
    torch.manual_seed(0)
    layers = len(layer_stack(target.runner.model))
    taps = sorted({min(2, layers - 1), layers // 2, max(0, layers - 3)})
    head = Eagle3Settings(vocab=min(8192, target.runner.vocab_size), steps=3, taps=taps)
    settings = DistillConfig(draft=head)
    return build_trainable(head, FamilyContext(settings, target, rows, str(target.runner.device)))


def training_step(target: Target, rows: list[SampleRow]) -> Callable[[], torch.Tensor]:
    """An optimiser step of a new EAGLE-3 head on these samples; it returns the loss."""
    device, trained = target.runner.device, new_head(target, rows)
    (optimizer,) = build_optimizers(trained, LoopConfig(lr=1e-4))
    batch = collate(rows, pad_id=0).to(device)
    mixed = target.runner.model.dtype == torch.bfloat16  # bf16 products of fp32 weights

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
            loss = trained.loss(trained.model, batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# ---- the stages ----


def run_plain(s: GpuSmokeConfig) -> dict[str, Any]:
    """Plain decoding, eager and captured. Before it a planted wait must be seen.

    UserError for a target or a draft that is refused: the first stage reads both.
    """
    work = Work.load(s)
    device = work.device
    if s.draft:
        check_request(work.draft, s.k, SamplingParams())
    found = work.compare(*(("plain", m, None) for m in dict.fromkeys(["eager", work.mode("captured")])))  # fmt: skip
    if device.type == "cuda" and not find_waits(device, torch.zeros(1, device=device).item):
        found["problems"].append("a planted wait was not seen, so no wait would be")
    return found


def run_eagle3(s: GpuSmokeConfig) -> dict[str, Any]:
    """The draft, eager and captured."""
    work = Work.load(s)
    modes = dict.fromkeys(["eager", work.mode("captured")])
    return work.compare(*((work.draft.name, mode, work.draft) for mode in modes))


def run_graph(s: GpuSmokeConfig) -> dict[str, Any]:
    """Plain decoding and the draft in CUDA graphs of compiled rounds."""
    work = Work.load(s)
    if work.device.type == "cuda" and pick_mode("auto", work.target, [None]) != "graph":
        raise Skip("torch has no Triton here to compile with")
    mode = work.mode("graph")
    return work.compare(("plain", mode, None), (work.draft.name, mode, work.draft))


def run_split_kv(s: GpuSmokeConfig) -> dict[str, Any]:
    """Plain decoding and the draft with the Triton kernel of attention forced, beside texts by SDPA: the other stages
    run what was chosen at load."""
    if not pick_device(s.device).startswith("cuda"):
        raise Skip("split-KV attention is a kernel for GPUs")
    os.environ[kernel_choice.ATTENTION_SETTING] = "sdpa"  # of this process, which runs one stage
    work = Work.load(s)
    mode = work.mode("captured")
    assert work.texts  # before the kernel takes SDPA's place
    attention.use_split_kv(True)
    return work.compare(("plain", mode, None), (work.draft.name, mode, work.draft))


def run_w8a8(s: GpuSmokeConfig) -> dict[str, Any]:
    """Weights and activations in eight bits; its texts are compared with its own plain ones."""
    try:
        work = Work.load(s, "w8a8")
    except UserError as error:  # it is refused on CUDA
        raise Skip(str(error)) from error
    mode = work.mode("captured")
    return work.compare(("plain", mode, None), (work.draft.name, mode, work.draft))


def run_vllm(s: GpuSmokeConfig) -> dict[str, Any]:
    """vLLM on the same device, beside our loaded target. How many texts are ours is told and no problem: it rounds
    otherwise."""
    try:
        if not vllm_client.has_vllm(s.vllm_python):
            raise Skip("the environment of --vllm_python has no vLLM")
    except UserError as error:
        raise Skip(str(error)) from error
    work = Work.load(s)
    wanted = work.texts
    job = vllm_client.build_job(
        s.target,
        work.prompts,
        dtype=work.dtype,
        max_new_tokens=s.max_new_tokens,
        max_model_len=vllm_client.context_length(work.prompts, 0, s.max_new_tokens),
    )
    (result,) = vllm_client.run_jobs(s.vllm_python, [job])
    if "error" in result:
        return {"rows": [], "problems": [f"vLLM: {result['error']}"]}
    ids = [answer["ids"][0] for answer in result["answers"]]
    seconds = sum(answer["seconds"] for answer in result["answers"])
    row = {"same": sum(map(list.__eq__, ids, wanted)), "of": len(ids), "ran": result["ran"]}
    speed = {"tokens_per_second": sum(map(len, ids)) / seconds, "version": result["vllm"]}
    return {"rows": [{"draft": "vLLM, one prompt at a time", **row, **speed}], "problems": []}


def run_training(s: GpuSmokeConfig) -> dict[str, Any]:
    """Steps of an EAGLE-3 head on the same samples, after which its loss must be lower."""
    work = Work.load(s)
    method = attention_in_force("auto", work.device.type)
    with attention.training_attention(method):
        step = training_step(work.target, sample_rows(work.prompts, 2, 64))
        losses, seconds = list[float](), list[float]()
        for _ in range(TRAINING_STEPS):
            start = time.perf_counter()
            losses.append(float(step()))
            seconds.append(time.perf_counter() - start)
    problem = f"the loss was {losses[0]} and is {losses[-1]} after {TRAINING_STEPS - 1} steps"
    row = {"attention": method, "losses": losses, "seconds": seconds}
    return {"rows": [row], "problems": [] if losses[-1] < losses[0] else [problem]}


Stage = Callable[[GpuSmokeConfig], dict[str, Any]]
STAGES: dict[str, tuple[float, Stage]] = {
    "plain": (90, run_plain),
    "eagle3": (90, run_eagle3),
    "graph": (180, run_graph),
    "split_kv": (75, run_split_kv),
    "w8a8": (60, run_w8a8),
    "vllm": (150, run_vllm),
    "training": (90, run_training),
}
"""{name: (seconds that it may take, what it does)}, in the order of what they are worth."""


def run_stage(s: GpuSmokeConfig) -> dict[str, Any]:
    """What the stage `s.stage` found: {rows, problems}, or {skipped}."""
    try:
        return STAGES[s.stage][1](s)
    except Skip as reason:
        return {"rows": [], "problems": [], "skipped": str(reason)}


# ---- all of them ----


def run_apart(s: GpuSmokeConfig, limit: float) -> dict[str, Any]:
    """`run_stage` in a process of its own, which ends with all that it started after `limit` seconds: neither code that
    is compiled for ever nor a GPU in an error takes the later stages along. That is a problem where it is the stage's
    own limit, and not where the time of all was up ("cut"). UserError for settings that the first stage refuses."""
    own = {name: x for name, x in vars(s).items() if x != getattr(GpuSmokeConfig(), name)}
    own |= {"out": ""}
    texts = {name: x if isinstance(x, str) else json.dumps(x) for name, x in own.items()}
    script = str(Path(__file__).with_name("gpu_smoke.py"))
    process = subprocess.Popen(
        [sys.executable, script, *(f"--{name}={text}" for name, text in texts.items())],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        late = f"not done after {limit:.0f} s"
        return {"rows": [], "problems": [late] if limit >= STAGES[s.stage][0] else [], "cut": late}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode != 0:
        said = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        why = said.removeprefix("error: ")
        if process.returncode == 2 and s.stage == next(iter(STAGES)):
            raise UserError(why)
        return {"rows": [], "problems": [why]}
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def check_names(s: GpuSmokeConfig) -> None:
    """UserError for a device, a dtype, a target or a draft that is not there, before a process is started for it."""
    pick_device(s.device)
    if s.dtype != "auto":
        find_dtype(s.dtype)
    load_config(s.target, "target")
    if s.draft:
        check_name(s.draft, "draft")


def check_gpu(s: GpuSmokeConfig) -> None:
    """Runs the stages in order until `s.seconds` are over, and writes the JSON after each; exit code 1 if any has a
    problem. With `s.stage` it runs and prints that one alone."""
    if s.stage and s.stage not in STAGES:
        raise UserError(f"no stage {s.stage!r}; there are {', '.join(STAGES)}")
    if s.stage:
        files.write_result("", run_stage(s))
        return
    check_file(s.out)
    check_names(s)
    start = time.monotonic()
    stages: dict[str, Any] = {}
    problems: list[str] = []
    told = {"settings": vars(s), **to_json(provenance.collect())}

    def result() -> dict[str, Any]:
        spent = time.monotonic() - start
        return {"stages": stages, "problems": problems, "seconds": round(spent, 1), **told}

    for name, (limit, _) in STAGES.items():
        left = s.seconds - (time.monotonic() - start)
        if left < LEAST:
            stages[name] = {"result": "not run", "limit": 0}
        else:
            begun = time.monotonic()
            found = run_apart(replace(s, stage=name), min(limit, left))
            kind = next((x for x in ("problems", "skipped", "cut") if found.get(x)), "done")
            seconds = round(time.monotonic() - begun, 1)
            stages[name] = {"result": kind, "seconds": seconds, "limit": min(limit, left), **found}
            own = [f"{name}: {problem}" for problem in found["problems"]]
            problems += own
            sys.stderr.write("".join(f"PROBLEM {problem}\n" for problem in own))
        took = stages[name].get("seconds", 0.0)
        sys.stderr.write(f"{name}: {stages[name]['result']}, {took:.0f} s\n")
        if s.out:
            files.write_atomically(Path(s.out), json.dumps(result()) + "\n")
    files.write_result(s.out, result())
    sys.exit(1 if problems else 0)
