"""Samples answers with vLLM. Runs in vLLM's environment and imports nothing of ours.

The first line of stdin is a job, of which sampling_engines.VllmSampler lists the fields; the answer {vllm: version,
threads, cache_tokens} says that its engine is ready. Every further line {prompts, max_new_tokens} is answered by
{ids: [for each prompt], seconds}. A line {error} ends the process, and so does the end of stdin. The engine runs in
this process, so that its errors can be reported and its number of threads can be set.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    try:
        job = json.loads(sys.stdin.readline())
        import torch
        import vllm

        llm = build_llm(vllm, job)
        cache = llm.llm_engine.vllm_config.cache_config
        tokens = cache.num_gpu_blocks * cache.block_size
        write_line(
            {
                "vllm": vllm.__version__,
                "threads": torch.get_num_threads(),
                "cache_tokens": tokens,
            }
        )
        for line in sys.stdin:
            write_line(answer(vllm, llm, job, json.loads(line)))
    except Exception as error:  # any error of vLLM is the answer
        write_line({"error": f"{type(error).__name__}: {error}"})


def write_line(line: dict) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def build_llm(vllm, job: dict):
    return vllm.LLM(
        job["target"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["rows"],
        enforce_eager=job["eager"],
        enable_prefix_caching=False,  # each turn has the same prompts
        generation_config="vllm",  # nothing but what answer() asks for
        seed=job["seed"],
    )


def answer(vllm, llm, job: dict, asked: dict) -> dict:
    sampling = vllm.SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=asked["max_new_tokens"],
        stop_token_ids=job["eos"],
        ignore_eos=True,  # ours are in stop_token_ids
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    start = time.perf_counter()
    out = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    return {"ids": [list(one.outputs[0].token_ids) for one in out], "seconds": seconds}


if __name__ == "__main__":
    main()
