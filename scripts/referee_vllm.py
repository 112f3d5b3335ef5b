"""Runs inside an environment that has vLLM, never in ours: decodes prompts and prints what was accepted, as JSON.

Reads {jobs: [{target, speculative, prompts, max_new_tokens, max_model_len}, …]} from stdin and prints a line for each:
{vllm, prompts} or {error}. One prompt at a time, so that counts are known for each. Imports nothing of draftsmith.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
)  # the engine in this process: its errors are ours

COUNTERS = {
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
            print(json.dumps(attempt(vllm, job)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            print(
                json.dumps({"error": f"the engine's process ended with status {status}"}),
                flush=True,
            )


def attempt(vllm, job: dict) -> dict:
    try:
        return {"vllm": vllm.__version__, "prompts": decode(vllm, job)}
    except Exception as error:  # whatever vLLM has against this draft is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def decode(vllm, job: dict) -> list:
    llm = vllm.LLM(
        job["target"],
        dtype="float32",
        max_model_len=job["max_model_len"],
        max_num_seqs=1,  # what is never used need not be warmed up
        max_num_batched_tokens=job["max_model_len"],
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=job["speculative"],
        seed=0,
    )
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=job["max_new_tokens"], ignore_eos=True
    )
    before = counters(llm)
    found = []
    for prompt in job["prompts"]:
        out = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        after = counters(llm)
        found.append(
            {"output_ids": list(out[0].outputs[0].token_ids)}
            | {name: minus(after[name], before[name]) for name in COUNTERS}
        )
        before = after
    return found


def counters(llm) -> dict:
    """{our name: number or list of numbers}, counted since the engine began."""
    seen = {}
    for metric in llm.get_metrics():
        fields = vars(metric)
        seen[metric.name] = fields["value"] if "value" in fields else fields.get("values")
    return {name: seen.get(theirs, 0) for name, theirs in COUNTERS.items()}


def minus(after, before):
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]
    return after - before


if __name__ == "__main__":
    main()
