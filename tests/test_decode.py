"""Attention to a cache: lengths, pages, rows, left padding, splits, appending, latent heads."""

from __future__ import annotations

import pytest
import torch

from . import oracle
from .cases import AttentionCase, grid
from .check import HALF_ULP, Backend, assert_near, check, with_cases

DECODE = AttentionCase(rows=(1, 1, 1), keys=(300, 17, 129), heads=8, heads_kv=2)
TINY = AttentionCase(rows=(1, 1), keys=(70, 33), heads=4, heads_kv=2, head_dim=64)


@with_cases(
    grid(
        TINY,
        layout=("cache", "paged", "packed_paged"),
        rows=((1, 1), (3, 3)),
        dtype=("bfloat16", "float16", "float32"),
        slack=(0, 4),
    ),
    grid(DECODE, layout=("cache", "paged"), num_splits=(0, 1, 4), window_right=(-1, 0)),
    grid(TINY, layout=("cache",), cache_rows=(True,), slack=(0, 4), num_splits=(0, 3)),
    grid(
        TINY,
        keys=((70, 33), (40, 40)),
        layout=("cache", "paged"),
        leftpad=(True,),
        num_splits=(0, 3),
        window_right=(0,),
    ),
)
def test_cache(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(rows=(1, 1, 1), keys=(70, 5, 33), heads=4, heads_kv=2, layout="paged"),
        page_size=(1, 3, 16, 48, 64, 100, 256),
        rows=((1, 1, 1), (20, 20, 20)),
        window_right=(0,),
    ),
    grid(
        AttentionCase(rows=(100,), keys=(100,), layout="paged", head_dim=192, head_dim_v=128),
        page_size=(16,),
        window_right=(0,),
    ),
)
def test_pages(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(rows=(1, 3, 0, 2), keys=(0, 9, 5, 1), heads=4, heads_kv=2),
        layout=("cache", "paged", "packed_paged"),
        num_splits=(0, 4),
        sink=(False, True),
        window_right=(0,),
    )
)
def test_short_and_empty_sequences(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(rows=(3, 3), keys=(200, 131), heads=4, heads_kv=2, layout="paged"),
        num_splits=(2, 5, 64),
        sink=(False, True),
        window_left__window_right=[(-1, 0), (40, 0), (-1, -1)],
        pack_gqa=(0, 1),
    ),
    grid(
        AttentionCase(rows=(3, 3), keys=(200, 131), heads=4, heads_kv=2, layout="cache"),
        split_size=(16, 64, 100, 4096),
        softcap=(0.0, 10.0),
    ),
)
def test_splits(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(rows=(1,) * 9, keys=(300, 0, 17, 700, 64, 65, 1, 129, 300), heads=8),
        layout=("cache", "paged", "packed_paged"),
        heads_kv=(1, 2, 8),
        window_left__window_right=[(-1, -1), (100, 0)],
    ),
    grid(
        AttentionCase(rows=(2, 2), keys=(700, 690), heads=4, heads_kv=2, head_dim=64),
        layout=("cache", "paged"),
        keys=((700, 690), (70, 0)),
        slack=(0, 900),
    ),
    grid(
        AttentionCase(rows=(1,) * 40, keys=(900,) + (20,) * 39, heads=4, heads_kv=2, head_dim=64),
        layout=("cache", "paged"),
        keys=((900,) + (20,) * 39, (130,) * 40),
    ),
    grid(
        AttentionCase(rows=(4, 4, 4), keys=(300, 17, 129), heads=8, heads_kv=1),
        layout=("dense", "cache", "paged", "packed_paged"),
        head_dim=(64, 128, 256),
        sink=(False, True),
        window_right=(0,),
    ),
    grid(
        AttentionCase(rows=(5, 0, 40, 1), keys=(300, 17, 129, 2000), heads=6, heads_kv=2),
        layout=("packed_paged", "packed"),
        slack=(0, 4),
        window_right=(0,),
    ),
)
def test_keys_dealt_out(case: AttentionCase, backend: Backend) -> None:
    """Lengths that leave tiles whole, cut once and cut often; rows of one tile and of several."""
    check(case, backend)


@pytest.mark.parametrize("split_size", [64, 256])
@pytest.mark.parametrize("paged", [False, True])
def test_a_fixed_split_size_is_batch_invariant(
    backend: Backend, split_size: int, paged: bool
) -> None:
    """A sequence gets the same bits alone, in a batch, beside longer ones and in a larger cache."""
    page, lengths = 64, (700, 65, 1000, 700)
    case = AttentionCase(head_dim=64)
    device = backend.device
    capacity = 1024
    q = torch.randn(4, 1, 8, 64, device=device, dtype=torch.bfloat16)
    k = torch.randn(4, capacity, 2, 64, device=device, dtype=torch.bfloat16)
    v = torch.randn_like(k)
    used = torch.tensor(lengths, device=device, dtype=torch.int32)

    def call(rows: slice, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache = [t[rows, :room] for t in (k, v)]
        table: dict[str, torch.Tensor] = {}
        if paged:
            batch = cache[0].shape[0]
            pages = torch.arange(batch * room // page, device=device, dtype=torch.int32)
            table["block_table"] = pages.view(batch, -1)
            cache = [t.reshape(-1, page, *t.shape[2:]) for t in cache]
        out, lse = backend.call(
            case, "fwd", q[rows], *cache, seqused_k=used[rows], split_size=split_size, **table
        )
        return out, lse

    together = call(slice(0, 4), capacity)
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        for alone in (call(one, capacity), call(one, -(-length // page) * page)):
            assert all(torch.equal(a, t[one]) for a, t in zip(alone, together, strict=True))


@with_cases(
    grid(
        AttentionCase(rows=(2, 2), keys=(90, 33), heads=8, heads_kv=1, head_dim=64, qv=True),
        head_dim_v=(64, 128, 512),
        layout=("dense", "paged"),
        window_right=(0,),
    ),
    grid(AttentionCase(rows=(1,), keys=(65,), heads=16, heads_kv=1, head_dim=576, head_dim_v=512)),
)
def test_latent(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(rows=(4, 4), keys=(90, 33), heads=4, layout="paged", window_right=0),
        alibi=("", "batch"),
        softcap=(0.0, 8.0),
        window_left=(-1, 20),
        chunk=(0, 32),
        sink=(False, True),
    )
)
def test_features(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


# ---- combine -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 2, 3, 17, 64])
def test_combine(splits: int, dtype: torch.dtype | None, backend: Backend) -> None:
    """Parts without keys count for nothing, even if their output is NaN."""
    out = torch.randn(splits, 2, 5, 3, 72)
    lse = torch.randn(splits, 2, 3, 5) * 5.0
    lse[torch.rand_like(lse) < 0.3] = -torch.inf
    lse[:, 1, 2, 4] = -torch.inf
    out[(lse == -torch.inf).transpose(2, 3)] = float("nan")
    out, lse = out.to(backend.device), lse.to(backend.device)
    got = backend.call(AttentionCase(), "combine", out, lse, dtype)
    want_out, want_lse = oracle.combine(out, lse)
    assert got[0].dtype == (dtype or torch.float32)
    floor = HALF_ULP[got[0].dtype]
    assert_near("out", got[0], want_out, want_out.to(got[0].dtype), floor)
    assert_near("lse", got[1], want_lse, want_lse.float(), HALF_ULP[torch.float32])
    assert (got[0][1, 4, 2] == 0.0).all()


# ---- append --------------------------------------------------------------------------------------


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotary embedding of one row (heads, head_dim) in complex numbers, float64."""
    half = cos.shape[0]
    turn = torch.complex(cos.double(), sin.double())
    part, rest = x[:, : 2 * half].double(), x[:, 2 * half :].double()
    pairs = part.view(-1, half, 2) if interleaved else part.view(-1, 2, half).transpose(1, 2)
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = product if interleaved else product.transpose(1, 2)
    return torch.cat((turned.reshape(part.shape), rest), dim=1)


@pytest.mark.parametrize("layout", ["cache", "rows", "paged"])
@pytest.mark.parametrize(
    ("rotary_dim", "interleaved"), [(0, True), (32, True), (32, False), (64, False)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_append(
    layout: str, rotary_dim: int, interleaved: bool, dtype: torch.dtype, backend: Backend
) -> None:
    if dtype == torch.float32 and not backend.is_engine:
        pytest.skip("kernels take 16-bit caches")
    lengths, new, heads, page = [0, 13, 30], 5, 2, 16
    k, v = (torch.randn(3, new, heads, dim).to(dtype) for dim in (64, 72))
    shape = (9, page) if layout == "paged" else (5, 40)
    caches = [torch.full((*shape, heads, dim), float("nan"), dtype=dtype) for dim in (64, 72)]
    table = torch.tensor([[7, 2, 4], [0, 8, 3], [5, 6, 1]], dtype=torch.int32)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    cos, sin = (
        torch.randn(64, rotary_dim // 2).to(dtype),
        torch.randn(64, rotary_dim // 2).to(dtype),
    )
    want_k, want_v = (c.double() for c in caches)
    for b, length in enumerate(lengths):
        for t in range(new):
            at = length + t
            slot = int(rows[b]) if layout == "rows" else b
            place = (int(table[b, at // page]), at % page) if layout == "paged" else (slot, at)
            if rotary_dim:
                want_k[place] = rotated(k[b, t], cos[at], sin[at], interleaved)
            else:
                want_k[place] = k[b, t].double()
            want_v[place] = v[b, t].double()
    if layout == "cache":
        caches = [c[:3] for c in caches]
        want_k, want_v = want_k[:3], want_v[:3]
    device = backend.device
    got_k, got_v = (c.to(device) for c in caches)
    options = {
        "block_table": table.to(device) if layout == "paged" else None,
        "cache_batch_idx": rows.to(device) if layout == "rows" else None,
    }
    if rotary_dim:
        options.update(rotary_cos=cos.to(device), rotary_sin=sin.to(device))
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    backend.call(
        AttentionCase(), "kv_append_", got_k, got_v, k.to(device), v.to(device), seqlens,
        rotary_interleaved=interleaved, **options,
    )  # fmt: skip
    for name, got, want in (("k", got_k.cpu(), want_k), ("v", got_v.cpu(), want_v)):
        untouched = torch.isnan(want)
        assert torch.equal(torch.isnan(got), untouched), f"{name}: wrong places written"
        error = (got.double() - want)[~untouched].abs().max()
        exact = name == "v" or rotary_dim == 0
        top = float(want[~untouched].abs().max())
        assert error <= (0.0 if exact else 2.0 * HALF_ULP[dtype] * top), f"{name}: {error}"


def test_steps_of_decoding_equal_attention_at_once(backend: Backend) -> None:
    """Prefill, then token by token through the cache, against one causal call."""
    device, case = backend.device, AttentionCase()
    total, prefill = 40, 33
    q, k, v = (torch.randn(2, total, h, 64, device=device).bfloat16() for h in (4, 2, 2))
    whole, whole_lse = backend.call(case, "fwd", q, k, v, window_right=0)
    k_cache = torch.full((2, 48, 2, 64), float("nan"), dtype=k.dtype, device=device)
    v_cache = k_cache.clone()
    done = 0
    for count in (prefill, *[1] * (total - prefill)):
        part = slice(done, done + count)
        before = torch.full((2,), done, dtype=torch.int32, device=device)
        backend.call(case, "kv_append_", k_cache, v_cache, k[:, part], v[:, part], before)
        out, lse = backend.call(
            case, "fwd", q[:, part], k_cache, v_cache, seqused_k=before + count, window_right=0
        )
        assert torch.allclose(out.float(), whole[:, part].float(), atol=2e-2)
        assert torch.allclose(lse, whole_lse[:, :, part], atol=5e-4)
        done += count
