"""Runs inside an environment that has vLLM, never in ours: decodes prompts one at a time and prints JSON.

Reads {jobs: [...]} from stdin, each made by eval/vllm_engine.job, which says what is in it. Prints a line for each job:
{vllm: version, repaired: [...], answers: [{ids, seconds, rounds, drafted, accepted, by_position}, one a prompt]} or
{error}; `ids` holds an answer for each of the prompt's seeds, which are decoded together. The engine runs in the
process that asks, so its errors are ours and no seconds go to messages between processes. Imports nothing of
draftsmith.
"""

import json
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


def main() -> None:
    jobs = json.load(sys.stdin)["jobs"]
    import vllm  # once for all of them: it takes longer than most jobs

    for job in jobs:
        child = os.fork()  # an engine leaves much behind, and a damaged draft may end its process
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
        llm = build_llm(vllm, job)
        repaired = patch_sampler() if job["repair"] else []
        return {
            "vllm": vllm.__version__,
            "repaired": repaired,
            "answers": decode_prompts(vllm, llm, job),
        }
    except Exception as error:  # whatever vLLM has against this job is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def build_llm(vllm, job: dict):
    rows = max(map(len, job["seeds"]))
    return vllm.LLM(
        job["target"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=rows,  # what is never used need not be warmed up or captured
        max_num_batched_tokens=rows * job["max_model_len"],
        enforce_eager=job["eager"],
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=job["speculative"],
        seed=0,
    )


def patch_sampler() -> list:
    """Mends what is known to be broken in vLLM's sampling, once there is an engine; the names of what was.

    The CPU build of 0.32 is to give each drafted token its request's temperature, and writes it to a copy: the target's
    logits are then divided by whatever the memory held (vLLM's #42638 describes the same symptom).
    """
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
        out = llm.generate([{"prompt_token_ids": prompt}] * len(seeds), sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in out]

    requests = list(zip(job["prompts"], job["stops"], job["seeds"], strict=True))
    decode(*requests[0])  # warm-up
    found, before = [], read_counters(llm)
    for request in requests:
        start = time.perf_counter()
        ids = decode(*request)
        seconds = time.perf_counter() - start
        after = read_counters(llm)
        counts = {name: subtract(after[name], before[name]) for name in VLLM_METRICS}
        if job["speculative"] is None:
            counts["rounds"] = sum(len(one) - 1 for one in ids)
        found.append({"ids": ids, "seconds": seconds, **counts})
        before = after
    return found


def read_counters(llm) -> dict:
    """{our name: number or list of numbers}, counted since the engine began."""
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
