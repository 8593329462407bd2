"""flash_attn_with_kvcache: appending, rotation, pages, and what it needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_cuda
from flash_cuda.rotary import apply_rotary
from tests.tensors import HK, B, D, H, int32, rand, same

# ---- the cache call ------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool) -> Tensor:
    """(rows, heads, dim) turned pair by pair, as complex numbers."""
    half = cos.shape[1]
    turned, out = x.clone(), x.clone()
    for row in range(x.shape[0]):
        c, s = cos[first + row], sin[first + row]
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            out[row, :, a] = turned[row, :, a] * c[i] - turned[row, :, b] * s[i]
            out[row, :, b] = turned[row, :, a] * s[i] + turned[row, :, b] * c[i]
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("leftpad", [False, True])
def test_kvcache_appends_rotates_and_attends(paged: bool, interleaved: bool, leftpad: bool) -> None:
    if paged and leftpad:
        pytest.skip("pages start at their first key")
    new, capacity, lengths, pads = 3, 16, [2, 7], [0, 0]
    q, k, v = rand(B, new, H, D), rand(B, new, HK, D), rand(B, new, HK, D)
    cos, sin = rand(capacity, 4), rand(capacity, 4)
    caches = [rand(B, capacity, HK, D), rand(B, capacity, HK, D)]
    before = [c.clone() for c in caches]
    options: dict[str, Any] = {}
    if leftpad:
        pads = [1, 3]
        options["cache_leftpad"] = int32(*pads)
    if paged:
        order = torch.tensor([3, 0, 6, 5, 1, 7, 2, 4])
        options["block_table"] = order.argsort().to(torch.int32).view(B, 4)
        given = [c.view(8, 4, HK, D)[order].contiguous() for c in caches]
    else:
        given = caches
    out, lse = flash_cuda.flash_attn_with_kvcache(
        q, *given, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=int32(*lengths),
        causal=True, rotary_interleaved=interleaved, return_softmax_lse=True, **options,
    )  # fmt: skip
    for b, (n, pad) in enumerate(zip(lengths, pads, strict=True)):
        keys, values = before[0][b].clone(), before[1][b].clone()
        keys[n : n + new] = rotated(k[b], cos, sin, n - pad, interleaved)
        values[n : n + new] = v[b]
        held = given
        if paged:
            pages = options["block_table"][b].long()
            held = [c[pages].flatten(0, 1)[None].expand(B, -1, -1, -1) for c in given]
        same(held[0][b], keys)
        same(held[1][b], values)
        turned = rotated(q[b], cos, sin, n - pad, interleaved)
        end = n + new
        want = flash_cuda.attention(
            turned[None], keys[None, pad:end], values[None, pad:end], causal=True, return_lse=True
        )
        same((out[b : b + 1], lse[b : b + 1]), want)


def test_kvcache_turns_all_queries_alike_without_a_mask() -> None:
    q, k, v = rand(1, 3, H, D), rand(1, 3, HK, D), rand(1, 3, HK, D)
    cos, sin = rand(16, 4), rand(16, 4)
    caches = (rand(1, 16, HK, D), rand(1, 16, HK, D))
    out = flash_cuda.flash_attn_with_kvcache(
        q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=5
    )
    turned = torch.cat([rotated(q[0, i : i + 1], cos, sin, 5, True) for i in range(3)])
    same(out, flash_cuda.attention(turned[None], caches[0][:, :8], caches[1][:, :8]))


def test_kvcache_with_rows_of_a_larger_cache() -> None:
    q, k, v = rand(B, 1, H, D), rand(B, 1, HK, D), rand(B, 1, HK, D)
    caches = [rand(5, 8, HK, D), rand(5, 8, HK, D)]
    rows = int32(4, 1)
    out = flash_cuda.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=int32(3, 6), cache_batch_idx=rows
    )
    same(caches[0][4, 3], k[0, 0])
    same(caches[1][1, 6], v[1, 0])
    want = flash_cuda.attention(q[:1], caches[0][4:5, :4], caches[1][4:5, :4])
    same(out[:1], want)


@pytest.mark.parametrize("length", [6, int32(2, 6)])
def test_kvcache_without_room(length: Any) -> None:
    q, k = rand(B, 3, H, D), rand(B, 3, HK, D)
    cache = rand(B, 8, HK, D)
    before = cache.clone()
    with pytest.raises(ValueError, match="cache"):
        flash_cuda.flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=length)
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("cache_seqlens", {"k": rand(B, 1, HK, D), "v": rand(B, 1, HK, D)}),
        ("together", {"k": rand(B, 1, HK, D), "cache_seqlens": 1}),
        ("together", {"rotary_cos": rand(8, 4), "cache_seqlens": 1}),
        ("rotary_cos", {"rotary_cos": rand(8, 4), "rotary_sin": rand(8, 4), "cache_seqlens": 1}),
    ],
)
def test_kvcache_arguments_that_need_each_other(text: str, options: dict[str, Any]) -> None:
    cache = rand(B, 8, HK, D)
    with pytest.raises(ValueError, match=text):
        flash_cuda.flash_attn_with_kvcache(rand(B, 1, H, D), cache, cache.clone(), **options)


def test_rotary() -> None:
    x, angle = rand(2, 5, H, D), rand(9, 6)
    positions = torch.arange(5).expand(2, 5)
    for interleaved in (True, False):
        y = apply_rotary(x, angle.cos(), angle.sin(), positions=positions, interleaved=interleaved)
        same(y[0], rotated(x[0], angle.cos(), angle.sin(), 0, interleaved))
        same(y.norm(dim=-1), x.norm(dim=-1))
    low = apply_rotary(x.bfloat16(), angle.cos(), angle.sin(), positions=positions)
    assert low.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="rotary_dim"):
        apply_rotary(x, rand(9, 9), rand(9, 9), positions=positions)
    with pytest.raises(ValueError, match="rotary_cos"):
        apply_rotary(x, rand(9, 4), rand(9, 3), positions=positions)
