"""How many slots buffers hold, and how many rows a GPU has memory for beside the weights: their K/V, their logits, and
a prefill's activations.

No GPU has run this yet (docs/gpu_checks.md): tests put free memory in place, and count what passes without data hold.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from decode.common import damage
from decode.model.kv_cache import StaticKVCache
from decode.model.runner import PREFILL_CHUNK

SHARE = 0.9
"""Of the free bytes; the rest is for what kernels, CUDA graphs and the allocator take for themselves."""
PREFILL_TOKENS = 8192
"""Prompt tokens that are prefilled together on a GPU, padding included; a longer prompt alone."""
BUCKET = 128
"""KV buffers that grow with the rows hold a multiple of this many slots a row, as many as the longest row needs."""
BUCKET_OF_ONE = 512
"""The same for one row: keys that the CPU's attention kernel reads at once. Results are the same bits for all
multiples, so that plain and speculative decoding of a text agree although one of them has grown its buffers."""


def free_bytes(device: torch.device, caches: Sequence[StaticKVCache]) -> int:
    """Bytes of a GPU that torch does not use yet, those of the `caches`, which may be replaced, among them."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused + sum(x.slots.rows * x.row_bytes(x.slots.size) for x in unique(caches))


def unique(caches: Sequence[StaticKVCache]) -> list[StaticKVCache]:
    """Each cache once: some drafts write into the target's."""
    return list({id(cache): cache for cache in caches}.values())


def cache_bytes(caches: Sequence[StaticKVCache], slots: int) -> int:
    """Bytes of a row of `slots` slots in all caches: the target's, in which something was written, and the draft's.

    One in which nothing was yet is taken to have layers as wide as the target's: heads do, small models have less.
    """
    target, *others = unique(caches)
    row = target.row_bytes(slots)
    written = max(1, sum(layer.is_initialized for layer in target.kv_layers))
    return row + sum(x.row_bytes(slots) or len(x.kv_layers) * row // written for x in others)


def prompts_together(longest: int) -> int:
    """Prompts of up to `longest` tokens that are prefilled together on a GPU."""
    return max(1, PREFILL_TOKENS // longest)


def prefill_bytes(config: Any, rows: int, longest: int, slots: int, itemsize: int) -> int:
    """Bytes of the widest layer's activations while prompts of `longest` tokens are prefilled, at most; `config` is the
    text config. Beside what the MLP makes (a token's experts one after the other) and the residual stream, which norms
    take in fp32, it is the mask of later pieces of a prompt, which has a value for each query and slot."""
    sizes = config.to_dict()
    hidden, heads = config.hidden_size, config.num_attention_heads
    found = sizes.get("intermediate_size") or 4 * hidden
    wide = max(found) if isinstance(found, list) else found
    chosen = sizes.get("num_experts_per_tok") or 0
    wide = max(wide, chosen * ((sizes.get("moe_intermediate_size") or wide) + hidden))
    together = min(rows, prompts_together(longest))
    read = together * longest  # a draft reads whole prompts
    passed = together * min(longest, PREFILL_CHUNK)
    groups = heads // (sizes.get("num_key_value_heads") or heads)
    mask = passed * groups * slots * (1 + itemsize) if longest > PREFILL_CHUNK else 0
    return itemsize * (passed * (4 * wide + 8 * hidden) + read * 4 * hidden) + mask


def fitting_rows(
    asked: int, free: int, needed: Callable[[int], int], slots: Callable[[int], int]
) -> int:
    """The most rows, of those that are `asked`, whose `needed` bytes are within SHARE of the `free` ones; 1 at least,
    which then ends as a full GPU does. A warning if they are fewer; `slots` are those of a row."""
    room = SHARE * free
    rows = next((n for n in range(asked, 1, -1) if needed(n) <= room), 1)
    if rows < asked:
        damage.warn_once(
            f"{asked} rows of {slots(asked):,} tokens need {needed(asked) / 1e9:.1f} GB, and the GPU has "
            f"{free / 1e9:.1f} GB free: {rows} are decoded together (batch_size, max_new_tokens)"
        )
    return rows


def bucket(rows: int) -> int:
    """Slots of which buffers of `rows` rows hold a multiple."""
    return BUCKET_OF_ONE if rows == 1 else BUCKET


def round_up_to_bucket(size: int, rows: int) -> int:
    return -(-size // bucket(rows)) * bucket(rows)
