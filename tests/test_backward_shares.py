"""Gradients whose last round of tasks all thread blocks share, in pieces of several tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .cases import AttentionCase, build, grid
from .check import Backend, check, with_cases

# More tasks of 128 keys than an emulated device of 4 SMs takes at a time, or fewer than a card
# does; 17 steps a task and more.
LONG = AttentionCase(grads=True, rows=(1050,), keys=(300,), heads=2, heads_kv=2)
LONGER = AttentionCase(grads=True, rows=(2100,), keys=(300,), heads=2, heads_kv=2)
# A task over: in a fixed order its pieces have rows of their own, and follow each other.
ONE_OVER = AttentionCase(grads=True, rows=(2100,), keys=(600,), heads=1, heads_kv=1)
FEW = AttentionCase(grads=True, rows=(3100,), keys=(300,), heads=4, heads_kv=2)
# Wide heads, whose tasks two SMs share: three for two clusters.
WIDE = AttentionCase(grads=True, rows=(1050,), keys=(300,), heads=1, heads_kv=1)
ONE = replace(WIDE, keys=(15,))


@with_cases(
    grid(LONG, head_dim=(80, 128), deterministic=(False, True)),
    grid(LONG, head_dim=(128,), heads_kv=(1,), dlse=(True,), dtype=("float16",)),
    grid(LONGER, head_dim=(64,), wanted=(1, 6, 7)),
    grid(ONE_OVER, head_dim=(64, 80, 128), deterministic=(True,)),
    grid(FEW, head_dim=(64, 128), deterministic=(True,)),
    grid(ONE, head_dim=(192, 256)),
    grid(WIDE, head_dim=(192, 256), deterministic=(False, True)),
    grid(WIDE, head_dim=(192,), head_dim_v=(128,), heads=(3,), dlse=(True,), wanted=(1, 3, 6, 7)),
)
def test_shared_tasks(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@pytest.mark.parametrize(
    "case",
    grid(replace(ONE_OVER, deterministic=True), head_dim=(64, 80, 128, 192, 256), heads=(1, 3)),
    ids=str,
)
def test_equal_bits(case: AttentionCase, backend: Backend) -> None:
    """The pieces of a task are added in their order, whoever is done last."""
    inputs = build(case, backend.device)
    out, lse = backend.call(case, "fwd", **inputs.kw)
    q, k, v = (inputs.kw[n] for n in "qkv")
    runs = [
        backend.call(case, "bwd", inputs.dout, None, q, k, v, out, lse, deterministic=True)
        for _ in range(4)
    ]
    for other in runs[1:]:
        for a, b in zip(runs[0][:3], other[:3], strict=True):
            assert torch.equal(a, b)
