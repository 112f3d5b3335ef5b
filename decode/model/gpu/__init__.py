"""A layer in few kernels on a GPU; no GPU has run any of it (docs/gpu_checks.md):

- cuda_operations: steps of a layer that are one kernel each, as operations of torch
- step_blocks: how much a program holds, by the shared memory of the card
- split_kv_attention, layer_kernels: their Triton kernels: attention of a step; norm, RoPE, writes to the buffers
- cuda_layers: the layers of a loaded model that run them, and products of one tensor as one
- kernel_choice: whether they run: each is compared with torch's way when a model is loaded
"""
