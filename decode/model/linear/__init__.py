"""Linear layers as decoding multiplies by them on a CPU.

compiled_products  products that inductor's code calls or generates
fused_products     layers that read the same tensor, multiplied as one
packed_linear      `PackedLinear` with copies of its weight for few and for many rows; `patch_linear_layers`
int8_weights       weights in eight bits

May import decode.common.
"""
