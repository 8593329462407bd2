"""torch.vmap over the ops: as one call for each element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_cuda
from tests.tensors import HK, B, D, H, S, T, int32, rand

OPS = torch.ops.flash_cuda
N = 3


def stack_of(call: Callable[..., Any], in_dims: tuple[int | None, ...], *args: Tensor) -> Any:
    """What vmap should give, one element at a time."""
    results = [
        call(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
        for i in range(N)
    ]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return torch.stack(results)


def batched(*shape: int) -> Tensor:
    return rand(N, *shape)


VMAPPED: dict[str, tuple[Callable[..., Any], tuple[int | None, ...], tuple[Tensor, ...]]] = {
    "all": (
        lambda q, k, v: flash_cuda.attention(q, k, v, causal=True, return_lse=True),
        (0, 0, 0),
        (batched(B, S, H, D), batched(B, T, HK, D), batched(B, T, HK, D)),
    ),
    "some": (
        lambda q, k, v: flash_cuda.attention(q, k, v, return_lse=True),
        (2, None, 1),
        (
            batched(B, S, H, D).movedim(0, 2),
            rand(B, T, HK, D),
            batched(B, T, HK, D).movedim(0, 1),
        ),
    ),
    "bias and slopes": (
        lambda q, k, bias, slopes: flash_cuda.attention(q, k, k, bias=bias, alibi_slopes=slopes),
        (0, None, 0, 0),
        (
            batched(B, S, H, D),
            rand(B, T, HK, D),
            batched(1, H, S, T),
            torch.rand(N, H, dtype=torch.float64),
        ),
    ),
    "one bias for all": (
        lambda q, k, bias: flash_cuda.attention(q, k, k, bias=bias),
        (0, 0, None),
        (batched(B, S, H, D), batched(B, T, HK, D), rand(B, 1, S, T)),
    ),
    "sink": (
        lambda q, k, sink: flash_cuda.attention(q, k, k, sink=sink),
        (0, None, 0),
        (batched(B, S, H, D), rand(B, T, HK, D), batched(H)),
    ),
    "packed": (
        lambda q, k: flash_cuda.attention_varlen(
            q, k, k, cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7)
        ),
        (0, 0),
        (batched(S, H, D), batched(T, HK, D)),
    ),
    "combine": (
        lambda out, lse: OPS.combine(out, lse),
        (0, None),
        (torch.randn(N, 4, B, S, H, D), torch.randn(4, B, H, S)),
    ),
}


@pytest.mark.parametrize("name", list(VMAPPED))
def test_vmap(name: str) -> None:
    call, in_dims, args = VMAPPED[name]
    torch.testing.assert_close(
        torch.vmap(call, in_dims=in_dims)(*args), stack_of(call, in_dims, *args)
    )


def test_vmap_of_grad() -> None:
    """Gradients for each sample, with a bias that all share."""
    args = (batched(B, S, H, D), batched(B, T, HK, D), batched(B, T, HK, D))
    bias = rand(1, H, S, T)

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flash_cuda.attention(q, k, v, bias=bias, deterministic=True).square().sum()

    call = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    in_dims = (0, 0, 0, None)
    torch.testing.assert_close(
        torch.vmap(call, in_dims=in_dims)(*args, bias), stack_of(call, in_dims, *args, bias)
    )


def test_vmap_with_dropout() -> None:
    q, k, v = batched(B, S, H, D), rand(B, T, HK, D), rand(B, T, HK, D)

    def call(q: Tensor) -> Tensor:
        return flash_cuda.attention(q, k, v, dropout_p=0.5)

    q = q[:1].expand(N, -1, -1, -1, -1)
    same = torch.vmap(call, randomness="same")(q)
    different = torch.vmap(call, randomness="different")(q)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(call)(q)


def test_vmap_kv_append() -> None:
    caches = [batched(B, 16, HK, D), batched(B, 16, HK, D)]
    alone = [c.clone() for c in caches]
    k, v = batched(B, 3, HK, D), rand(B, 3, HK, D)

    def call(k_cache: Tensor, v_cache: Tensor, k: Tensor) -> Tensor:
        OPS.kv_append_(k_cache, v_cache, k, v, int32(1, 13))
        return k_cache.sum()

    torch.vmap(call)(*caches, k)
    for i in range(N):
        call(alone[0][i], alone[1][i], k[i])
    assert torch.equal(caches[0], alone[0])
    assert torch.equal(caches[1], alone[1])
    with pytest.raises(ValueError, match="k_cache"):
        torch.vmap(call, in_dims=(None, None, 0))(caches[0][0], caches[1][0], k)
