"""Forward attention on dense tensors: lengths, head sizes, heads, layouts, scales, extremes."""

from __future__ import annotations

import pytest
import torch

from .cases import AttentionCase, each, grid
from .check import Backend, check, with_cases

ALL_DTYPES = ("bfloat16", "float16", "float32", "float64")
CAUSAL = {"window_right": (-1, 0)}
# Both sides of the edges of tiles of 16, 32, 48, 64, 80, 128 and 256.
LENGTHS = [
    ((1,), (1,)), ((1,), (257,)), ((15,), (17,)), ((33,), (31,)), ((63,), (65,)), ((64,), (64,)),
    ((65,), (63,)), ((79,), (81,)), ((128,), (128,)), ((127,), (129,)), ((129,), (127,)),
    ((200,), (40,)), ((17,), (300,)), ((257,), (255,)),
]  # fmt: skip
EMPTY = [((0,), (5,)), ((5,), (0,)), ((0,), (0,)), ((), ()), ((0, 0), (7, 7)), ((3, 3), (0, 0))]
HEAD_DIMS = [(d, 0) for d in (8, 16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)]
HEAD_DIMS_V = [(192, 128), (128, 64), (64, 128), (32, 256), (72, 40), (576, 512)]


@with_cases(
    grid(AttentionCase(rows=(64,), keys=(64,)), dtype=ALL_DTYPES, **CAUSAL),
    grid(rows__keys=LENGTHS, dtype=("bfloat16", "float32"), **CAUSAL),
    grid(AttentionCase(top_left=True), rows__keys=LENGTHS[4:12], window_right=(-1, 0)),
)
def test_lengths(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(grid(rows__keys=EMPTY, dtype=("bfloat16", "float32"), sink=(False, True), **CAUSAL))
def test_empty(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(rows=(70,), keys=(90,)),
        head_dim__head_dim_v=HEAD_DIMS,
        dtype=("bfloat16", "float16"),
    ),
    grid(AttentionCase(rows=(33,), keys=(70,), window_right=0), head_dim__head_dim_v=HEAD_DIMS_V),
    grid(AttentionCase(dtype="float32", rows=(9,), keys=(50,)), head_dim=(1, 3, 46, 65, 320)),
)
def test_head_dims(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(rows=(40, 40), keys=(75, 75), head_dim=32, window_right=0),
        heads__heads_kv=[(4, 1), (4, 2), (6, 2), (7, 1), (5, 5), (14, 2)],
        pack_gqa=(-1, 0, 1),
    ),
    grid(
        AttentionCase(rows=(1,) * 5, keys=(66,) * 5, head_dim=32), heads__heads_kv=[(8, 1), (8, 2)]
    ),
)
def test_grouped_heads(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(rows=(33, 33), keys=(66, 66), heads=4, heads_kv=2),
        strides=("sliced", "head_major", "shared_heads"),
        dtype=("bfloat16", "float32"),
    )
)
def test_strides(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(AttentionCase(rows=(65,), keys=(130,)), scale=(0.0, -0.2, 0.5, 2.0), **CAUSAL),
    # The softmax of a row is all but one-hot, or, without a scale, far from the dtype's middle.
    grid(
        AttentionCase(rows=(65,), keys=(130,), window_right=0),
        spread=(20.0, 200.0, 0.01),
        dtype=("bfloat16", "float32"),
    ),
)
def test_scales(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(AttentionCase(rows=(20, 33, 0, 1), keys=(64, 0, 7, 33), slack=5), dtype=ALL_DTYPES)
)
def test_used_lengths(case: AttentionCase, backend: Backend) -> None:
    """Dense tensors of which each sequence uses a part; the rest is NaN and stays unseen."""
    check(case, backend)


@with_cases(
    each(
        [
            AttentionCase(rows=(300,), keys=(700,), heads=3, heads_kv=1, window_right=0),
            AttentionCase(rows=(300, 300), keys=(520, 520), heads=16, heads_kv=16, head_dim=16),
            AttentionCase(rows=(600,), keys=(600,), dtype="float32", window_right=0),
            AttentionCase(rows=(2, 1), keys=(3000, 1023), heads=4, heads_kv=2, dtype="float16"),
        ],
        tiles=None,
    )
)
def test_default_tiles(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


def test_very_negative_scores_behind_a_mask(backend: Backend) -> None:
    """Scores near -200 in rows whose first tile of keys is masked must not vanish against 0."""
    device = backend.device
    q = torch.full((1, 40, 2, 64), 5.0, dtype=torch.bfloat16, device=device)
    k = torch.full((1, 200, 2, 64), -5.0, dtype=torch.bfloat16, device=device)
    v = torch.randn(1, 200, 2, 64, device=device).bfloat16()
    case = AttentionCase()
    out, lse = backend.call(case, "fwd", q, k, v, window_left=20, window_right=0)
    position = torch.arange(40, device=device) + 160
    assert torch.allclose(lse[0, 0], -200.0 + torch.tensor(21.0).log().to(device), atol=1e-3)
    for i, p in enumerate(position.tolist()):
        mean = v[0, p - 20 : p + 1].float().mean(0)
        assert torch.allclose(out[0, i].float(), mean, atol=0.01)


@with_cases(
    grid(
        AttentionCase(rows=(150,) * 14, keys=(130,) * 14, heads=10, heads_kv=5, head_dim=128),
        dtype=("bfloat16", "float16"),
    ),
    # On four emulated SMs.
    grid(AttentionCase(rows=(150,), keys=(70,), heads=3, heads_kv=1, head_dim=128, spread=8.0)),
)
def test_rows_that_fill_several_rounds(case: AttentionCase, backend: Backend) -> None:
    """As many tiles as it takes for the taller ones of head dim 128 to pay."""
    check(case, backend)


@with_cases(
    # Head dim 64 has tiles of 256 rows, 128 of 128 and 192. On four emulated SMs.
    grid(AttentionCase(rows=(60,), keys=(70,), heads=3, heads_kv=1), head_dim=(64, 128), **CAUSAL),
    grid(AttentionCase(rows=(130,), keys=(140,)), window_right=(-1, 0), window_left=(-1, 20)),
    grid(AttentionCase(rows=(260,), keys=(50,), heads=4)),
    grid(AttentionCase(rows=(560,), keys=(20,), heads=4)),
    grid(AttentionCase(rows=(60,), keys=(40,), heads=9, heads_kv=3, head_dim=128, spread=8.0)),
    grid(AttentionCase(rows=(270,), keys=(30,), heads=4, head_dim=128)),
    # On a device.
    grid(
        AttentionCase(rows=(270,) * 40, keys=(300,) * 40, heads=4, head_dim=128, spread=8.0),
        dtype=("bfloat16", "float16"),
        **CAUSAL,
    ),
    grid(AttentionCase(rows=(1030,) * 9, keys=(1040,) * 9, heads=8, head_dim=128), **CAUSAL),
)
def test_tiles_with_room_for_more_rows(case: AttentionCase, backend: Backend) -> None:
    """Warpgroups that have no rows in a tile, but in the tiles before and after it."""
    check(case, backend)


@with_cases(
    # On the SMs of a device; tests/emulator/test_kernels.py has others.
    grid(
        AttentionCase(rows=(200,) * 9, keys=(1030,) * 9, heads=8, heads_kv=8, head_dim=256),
        dtype=("bfloat16", "float16"),
    ),
    grid(
        AttentionCase(
            rows=(130,) * 6, keys=(4100,) * 6, heads=12, heads_kv=6, head_dim=232, window_right=0
        )
    ),
    grid(
        AttentionCase(rows=(200,) * 9, keys=(2050,) * 9, heads=8, heads_kv=8, head_dim=192),
        head_dim_v=(128, 192),
    ),
    # Tiles of 192 rows: as many for each head as make pairs, or an odd number in pairs of heads.
    grid(
        AttentionCase(rows=(768,) * 9, keys=(1030,) * 9, heads=8, heads_kv=8, head_dim=128),
        dtype=("bfloat16", "float16"),
    ),
    grid(AttentionCase(rows=(1000,) * 9, keys=(1030,) * 9, heads=8, heads_kv=8, head_dim=128)),
    grid(
        AttentionCase(
            rows=(400,) * 9, keys=(1030,) * 9, heads=8, heads_kv=4, head_dim=128, spread=8.0
        )
    ),
    grid(
        AttentionCase(
            rows=(400,) * 14, keys=(4100,) * 14, heads=12, heads_kv=6, head_dim=128, window_right=0
        ),
        window_left=(-1, 4095),
    ),
    grid(
        AttentionCase(
            rows=(700,) * 9, keys=(8200,) * 9, heads=12, heads_kv=12, head_dim=128, window_right=0
        ),
        spread=(1.0, 8.0),
    ),
)
def test_pairs_of_blocks(case: AttentionCase, backend: Backend) -> None:
    """Keys and tiles enough for pairs of Hopper blocks that share K and V: neighbours, heads."""
    check(case, backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equal_inputs_give_equal_bits(dtype: torch.dtype, backend: Backend) -> None:
    q, k, v = (torch.randn(2, 77, 4, 64).to(dtype).to(backend.device) for _ in range(3))
    first = backend.call(AttentionCase(), "fwd", q, k, v, window_right=0)
    again = backend.call(AttentionCase(), "fwd", q, k, v, window_right=0)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_nan_in_an_input_is_not_hidden(backend: Backend) -> None:
    """Padding may be NaN; what counts may not be, and then the result says so."""
    q, k, v = (
        torch.randn(1, 33, 2, 64, dtype=torch.bfloat16, device=backend.device) for _ in "qkv"
    )
    q[0, 7, 1, 3] = float("nan")
    out, _ = backend.call(AttentionCase(), "fwd", q, k, v)
    assert torch.isnan(out[0, 7, 1]).all()
    assert not torch.isnan(out[0, 8:]).any()
