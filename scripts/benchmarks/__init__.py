"""Speed and memory, measured: of decoding, of sampling, of training, and on a GPU.

decoder_bench.py   command: this decoder beside transformers' own and vLLM's, milliseconds a token
floor.py           command: what a step of the target could take at best on this machine, and what it takes; also
                   sampling, a pass of features and a training step. floors/ has what it times
train_bench.py     command: training throughput of every draft family, and where a step's time goes
prompts_bench.py   command: memory and time of a million prompts around the engine of train/sample.py
sample_bench.py    command: sampling throughput on a CPU beside transformers' and vLLM's
sampling_engines.py  the engines that it compares;  vllm_sampler.py  runs in vLLM's environment
gpu_bench.py       command: everything about speed that needs a GPU, in stages
gpu_stages.py      its stages;  gpu_harness.py  the models and rounds they time;  gpu_timers.py  clocks and rooflines
widen_llama.py     enlarges a small Llama to the shape of a large one without changing its probabilities

May import decode, eval and train.
"""
