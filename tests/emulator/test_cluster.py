"""Clusters and tensor copies: peers, multicast, swizzles, zero fill, reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from .library import Failure, aligned, load

POLICIES = ("eager", "lazy", "random")
WAYS = ("st.async", "bulk copy", "remote store")


@pytest.fixture(scope="module")
def kernels() -> Any:
    return load("cluster")


@pytest.mark.parametrize("race", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", range(3), ids=WAYS)
def test_peer(kernels: Any, how: int, policy: str, race: int) -> None:
    for seed in (1, 2):
        kernels.configure(policy, seed, race=race)
        data, out = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
        kernels.peer(data, out, how, 0)
        assert (out == np.roll(data, 64)).all()


def test_peer_barrier_used_before_its_initialisation(kernels: Any) -> None:
    reports = []
    for seed in range(1, 9):
        kernels.configure("random", seed)
        try:
            kernels.peer(np.arange(128, dtype=np.int32), np.zeros(128, np.int32), 2, 1)
        except Failure as e:
            reports.append(str(e))
    assert any("mbarrier that was not initialised" in r for r in reports), reports


def test_peer_copy_without_proxy_fence(kernels: Any) -> None:
    kernels.configure()
    with pytest.raises(Failure, match=r"without a fence\.proxy\.async"):
        kernels.peer(np.arange(128, dtype=np.int32), np.zeros(128, np.int32), 1, 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_multicast(kernels: Any, policy: str) -> None:
    kernels.configure(policy)
    data = aligned((10, 32), np.int32)
    data[:] = np.arange(320).reshape(10, 32) + 1
    out = np.zeros((2, 8, 32), np.int32)
    kernels.multicast(data, out)
    expected = np.zeros((8, 32), np.int32)  # from column -2 and row 3; outside there are zeros
    expected[:7, 2:] = data[3:, :30]
    assert (out == expected).all()


def swizzled(tile: np.ndarray, span: int) -> np.ndarray:
    """16-byte chunk c of row r moves to chunk c ^ (row of `span` bytes' place in its pattern)."""
    flat = tile.reshape(-1, 16)
    out = np.empty_like(flat)
    for i in range(len(flat)):
        byte = i * 16
        out[(byte ^ (byte >> 7 & span // 16 - 1) << 4) // 16] = flat[i]
    return out.reshape(-1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("swizzle", "span"), [(0, 16), (1, 32), (2, 64), (3, 128)])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (8, 5), (-8, -3), (48, 30)])
def test_tile(kernels: Any, swizzle: int, span: int, x: int, y: int, policy: str) -> None:
    kernels.configure(policy)
    width, rows, box_x, box_y = 64, 40, max(span, 32) // 2, 16
    source, stored = aligned((rows, width), np.int16), aligned((rows, width), np.int16)
    source[:] = torch.randn(rows, width).bfloat16().view(torch.int16).numpy()
    out = np.zeros(box_x * box_y * 2, np.uint8)
    kernels.tile(source, out, stored, 2, width, rows, box_x, box_y, x, y, swizzle, 0)
    box = np.zeros((box_y, box_x), np.int16)
    back = np.zeros((rows, width), np.int16)
    for r in range(box_y):
        for c in range(box_x):
            if 0 <= y + r < rows and 0 <= x + c < width:
                box[r, c] = source[y + r, x + c]
                back[y + r, x + c] = source[y + r, x + c]
    assert (out == swizzled(box.view(np.uint8), span)).all()
    assert (stored == back).all()


@pytest.mark.parametrize("size", [2, 4])
def test_reduction(kernels: Any, size: int) -> None:
    kernels.configure("lazy")
    dtype = torch.bfloat16 if size == 2 else torch.float32
    raw = np.int16 if size == 2 else np.int32
    a, b = torch.randn(16, 32).to(dtype), torch.randn(16, 32).to(dtype)
    source, target = aligned((16, 32), raw), aligned((16, 32), raw)
    source[:] = a.view(torch.int16 if size == 2 else torch.int32).numpy()
    target[:] = b.view(torch.int16 if size == 2 else torch.int32).numpy()
    out = np.zeros(16 * 16 * size, np.uint8)
    kernels.tile(source, out, target, size, 32, 16, 16, 16, 8, 0, 0, 1)
    b[:, 8:24] += a[:, 8:24]
    assert (target == b.view(torch.int16 if size == 2 else torch.int32).numpy()).all()
