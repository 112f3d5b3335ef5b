"""Quantised checkpoints (GPTQ, AWQ, FP8, compressed-tensors): plain weights of them, in a cached folder.

- formats: the arithmetic of each format, as functions of its tensors
- checkpoints: which form a folder has, and the folder with its weights in float32

It imports decode.common only.
"""
