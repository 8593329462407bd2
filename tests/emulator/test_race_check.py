"""The happens-before check on its own: what orders two accesses, and what does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .library import Failure, load

POLICIES = ("eager", "lazy", "random")
# Kernel, number of the mistake in races.cu, what is missing.
MISTAKES = [
    ("exchange", 1, "__syncthreads"),
    ("exchange", 8, "__syncthreads before the buffer is used again"),
    ("warp_exchange", 2, "__syncwarp"),
    ("last_block", 3, "__threadfence of the writers"),
    ("last_block", 4, "__threadfence of the reader"),
    ("last_block", 5, "__threadfence_block is too narrow"),
    ("flag", 6, "release of the flag"),
    ("barrier", 7, "release of the mbarrier"),
    ("copy", 9, "__syncthreads after cp.async"),
]
KERNELS = ("exchange", "warp_exchange", "last_block", "flag", "barrier", "copy")


def run(library: Any, name: str, mistake: int) -> bool:
    """Whether the numbers are right."""
    data = np.arange(10, 10 + 256, dtype=np.int32)
    scratch = np.zeros(16, np.int32)
    if name == "exchange":
        out = np.zeros(64, np.int32)
        library.exchange(data, out, mistake)
        return bool((out == data[:64] + 2).all())
    if name in ("warp_exchange", "barrier"):
        out = np.zeros(32, np.int32)
        getattr(library, name)(data, out, mistake)
        expected = data[np.arange(32) ^ 1] if name == "warp_exchange" else data[:32]
        return bool((out == expected).all())
    if name == "copy":
        copied = np.zeros(256, np.int32)
        source = np.zeros(260, np.int32)
        start = -source.ctypes.data % 16 // 4
        source = source[start : start + 256]
        source[:] = data
        library.copy(source, copied, mistake)
        return bool((copied == np.roll(data, 128)).all())
    result = np.zeros(1, np.int32)
    getattr(library, name)(data, scratch, result, mistake)
    return bool(result[0] == (data[:4].sum() if name == "last_block" else data[0]))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("policy", POLICIES)
def test_ordered(name: str, policy: str) -> None:
    library = load("races")
    for seed in (1, 2, 3):
        library.configure(policy, seed, race=1)
        assert run(library, name, 0)


@pytest.mark.parametrize(("name", "mistake", "what"), MISTAKES, ids=[w for *_, w in MISTAKES])
def test_missing(name: str, mistake: int, what: str) -> None:
    library = load("races")
    reports = []
    for seed in range(1, 6):
        library.configure("random", seed, race=1)
        try:
            run(library, name, mistake)
        except Failure as e:
            reports.append(str(e))
    # Some orders make the accesses truly ordered (a block that is done before the other starts).
    assert reports, f"not found: {what}"
    assert all("race: not ordered" in r and "races.cu:" in r for r in reports), reports[0]


def test_off_by_default() -> None:
    library = load("races")
    library.configure("eager", 1)
    run(library, "last_block", 3)
