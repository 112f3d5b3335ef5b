"""Speed and memory, measured: of decoding, of sampling and of training.

floor.py           command: what a step of the target could take at best on this machine, and what it takes; also
                   sampling, a pass of features and a training step. floors/ has what it times
train_bench.py     command: training throughput of every draft family, and where a step's time goes
sample_bench.py    command: sampling throughput on a CPU beside transformers'
sampling_engines.py  the engines that it compares

May import decode, eval and train.
"""
