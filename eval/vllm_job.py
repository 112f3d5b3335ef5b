"""Runs inside an environment that has vLLM, never in ours: decodes prompts one at a time and prints JSON.

Reads {target, dtype, speculative (or null), prompts, stops, max_new_tokens, max_model_len, eos, temperature, top_k,
top_p, seed, eager} from stdin. Imports nothing of draftsmith.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROUNDS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def main() -> None:
    job = json.load(sys.stdin)
    import vllm

    llm = vllm.LLM(
        job["target"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        enforce_eager=job["eager"],
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=job["speculative"],
        seed=job["seed"],
    )

    def decode(prompt: list, stop: list) -> list:
        sampling = vllm.SamplingParams(
            temperature=job["temperature"],
            top_k=job["top_k"] or -1,
            top_p=job["top_p"],
            max_tokens=job["max_new_tokens"],
            stop_token_ids=job["eos"],
            stop=stop or None,
            ignore_eos=True,  # ours are in stop_token_ids
            seed=job["seed"],
        )
        out = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return list(out[0].outputs[0].token_ids)

    decode(job["prompts"][0], job["stops"][0])  # warm-up
    answers, before = [], counters(llm)
    for prompt, stop in zip(job["prompts"], job["stops"], strict=True):
        start = time.perf_counter()
        ids = decode(prompt, stop)
        seconds = time.perf_counter() - start
        after = counters(llm)
        rounds, accepted = (after[name] - before[name] for name in (ROUNDS, ACCEPTED))
        if job["speculative"] is None:
            rounds, accepted = len(ids) - 1, 0
        answers.append({"ids": ids, "seconds": seconds, "rounds": rounds, "accepted": accepted})
        before = after
    sys.stdout.write(json.dumps({"vllm": vllm.__version__, "answers": answers}) + "\n")


def counters(llm) -> dict:
    """{name: number}, counted since the engine began."""
    seen = {metric.name: vars(metric).get("value") for metric in llm.get_metrics()}
    return {name: seen.get(name) or 0 for name in (ROUNDS, ACCEPTED)}


if __name__ == "__main__":
    main()
