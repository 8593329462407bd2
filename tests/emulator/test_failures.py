"""Every way to fail becomes an exception, never a hang or the end of the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from .library import Failure, load


@pytest.fixture
def kernels() -> Iterator[Any]:
    library = load("failures")
    library.configure()
    yield library
    library.configure()
    p = np.zeros(2, np.int32)
    library.fail(0, p)  # the next launch is sound
    assert p[0] == 1


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (1, "null pointer access"),
        (2, "invalid memory access, address 0x200000000000"),
        (3, "shared memory access out of bounds"),
        (4, "misaligned shared memory access"),
        (5, "trap"),
        (6, "device assertion: p == nullptr"),
        (7, "poll for something that never happens"),
        (8, "deadlock"),
        (9, "mbarrier that was not initialised"),
        (10, "stack overflow"),
        (11, "poll for something that never happens"),
    ],
)
def test_stopped(kernels: Any, which: int, words: str) -> None:
    with pytest.raises(Failure, match=words) as error:
        kernels.fail(which, np.zeros(2, np.int32))
    text = str(error.value)
    assert "fail_kernel" in text
    assert "failures.cu:" in text
    assert "warp 0" in text


def test_registers_are_those_of_the_launch(kernels: Any) -> None:
    p = np.zeros(1, np.int32)
    kernels.registers(p, 24)  # 3 x 168 = 240 + 240 + 24
    assert p[0] == 24
    with pytest.raises(Failure, match="register pool empty"):
        kernels.registers(p, 32)


def test_device_variables_are_reset(kernels: Any) -> None:
    p = np.zeros(2, np.int32)
    kernels.fail(13, p)
    with pytest.raises(Failure):
        kernels.fail(12, p)
    kernels.fail(13, p)
    assert 0 <= p[0] < 32


def test_launches_are_checked(kernels: Any) -> None:
    p = np.zeros(1, np.int32)
    kernels.small(p, 64, 1)
    for threads, blocks in ((96, 1), (0, 1), (64, 0), (2048, 1)):
        with pytest.raises(Failure, match="invalid configuration"):
            kernels.small(p, threads, blocks)
    kernels.large(p, 40 << 10, 0)
    with pytest.raises(Failure, match="invalid argument"):
        kernels.large(p, 60 << 10, 0)  # without the opt-in
    kernels.large(p, 200 << 10, 200 << 10)
    with pytest.raises(Failure, match="invalid argument"):
        kernels.large(p, 300 << 10, 300 << 10)


def test_settings_are_checked(kernels: Any) -> None:
    with pytest.raises(ValueError, match="policy=sometimes"):
        kernels.configure("sometimes")
    with pytest.raises(ValueError, match="sms=0"):
        kernels.configure(sms=0)
