"""Runs inside an environment that has vLLM, never in ours: decodes prompts and prints what was accepted, as JSON.

Reads {target, speculative, prompts, max_new_tokens, max_model_len} from stdin; one prompt at a time, so that counts are
known for each. Imports nothing of draftsmith.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

COUNTERS = {
    "rounds": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "by_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


def main() -> None:
    job = json.load(sys.stdin)
    import vllm

    llm = vllm.LLM(
        job["target"],
        dtype="float32",
        max_model_len=job["max_model_len"],
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
    print(json.dumps({"vllm": vllm.__version__, "prompts": found}))


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
