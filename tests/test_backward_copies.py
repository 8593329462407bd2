"""Deterministic gradients where thread blocks walk several KV blocks, each with a copy of dq."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .cases import AttentionCase, build, grid
from .check import Backend, check, with_cases

# Enough keys for several blocks of 128. An emulated device of 4 SMs gives 2 heads a copy for each
# block of keys, 4 heads two copies of dq, and 8 heads one.
COPIES = AttentionCase(grads=True, deterministic=True, rows=(70,), keys=(400,), slack=5)
ONE = replace(COPIES, rows=(20,), heads=8, heads_kv=8)
TWO = replace(COPIES, rows=(39,), heads=4, heads_kv=4)
SHAPES = grid(COPIES) + grid(TWO) + grid(ONE)


def masked(case: AttentionCase) -> list[AttentionCase]:
    """Masks that leave some copies of a tile without a contribution."""
    square = replace(case, rows=(150,), keys=(180,))
    tall = replace(case, rows=(200,), keys=(135,))
    return [
        *grid(square, window_right=(-1, 0), window_left=(-1, 20)),
        *grid(tall, window_right=(0,), heads_kv=(1, 2)),
        *grid(square, chunk=(50,), window_right=(0,)),
    ]


@with_cases(
    grid(COPIES, head_dim=(64, 128), window_right=(-1, 0), dtype=("float16", "bfloat16")),
    grid(COPIES, heads_kv=(1,), window_right=(0,), wanted=range(1, 8)),
    grid(TWO, heads_kv=(2, 4), window_right=(-1, 0)),
    grid(ONE, heads_kv=(2, 8), window_right=(-1, 0)),
    grid(COPIES, layout=("packed",), window_right=(-1, 0)),
    masked(COPIES),
)
def test_gradients(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("window_right", [-1, 0])
def test_equal_bits(case: AttentionCase, window_right: int, backend: Backend) -> None:
    case = replace(case, window_right=window_right, slack=0)
    inputs = build(case, backend.device)
    out, lse = backend.call(case, "fwd", **inputs.kw)
    q, k, v = (inputs.kw[n] for n in "qkv")
    runs = [
        backend.call(
            case, "bwd", inputs.dout, None, q, k, v, out, lse,
            window_right=window_right, deterministic=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for other in runs[1:]:
        for a, b in zip(runs[0][:3], other[:3], strict=True):
            assert torch.equal(a, b)
