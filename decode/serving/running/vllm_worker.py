"""Decodes prompts with vLLM, one at a time, and prints JSON. Runs in vLLM's environment and imports nothing of ours.

Reads {jobs: [...]} from stdin; vllm_client.build_job makes a job and documents its fields. Prints a line for each job:
{vllm: version, ran: {...}, repaired: [...], answers: [{ids, seconds, first_token_seconds, rounds, drafted, accepted,
by_position} for each prompt]} or {error}; `ran` are its `device_settings`, `ids` holds an answer for each of the
prompt's seeds, which are decoded together. The engine runs in the same process, so its errors can be reported and no
time goes to messages between processes.
"""

import json
import math
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

VLLM_METRICS = {
    "rounds": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "by_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


SHARE_OF_FREE = 0.9
"""Of a GPU's free memory; the rest is for what its kernels allocate beside its own plan."""


def main() -> None:
    jobs = json.load(sys.stdin)["jobs"]
    import vllm  # once for all of them: it takes longer than most jobs

    for job in jobs:
        # An engine does not free all memory, and a damaged draft may end its process.
        child = os.fork()
        if child == 0:
            write_line(run_job(vllm, job))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            write_line({"error": f"the engine's process ended with status {status}"})


def write_line(answer: dict) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def run_job(vllm, job: dict) -> dict:
    try:
        device = device_settings(job)
        llm = build_llm(vllm, job, device)
        repaired = patch_sampler() if job["repair"] else []
        answers = decode_prompts(vllm, llm, job)
        return {"vllm": vllm.__version__, "ran": device, "repaired": repaired, "answers": answers}
    except Exception as error:  # any error of vLLM is the job's result
        return {"error": f"{type(error).__name__}: {error}"}


def device_settings(job: dict) -> dict:
    """What vLLM is told of the device. On a GPU it has its CUDA graphs whatever our mode is, and a share of what is
    free there: beside our models its own default, 0.9 of the whole memory, would not start."""
    import torch

    if not torch.cuda.is_available():
        return {"enforce_eager": job["eager"]}
    free, total = torch.cuda.mem_get_info()
    share = math.floor(100 * SHARE_OF_FREE * free / total) / 100
    return {"enforce_eager": False, "gpu_memory_utilization": share}


def build_llm(vllm, job: dict, device: dict):
    rows = max(map(len, job["seeds"]))
    return vllm.LLM(
        job["target"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=rows,  # larger batches need not be warmed up or captured
        max_num_batched_tokens=rows * job["max_model_len"],
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=job["speculative"],
        generation_config="vllm",  # nothing but what decode_prompts() asks for
        seed=0,
        **device,
    )


def patch_sampler() -> list:
    """Replaces a broken function of vLLM's sampler, after an engine was built; returns the names of replaced functions.
    The CPU build of 0.32 should give each drafted token its request's temperature, and writes it to a copy: the
    target's logits are then divided by uninitialised memory (vLLM's #42638 describes the same symptom)."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    def expand(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        each = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(each.long())

    name, asked = "expand_batch_to_tokens", (torch.full((1,), 0.625), torch.tensor([3]).int(), 3)
    if not current_platform.is_cpu() or not hasattr(rejection_sampler, name):
        return []
    if torch.equal(getattr(rejection_sampler, name)(*asked), expand(*asked)):
        return []
    setattr(rejection_sampler, name, expand)
    return [name]


def decode_prompts(vllm, llm, job: dict) -> list:
    def decode(prompt: list, stop: list, seeds: list) -> list:
        sampling = [
            vllm.SamplingParams(
                temperature=job["temperature"],
                top_k=job["top_k"] or -1,
                top_p=job["top_p"],
                max_tokens=job["max_new_tokens"],
                stop_token_ids=job["eos"],
                stop=stop or None,
                ignore_eos=True,  # ours are in stop_token_ids
                seed=seed,
            )
            for seed in seeds
        ]
        return llm.generate([{"prompt_token_ids": prompt}] * len(seeds), sampling, use_tqdm=False)

    requests = list(zip(job["prompts"], job["stops"], job["seeds"], strict=True))
    decode(*requests[0])  # warm-up
    answers, before = [], read_counters(llm)
    for request in requests:
        start = time.perf_counter()
        out = decode(*request)
        seconds = time.perf_counter() - start
        ids = [list(one.outputs[0].token_ids) for one in out]
        first = max(one.metrics.first_token_latency for one in out)
        after = read_counters(llm)
        counts = {name: subtract(after[name], before[name]) for name in VLLM_METRICS}
        if job["speculative"] is None:
            counts["rounds"] = sum(len(one) - 1 for one in ids)
        times = {"seconds": seconds, "first_token_seconds": first}
        answers.append({"ids": ids, **times, **counts})
        before = after
    return answers


def read_counters(llm) -> dict:
    """{name in VLLM_METRICS: number or list of numbers}, counted since the engine was built."""
    seen = {}
    for metric in llm.get_metrics():
        fields = vars(metric)
        seen[metric.name] = fields["value"] if "value" in fields else fields.get("values")
    return {name: seen.get(theirs, 0) for name, theirs in VLLM_METRICS.items()}


def subtract(after, before):
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]
    return after - before


if __name__ == "__main__":
    main()
