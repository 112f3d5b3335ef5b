"""Attention masks of training, said as functions of indices, and three ways to attend under them.

- masks: `AttentionMask` and the masks of texts and of heads' slots; dense ones, as short samples use them
- blocks: queries a block at a time over the keys that they see, in memory linear in the length
- flex: the same through torch's flex_attention, compiled on CUDA

masks <- blocks, flex; nothing else of decode is imported.
"""
