"""In place of torch's scaled dot product attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_cuda.compat import sdpa

needs_registry = pytest.mark.skipif(not sdpa.registered, reason="this torch has no registry")


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def qkv(*batch: int, heads_kv: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = ((*batch, 4, 6, 16), (*batch, heads_kv, 9, 16), (*batch, heads_kv, 9, 24))
    return [rand(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def check(tensors: list[Tensor], *args: Any, **kwargs: Any) -> None:
    """Output and gradients are those of torch's math path."""
    extra = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.requires_grad]
    leaves = [*tensors, *extra]
    with sdpa_kernel(SDPBackend.MATH):
        want = F.scaled_dot_product_attention(*tensors, *args, **kwargs)
        dout = torch.randn_like(want)
        wanted = torch.autograd.grad(want, leaves, dout)
    own = sdpa.scaled_dot_product_attention(*tensors, *args, **kwargs)
    torch.testing.assert_close(own, want)
    torch.testing.assert_close(torch.autograd.grad(own, leaves, dout), wanted)


@pytest.mark.parametrize("batch", [(2,), (), (2, 3)])
def test_batches(batch: tuple[int, ...]) -> None:
    check(qkv(*batch))
    check(qkv(*batch), is_causal=True)


def test_causal_is_top_left_and_scale_is_passed_on() -> None:
    check(qkv(2), None, 0.0, True, scale=0.3)


def test_grouped_heads() -> None:
    check(qkv(2, heads_kv=2), is_causal=True, enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        sdpa.scaled_dot_product_attention(*qkv(2, heads_kv=2))


@pytest.mark.parametrize(
    "shape", [(6, 9), (2, 1, 6, 9), (2, 4, 6, 9), (1, 9), (2, 1, 1, 9), (6, 1)]
)
@pytest.mark.parametrize("kind", ["bool", "float", "learned"])
def test_masks(shape: tuple[int, ...], kind: str) -> None:
    if kind == "bool":
        mask = torch.rand(shape) > 0.3
        mask[..., :1] = True  # torch's math path has its own idea of rows without keys
    else:
        mask = rand(*shape).requires_grad_(kind == "learned")
    check(qkv(2), mask)


def test_a_mask_in_five_dimensions() -> None:
    check(qkv(2, 3), torch.rand(2, 1, 1, 6, 9) > 0.3)


def test_two_dimensions() -> None:
    q, k, v = rand(6, 16), rand(9, 16), rand(9, 24)
    own = sdpa.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(own, F.scaled_dot_product_attention(q, k, v))


def test_rows_without_keys_give_zeros() -> None:
    mask = torch.zeros(6, 9, dtype=torch.bool)
    mask[1:] = True
    out = sdpa.scaled_dot_product_attention(*qkv(2), mask)
    assert not out[:, :, 0].any()
    assert torch.isfinite(out).all()


def test_mask_and_causal_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="is_causal"):
        sdpa.scaled_dot_product_attention(*qkv(2), torch.zeros(6, 9), is_causal=True)


def test_dropout() -> None:
    q, k, v = qkv(2)
    torch.manual_seed(1)
    one = sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(one, sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.5))


# ---- the kernels behind torch's own function -----------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_aten_kernels(is_causal: bool) -> None:
    """Called as torch's dispatcher would, head-major and in q's memory layout."""
    for transposed in (False, True):
        q, k, v = (rand(2, 4, 8, 16) for _ in range(3))
        if transposed:
            q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        leaves = [t.requires_grad_() for t in (q, k, v)]
        want = F.scaled_dot_product_attention(*leaves, is_causal=is_causal)
        dout = torch.randn_like(want)
        with torch.no_grad():
            out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = sdpa._sdpa_forward(
                q, k, v, 0.0, is_causal
            )
            grads = sdpa._sdpa_backward(
                dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, is_causal, seed, offset
            )
        assert out.stride() == torch.empty_like(q).stride()
        assert seed.dtype == torch.uint64
        torch.testing.assert_close(out, want.detach())
        torch.testing.assert_close(grads, torch.autograd.grad(want, leaves, dout))


def test_aten_kernels_draw_and_hand_on_the_dropout_mask() -> None:
    q, k, v = (rand(2, 4, 8, 16) for _ in range(3))
    out, lse, _, _, n, m, seed, offset, _ = sdpa._sdpa_forward(q, k, v, 0.5)
    dout = torch.randn_like(out)
    _, _, dv = sdpa._sdpa_backward(
        dout, q, k, v, out, lse, None, None, n, m, 0.5, False, seed, offset
    )
    torch.testing.assert_close((out * dout).sum(), (v * dv).sum())


def test_aten_packed_kernel() -> None:
    q, cu = rand(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    out, lse, *_ = sdpa._flash_forward(q, q, q, cu, cu, 4, 4, 0.0, True, False)
    one = F.scaled_dot_product_attention(*[q[None, 3:].transpose(1, 2)] * 3, is_causal=True)
    torch.testing.assert_close(out[None, 3:], one.transpose(1, 2))
    assert lse.shape == (4, 7)
    into = torch.empty_like(q)
    sdpa._flash_forward_inplace(into, q, q, q, cu, cu, 4, 4, 0.0, True, False)
    assert torch.equal(into, out)


@pytest.fixture
def activated() -> Iterator[None]:
    torch.nn.attention.activate_flash_attention_impl(sdpa.IMPLEMENTATION)
    yield
    torch.nn.attention.restore_flash_attention_impl()


@needs_registry
def test_importing_activates_nothing() -> None:
    assert sdpa.IMPLEMENTATION in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() != sdpa.IMPLEMENTATION


@needs_registry
@pytest.mark.filterwarnings("ignore:.*")
def test_activation_registers_the_kernels(activated: None) -> None:
    assert torch.nn.attention.current_flash_attention_impl() == sdpa.IMPLEMENTATION
    for name in sdpa._ATEN_KERNELS:
        if hasattr(torch.ops.aten, name):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")


@needs_registry
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*")
def test_torch_calls_flash_cuda(activated: None) -> None:
    """Zero code change: torch's own function, on a GPU."""
    q, k, v = (
        torch.randn(2, 4, 65, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for _ in range(3)
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    own = sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(out, own)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


@pytest.mark.parametrize("ranks", [(3, 4, 4), (4, 3, 3), (3, 3, 5), (2, 2, 2)])
def test_the_batch_may_come_from_any_of_the_three(ranks: tuple[int, int, int]) -> None:
    sizes = ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8))
    q, k, v = (
        torch.randn(s[5 - n :], dtype=torch.float64) for s, n in zip(sizes, ranks, strict=True)
    )
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    out = sdpa.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, want)
