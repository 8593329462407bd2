"""Gradients of so few keys that the query heads of a KV head are dealt out to several tasks."""

from __future__ import annotations

from .cases import AttentionCase, grid
from .check import Backend, check, with_cases

FEW = AttentionCase(grads=True, rows=(40, 9), keys=(130, 20), heads=4, heads_kv=1, slack=5)


@with_cases(
    grid(
        FEW,
        heads__head_dim=[(8, 64), (4, 128)],
        layout=("dense", "packed"),
        window_right=(-1, 0),
        deterministic=(False, True),
    ),
    grid(FEW, wanted=range(1, 8)),
    grid(FEW, heads__heads_kv=[(6, 2), (7, 1)], strides=("head_major",), dtype=("float16",)),
)
def test_dealt_out_heads(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)
