"""How a published draft is served: a file for each engine that loads its family, and the reason where one does not.

Flags and keys are those of vLLM 0.32 and 0.33, SGLang 0.5, TensorRT-LLM 1.x (PyTorch backend), llama.cpp of November
2026, TGI 3 and transformers 5; engines draft chains. Which engine serves which family is said in decode/serving/.
Nothing here runs an engine: vllm_parity.py and llamacpp_parity.py of scripts/engine_compat/ do.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.checkpoints import layouts
from decode.common.errors import UserError
from decode.common.template_choice import NAME
from decode.serving.hf_engine import TGI, TRANSFORMERS
from decode.serving.llamacpp_engine import LLAMACPP
from decode.serving.sglang_engine import SGLANG
from decode.serving.trtllm_engine import TRTLLM
from decode.serving.vllm_engine import VLLM
from eval.reporting.formatting import format_with_interval
from eval.results.report import setting_title
from train.hub.published_fields import WITHHELD
from train.hub.report_entries import ReportEntry

NO_EMBEDDING_CAPTURE = (
    "it names layers by their output and so cannot capture the embedding, which this draft reads"
)


@dataclass(frozen=True)
class ServedDraft:
    """The draft to serve and its target."""

    family: str
    repo: str
    target: str
    revision: str | None
    k: int
    layers: tuple[int, ...] = ()
    """EAGLE-3: layers whose input hidden states it reads; empty for the default ones."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template that most of its training prompts were rendered with."""

    def unsupported(self, engine: str) -> str:
        return f"{engine} has no method for drafts of family {self.family}"


@dataclass(frozen=True)
class EngineServingConfig:
    """One engine and the files that start it; `files` is empty where it cannot load the draft."""

    engine: str
    note: str
    """Which versions, what to know; or why not."""
    files: Mapping[str, str]


def build_serving_configs(job: ServedDraft) -> list[EngineServingConfig]:
    """One for each engine, in the order of the card."""
    return [
        vllm_config(job),
        triton_config(job),
        sglang_config(job),
        trtllm_config(job),
        llamacpp_config(job),
        tgi_config(job),
        transformers_config(job),
    ]


def served_arguments(draft: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template for a server of this draft, by its published draftsmith.json: those of most
    training prompts; {} if they are not published, or need one of several templates by name."""
    usual = (draft.get("templates") or [{}])[0]
    return {} if NAME in usual or WITHHELD in usual.values() else dict(usual)


def vllm_speculative_config(job: ServedDraft) -> dict[str, Any]:
    """vLLM's speculative_config."""
    return {
        "model": job.repo,
        "method": VLLM.method(job.family),
        "num_speculative_tokens": job.k,
        **VLLM.methods[job.family].options,
    }


def vllm_config(job: ServedDraft) -> EngineServingConfig:
    """A `vllm serve` command."""
    if job.family not in VLLM.methods:
        return EngineServingConfig("vLLM", job.unsupported("vLLM"), {})
    revision = ["--revision", job.revision] if job.revision else []
    words = ["vllm", "serve", job.target, *revision]
    words += ["--speculative-config", json.dumps(vllm_speculative_config(job))]
    if job.template:
        words += ["--default-chat-template-kwargs", json.dumps(job.template)]
    return EngineServingConfig(
        "vLLM", VLLM.versions_for(job.family), {"vllm.sh": _shell_script(job, words)}
    )


def triton_config(job: ServedDraft) -> EngineServingConfig:
    """A model repository for Triton's vLLM backend, which passes model.json to vLLM."""
    if job.family not in VLLM.methods:
        return EngineServingConfig("Triton", job.unsupported("the vLLM inside it"), {})
    name = f"triton/draftsmith_{job.family}"
    revision = {"revision": job.revision} if job.revision else {}
    model = {"model": job.target, **revision, "speculative_config": vllm_speculative_config(job)}
    config = 'backend: "vllm"\ninstance_group [\n  {\n    count: 1\n    kind: KIND_MODEL\n  }\n]\n'
    files = {
        f"{name}/config.pbtxt": config,
        f"{name}/1/model.json": json.dumps(model, indent=2) + "\n",
    }
    note = f"tritonserver --model-repository serving/triton, with vLLM inside: {VLLM.versions_for(job.family)}"
    return EngineServingConfig("Triton", note, files)


def sglang_config(job: ServedDraft) -> EngineServingConfig:
    """A command of SGLang, which drafts chains with top-k 1."""
    if job.family not in SGLANG.methods or 0 in job.layers:
        reason = NO_EMBEDDING_CAPTURE if 0 in job.layers else job.unsupported("SGLang")
        return EngineServingConfig("SGLang", reason, {})
    words = ["python", "-m", "sglang.launch_server", "--model", job.target]
    words += ["--speculative-algorithm", SGLANG.method(job.family)]
    words += ["--speculative-draft-model-path", job.repo]
    words += ["--speculative-num-steps", str(job.k), "--speculative-eagle-topk", "1"]
    words += ["--speculative-num-draft-tokens", str(job.k + 1)]  # it counts the root as well
    note = "0.5; its number of draft tokens counts the root: one more than vLLM's"
    return EngineServingConfig(
        "SGLang", note, {"sglang.sh": _shell_script(job, words, pinned=False)}
    )


def trtllm_config(job: ServedDraft) -> EngineServingConfig:
    """A command of TensorRT-LLM and its YAML of options."""
    if 0 in job.layers:
        return EngineServingConfig("TensorRT-LLM", NO_EMBEDDING_CAPTURE, {})
    if job.family not in TRTLLM.methods:
        reason = job.unsupported("its PyTorch backend")
        return EngineServingConfig("TensorRT-LLM", reason, {})
    served = TRTLLM.methods[job.family]
    lines = [f"{key}: {json.dumps(value)}" for key, value in served.options.items()]
    lines += ["speculative_config:", f"  decoding_type: {served.method}"]
    lines += [f"  max_draft_len: {job.k}", f"  speculative_model: {job.repo}"]
    if job.layers:  # it counts layers by their output
        lines.append(f"  eagle3_layers_to_capture: {list(layouts.capture_to_output(job.layers))}")
    words = ["trtllm-serve", job.target, "--backend", "pytorch"]
    words += ["--extra_llm_api_options", "serving/trtllm.yml"]
    files = {
        "trtllm.yml": "\n".join(lines) + "\n",
        "trtllm.sh": _shell_script(job, words, pinned=False),
    }
    return EngineServingConfig("TensorRT-LLM", "1.x, PyTorch backend", files)


def llamacpp_config(job: ServedDraft) -> EngineServingConfig:
    """Commands that write draft and target as GGUF files, and one of llama-server."""
    if job.family not in LLAMACPP.methods:
        return EngineServingConfig("llama.cpp", job.unsupported("llama.cpp"), {})
    export = ["python", "scripts/export.py"]
    conversions = [
        [*export, job.repo, "--format", "gguf", "--target", job.target, "--out", "gguf/draft"],
        [*export, job.target, "--format", "gguf", "--dtype", "bfloat16", "--out", "gguf/target"],
    ]
    words = ["llama-server", "-m", "gguf/target/model.gguf", "-md", "gguf/draft/model.gguf"]
    words += ["--spec-type", LLAMACPP.method(job.family), "--spec-draft-n-max", str(job.k)]
    if job.template:
        words += ["--jinja", "--chat-template-kwargs", json.dumps(job.template)]
    words += LLAMACPP.methods[job.family].options
    heads = ", for targets whose hidden states it hands out: Llama, Qwen 3 and gpt-oss are among them, Qwen 2 is not"
    note = (
        f"of November 2026{heads if job.family != 'causal' else ''}. scripts/export.py, from a checkout of draftsmith, "
        "writes GGUF files of drafts, and of Llama and Qwen 2 targets; a GGUF of the target from elsewhere will do if "
        "its tokenizer is the same"
    )
    lines = [shlex.join(conversion) for conversion in conversions]
    text = "\n".join(["# once, in a checkout of draftsmith", *lines, ""])
    files = {"llamacpp.sh": text + _shell_script(job, words, pinned=False)}
    return EngineServingConfig("llama.cpp", note, files)


def tgi_config(job: ServedDraft) -> EngineServingConfig:
    """A command of TGI, which serves Medusa heads only."""
    if job.family not in TGI.methods:
        return EngineServingConfig("TGI", "speculates with Medusa heads or n-grams only", {})
    words = ["text-generation-launcher", "--model-id", job.repo, "--speculate", str(job.k)]
    note = (
        "reads the layout of Medusa's authors: write it first with "
        "scripts/export.py --format medusa-legacy and give its folder as --model-id"
    )
    return EngineServingConfig("TGI", note, {"tgi.sh": _shell_script(job, words, pinned=False)})


def transformers_config(job: ServedDraft) -> EngineServingConfig:
    """A Python script with assistant_model."""
    if job.family not in TRANSFORMERS.methods:
        return EngineServingConfig(
            "transformers", "assistant_model takes language models, not heads", {}
        )
    revision = f", revision={job.revision!r}" if job.revision else ""
    text = f'''"""Assisted generation with transformers, one prompt at a time."""

from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained({job.target!r}{revision})
tokenizer = AutoTokenizer.from_pretrained({job.target!r}{revision})
draft = AutoModelForCausalLM.from_pretrained({job.repo!r})
draft.generation_config.num_assistant_tokens = {job.k}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0.0
prompt = tokenizer("Speculative decoding is", return_tensors="pt")
output = target.generate(**prompt, assistant_model=draft, do_sample=False, max_new_tokens=64)
print(tokenizer.decode(output[0]))
'''
    return EngineServingConfig("transformers", "5; batch 1", {"transformers_assistant.py": text})


def choose_k(
    entries: Sequence[ReportEntry],
    facts: Mapping[str, Any],
    config: Mapping[str, Any],
    tuned: Sequence[ReportEntry] = (),
) -> tuple[int, str]:
    """(K to serve with, where it comes from): the tuned K, else that of the fastest measured chain, else that of the
    acceptance check in training. UserError if there is none of them.

    Compared are the draft's `entries` of task "all" in one setting, the lowest temperature and the smallest batch.
    `tuned` is the result of TunedReport.fastest_chains, in which this setting is the first.
    """
    if len(tuned) > 0:
        best = tuned[0]
        speedup = format_with_interval(best["speedup"], best["ci"], 2, "×")
        where = setting_title(best["temperature"], best["batch_size"])
        measured = f"{speedup} in rounds, {where}, n = {best['prompts']}"
        return best["k"], f"the fastest of {best['tried']} that eval/tune.py tried ({measured})"
    chains = [
        m
        for m in entries
        if m["task"] == "all" and m["tree"] is None and not m["lossy"] and m["speedup"] is not None
    ]
    if len(chains) > 0:
        setting = min((m["temperature"], m["batch_size"]) for m in chains)
        rivals = [m for m in chains if (m["temperature"], m["batch_size"]) == setting]
        best = max(rivals, key=lambda m: m["speedup"])
        tried = sorted({m["k"] for m in rivals})
        where = f"at temperature {setting[0]:g}, batch {setting[1]}"
        others = "the only one measured" if len(tried) == 1 else f"the fastest of {tried} measured"
        return best["k"], f"{others}, {where}"
    k = facts.get("training", {}).get("check", {}).get("k")
    if k is None:
        raise UserError(
            "neither report nor draftsmith.json says how many tokens to draft: give --report"
        )
    most = config.get("num_heads") or k  # Medusa drafts no more than it has heads
    return min(k, most), "no speed-up of a chain was measured; this is the recipe's"


def _shell_script(job: ServedDraft, words: Sequence[str], pinned: bool = True) -> str:
    """A shell script of one command, a flag a line; a comment names the revision if no flag does."""
    lines, line = [], ""
    for word in words:
        quoted = shlex.quote(word)
        if word.startswith("--") and line:
            lines.append(line)
            line = quoted
        else:
            line = f"{line} {quoted}".strip()
    body = " \\\n  ".join([*lines, line])
    note = (
        ""
        if pinned or not job.revision
        else f"# trained for revision {job.revision} of the target\n"
    )
    return f"{note}{body}\n"
