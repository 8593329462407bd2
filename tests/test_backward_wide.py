"""Gradients with head dims above 128, whose kernels may differ from those of the narrow ones."""

from __future__ import annotations

from .cases import AttentionCase, grid
from .check import Backend, check, with_cases

DIMS = [(256, 256), (192, 192), (192, 128), (200, 136), (136, 192), (168, 64)]
WIDE = AttentionCase(grads=True, dlse=True, rows=(65,), keys=(120,), heads=1, heads_kv=1)
GROUP = AttentionCase(
    grads=True, dlse=True, rows=(65,), keys=(70,), heads=3, heads_kv=1, window_right=0
)
PACKED = AttentionCase(
    grads=True, layout="packed", rows=(65, 0, 20), keys=(70, 33, 0), heads=2, heads_kv=1, slack=3
)


@with_cases(
    grid(WIDE, head_dim__head_dim_v=DIMS, window_right=(-1, 0), dtype=("bfloat16", "float16")),
    grid(
        AttentionCase(grads=True, heads=1, heads_kv=1, head_dim=256),
        rows__keys=[((1,), (1,)), ((64,), (128,)), ((129,), (64,)), ((63,), (193,)), ((20,), (0,))],
        window_right=(-1, 0),
    ),
)
def test_lengths(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(grid(GROUP, head_dim__head_dim_v=DIMS[:3], deterministic=(False, True), sink=(True,)))
def test_grouped_heads(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(WIDE, head_dim=(192, 256), softcap=(2.0,), window_right=(-1, 0)),
    grid(WIDE, head_dim=(192, 256), alibi=("head",), window_right=(-1, 0)),
    grid(WIDE, head_dim__head_dim_v=DIMS[:3], bias=("bhqk", "111k"), alibi=("", "head")),
    grid(GROUP, head_dim=(256,), bias=("bhqk", "1h1k", "11qk"), deterministic=(False, True)),
    grid(WIDE, head_dim=(256,), window_left=(20,), window_right=(5,)),
    grid(WIDE, head_dim=(256,), chunk=(50,), window_right=(0,)),
    grid(WIDE, head_dim=(256,), scale=(-0.2,)),
)
def test_scores(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(PACKED, head_dim__head_dim_v=DIMS[:3], window_right=(-1, 0)),
    grid(
        AttentionCase(grads=True, rows=(20, 33, 0), keys=(64, 0, 7), heads=1, heads_kv=1, slack=5),
        head_dim=(192, 256),
    ),
)
def test_packed_and_used_lengths(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(WIDE, head_dim=(256,), wanted=range(8)),
    grid(WIDE, head_dim=(256,), strides=("sliced", "head_major", "shared_heads")),
)
def test_wanted_and_strides(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)
