"""Masks: causal, windows, chunks, both corners, and every row that ends up without keys."""

from __future__ import annotations

import pytest
import torch

from .cases import AttentionCase, grid
from .check import Backend, check, with_cases

LENGTHS = [((70,), (70,)), ((40,), (130,)), ((130,), (40,)), ((129,), (32,)), ((1,), (99,))]
WINDOWS = [(0, 0), (3, 0), (0, 3), (16, 16), (-1, 5), (5, -1), (63, 0), (200, 200), (64, 1)]
NARROW = AttentionCase(head_dim=32, grads=True)


@with_cases(
    grid(NARROW, rows__keys=LENGTHS, window_left__window_right=WINDOWS),
    grid(
        AttentionCase(head_dim=32, dtype="float32", top_left=True, grads=True),
        rows__keys=LENGTHS,
        window_left__window_right=WINDOWS[:6],
    ),
    grid(  # the last rows see no key
        AttentionCase(rows=(300,), keys=(100,), top_left=True, sink=True),
        window_left__window_right=[(20, 0), (5, 40), (250, 0)],
    ),
)
def test_window(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(rows=(300, 300), keys=(500, 500), heads=4, heads_kv=2, sink=True),
        head_dim=(64, 96, 128, 192, 256),
        window_left__window_right=[(100, 0), (64, 200)],
        layout=("dense", "packed"),
    )
)
def test_window_of_several_tiles(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        NARROW,
        rows__keys=LENGTHS,
        chunk=(1, 16, 33, 500),
        window_left__window_right=[(-1, -1), (-1, 0), (7, 0)],
    ),
    grid(
        AttentionCase(head_dim=32, top_left=True, layout="packed", grads=True),
        rows__keys=[((70, 0, 31), (90, 5, 20))],
        chunk=(16, 50),
        window_right=(-1, 0),
    ),
)
def test_chunk(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(head_dim=32, grads=True, dlse=True, rows=(100,), keys=(30,)),
        window_left__window_right=[(-1, 0), (10, 20), (5, 0)],
        sink=(False, True),
        dtype=("bfloat16", "float32"),
    )
)
def test_rows_without_keys(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 0), (2, 4), (-1, 1), (1, -1)])
def test_window_ends_are_inclusive(left: int, right: int, backend: Backend) -> None:
    """With equal scores and one-hot values the output spells out which keys a row sees."""
    n, m = 9, 12
    q = torch.zeros(1, n, 1, 16, dtype=torch.float16, device=backend.device)
    k = torch.zeros(1, m, 1, 16, dtype=torch.float16, device=backend.device)
    v = torch.eye(m, 16, dtype=torch.float16, device=backend.device)[None, :, None]
    case = AttentionCase()
    out, lse = backend.call(case, "fwd", q, k, v, window_left=left, window_right=right)
    for i in range(n):
        position = i + m - n
        first = 0 if left == -1 else max(position - left, 0)
        last = m - 1 if right == -1 else min(position + right, m - 1)
        seen = [float(first <= j <= last) for j in range(m)]
        expected = torch.tensor(seen, device=out.device) / sum(seen)
        assert torch.allclose(out[0, i, 0, :m].float(), expected, atol=1e-3)
        assert abs(lse[0, 0, i].item() - torch.tensor(sum(seen)).log().item()) < 1e-3
