"""Attention on a CPU: two products in 16 bits, and the kernel of models in few bits, give what the fused one gives."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decode.model import attention
from decode.model.quantized.vnni import is_available

needs_vnni = pytest.mark.skipif(not is_available(), reason="needs AVX512-VNNI and a compiler")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_products_give_what_the_fused_kernel_gives(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a scale, a mask or a precision that the fused kernel does not have."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(4, 2, n, 16, dtype=dtype) for n in (6, 40, 40))
    mask = torch.rand(4, 1, 6, 40) < 0.3
    mask[..., 0] = True

    def attend(dtype: torch.dtype) -> Tensor:
        tensors = (x.to(dtype) for x in (query, key, value))
        return attention._masked_attention(*tensors, mask, 0.4, None, None).double()

    wanted = attend(torch.float32)
    errors = {}
    for name, slots in (("products", 4 * 40 - 1), ("fused", 4 * 40)):
        monkeypatch.setattr(attention, "LONG_CPU_KEYS", slots)
        assert attention._products_are_faster(key) is (name == "products")
        assert not attention._products_are_faster(key.float())
        errors[name] = float((attend(dtype) - wanted).abs().max())
    # scores and weights are rounded once to 16 bits, which the fused kernel keeps in fp32
    assert 0 < errors["products"] < 8 * torch.finfo(dtype).eps
    assert errors["products"] < 8 * errors["fused"]


@needs_vnni
@pytest.mark.parametrize("width", [64, 128])
@torch.inference_mode()
def test_a_query_s_bits_do_not_depend_on_the_others(width: int) -> None:
    """Catches texts in W8A8 that leave plain decoding's: a last bit makes a rounding of another value. 1 to 70
    queries, and buffers of 512 slots that have grown."""
    torch.manual_seed(0)
    query, (key, value) = torch.randn(1, 2, 70, width), torch.randn(2, 1, 2, 1536, width)
    for filled in (200, 500):
        mask = (torch.arange(1536) < filled).expand(1, 1, 70, -1)
        wanted = attention._masked_attention(query, key, value, mask, None, None, None)
        for count in range(1, 71):
            slots = 512 * (1 + count % 3)
            some = [x[:, :, :slots] for x in (key, value)]
            allow = mask[:, :, :count, :slots]
            found = attention._masked_attention(query[:, :, :count], *some, allow, None, None, None)
            assert torch.equal(found, wanted[:, :, :count]), (filled, count)


@needs_vnni
@pytest.mark.parametrize("width", [16, 48, 64, 128])
@torch.inference_mode()
def test_our_own_kernel_attends(width: int) -> None:
    """Against float64, for 1 to 20 queries of 2 rows with slots of their own. Bug: another token's mask for a query
    head, slots behind the last allowed one, a query whose bits depend on the others or on slots between its own."""
    torch.manual_seed(width)
    kernel = torch.ops.draftsmith.few_queries_attention
    key, value = torch.randn(2, 2, 2, 90, width)[:, :, :, :70]
    before = None
    for count in (1, 2, 5, 9, 20):
        query = torch.randn(2, 2, 3, 20, width, generator=torch.Generator().manual_seed(1))
        packed = query[:, :, :, :count].reshape(2, 2, 3 * count, width)
        allowed = torch.rand(2, 20, 70, generator=torch.Generator().manual_seed(2)) < 0.4
        allowed = allowed[:, :count]
        found = kernel(packed, key, value, allowed, 0.3)
        wanted = F.scaled_dot_product_attention(
            packed.double(),
            key.double(),
            value.double(),
            allowed[:, None].repeat(1, 1, 3, 1),
            scale=0.3,
        )
        torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-5)
        first = found.view(2, 2, 3, count, width)[:, :, :, 0]
        assert before is None or torch.equal(first, before)
        before = first
    mine = allowed[0, 0].nonzero()[:, 0]  # the same slots, one after the other
    alone = kernel(
        packed[:1, :, :1],
        key[:1, :, mine],
        value[:1, :, mine],
        torch.ones(1, 1, len(mine)).bool(),
        0.3,
    )
    assert torch.equal(alone[0, :, 0], first[0, :, 0])


@needs_vnni
@torch.inference_mode()
def test_our_own_kernel_shows_numbers_that_are_none() -> None:
    """Bug: NaN that the largest score or the exponential hides; a query without any slot that divides by 0."""
    kernel = torch.ops.draftsmith.few_queries_attention
    query, (key, value) = torch.randn(1, 1, 3, 16), torch.randn(2, 1, 1, 40, 16)
    query[0, 0, 0, 3] = torch.nan
    allowed = torch.ones(1, 3, 40, dtype=torch.bool)
    allowed[0, 1] = False
    found = kernel(query, key, value, allowed, 1.0)[0, 0]
    assert found[0].isnan().all()
    assert not found[1].any()
    assert found[2].isfinite().all()
    key[0, 0, 7, 2] = torch.nan
    assert kernel(query, key, value, allowed, 1.0)[0, 0, 2].isnan().all()
    allowed[0, 2, 7] = False
    assert kernel(query, key, value, allowed, 1.0)[0, 0, 2].isfinite().all()


class KeysOfProducts(TorchDispatchMode):
    """Records whether the keys that queries are multiplied by lie one behind the other in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.contiguous: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.bmm.default:
            self.contiguous.append(args[1].transpose(1, 2).is_contiguous())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "planted"])
def test_products_read_keys_of_a_part_of_the_slots_from_a_copy(
    planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a product with keys that lie apart, which takes up to 8 times as long (docs/log)."""
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "LONG_CPU_KEYS", 1)
    query = torch.randn(4, 2, 6, 16, dtype=torch.bfloat16)
    buffers = torch.randn(2, 4, 2, 64, 16, dtype=torch.bfloat16)
    key, value = buffers[:, :, :, :40]
    mask = torch.rand(4, 1, 6, 40) < 0.3
    mask[..., 0] = True
    wanted = attention._masked_attention(
        query, key.contiguous(), value.contiguous(), mask, None, None, None
    )
    if planted:
        monkeypatch.setattr(Tensor, "contiguous", lambda x: x)
    with KeysOfProducts() as seen:
        found = attention._masked_attention(query, key, value, mask, None, None, None)
    assert torch.equal(found, wanted)
    assert seen.contiguous[0] is not planted
