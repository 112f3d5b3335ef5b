"""The training loop and what it needs around each step.

    settings.py         DistillConfig, the settings of train/distill.py
    loop.py             optimiser steps over global batches, gradient accumulation, logging, saving
    checkpoint.py       atomic checkpoints with checksums; resuming
    muon.py             Muon, its matrices shared between processes
    tracking.py         metrics.jsonl and Weights & Biases, TensorBoard or Trackio
    throughput.py       tokens per second, MFU, memory
    collective.py       errors, values and the output folder across ranks
    launch.py           Accelerate is started, as settings and launcher say together
    sharding.py         FSDP2 and DeepSpeed: limits, what is not the launcher's choice, gathering the whole draft
    on_policy.py        training rows that the draft generates itself
    acceptance_eval.py  τ and α of the draft during training
    draft_metadata.py   draftsmith.json of a trained draft

May import decode, eval, train.settings, train.data, train.losses, train.teacher and train.families.
"""
