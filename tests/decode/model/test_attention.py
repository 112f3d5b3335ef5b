"""Attention on a CPU: in 16 bits two products give what the fused kernel gives, but for rounding."""

import pytest
import torch

from decode.model import attention


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

    def attend(dtype: torch.dtype) -> torch.Tensor:
        tensors = (x.to(dtype) for x in (query, key, value))
        return attention._masked_attention(*tensors, mask, 0.4, None, None).double()

    wanted = attend(torch.float32)
    errors = {}
    for name, slots in (("products", 4 * 40), ("fused", 4 * 40 + 1)):
        monkeypatch.setattr(attention, "LONG_CPU_KEYS", slots)
        assert attention._products_are_faster(key) is (name == "products")
        assert not attention._products_are_faster(key.float())
        errors[name] = float((attend(dtype) - wanted).abs().max())
    # scores and weights are rounded once to 16 bits, which the fused kernel keeps in fp32
    assert 0 < errors["products"] < 8 * torch.finfo(dtype).eps
    assert errors["products"] < 8 * errors["fused"]
