"""Gradients of more heads than a card computes at a time: early ones prepare for later ones."""

from __future__ import annotations

from .cases import AttentionCase, grid
from .check import Backend, check, with_cases

# Several times as many (sequence, head) pairs as an emulated device of 4 SMs takes at a time, and
# as a large card.
FEW = AttentionCase(grads=True, dlse=True, rows=(70,) * 3, keys=(90,) * 3, heads=6, heads_kv=6)
WIDE = AttentionCase(grads=True, rows=(70,) * 2, keys=(25,) * 2, heads=4, heads_kv=4)
# Tasks of one to four steps follow each other, some of them ragged.
SHORT = AttentionCase(grads=True, rows=(200,) * 2, keys=(300,) * 2, heads=3, heads_kv=3)
RAGGED = AttentionCase(
    grads=True,
    layout="packed",
    rows=(70, 1, 65, 5, 33, 129),
    keys=(130, 3, 129, 7, 140, 64),
    heads=1,
    heads_kv=1,
    slack=3,
)
MANY = AttentionCase(grads=True, rows=(40,) * 4, keys=(45,) * 4, heads=160, heads_kv=160)


@with_cases(
    grid(FEW, head_dim=(64, 128), window_right=(-1, 0), deterministic=(False, True)),
    grid(FEW, head_dim=(64, 128), heads_kv=(3,), window_right=(0,)),
    grid(FEW, head_dim=(192, 256), heads_kv=(3, 6), window_right=(0,)),
    grid(SHORT, head_dim=(64, 96, 128), window_right=(-1, 0)),
    grid(RAGGED, head_dim=(64, 96, 128), window_right=(-1, 0)),
    grid(WIDE, head_dim=(192, 256), window_right=(-1, 0), deterministic=(False, True)),
    grid(MANY, head_dim=(64, 128), window_right=(-1, 0), deterministic=(False, True)),
)
def test_many_heads(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)
