"""Every way to fail becomes an exception, never a hang or the end of the process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from .library import Failure, aligned, load


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


_READ = "global memory is read before griddepcontrol.wait, beside an unknown kernel"
AHEAD = [
    *(
        (i, "global memory is read before griddepcontrol.wait, beside an unknown")
        for i in (1, 4, 5)
    ),
    *((i, "global memory is written before griddepcontrol.wait") for i in (2, 3, 6)),
    (7, "launch_dependents before griddepcontrol.wait"),
    (8, _READ),
    (9, "has not executed griddepcontrol.wait"),
]


@pytest.mark.parametrize("race", [0, 1])
@pytest.mark.parametrize(("which", "words"), AHEAD)
def test_launch_that_runs_beside_the_one_before(
    kernels: Any, which: int, words: str, race: int
) -> None:
    if which == 8 and not race:
        pytest.skip("that another thread has waited is enough without the race check")
    kernels.configure(race=race)
    p = aligned(4, np.int32, 16)
    kernels.ahead(which, 1, p, 0)  # an ordinary launch
    if which < 8:
        kernels.ahead(which, 0, p, 1)
        assert p[0] == 1 + (which == 1)
    kernels.small(p, 1, 1)
    with pytest.raises(Failure, match=words) as error:
        kernels.ahead(which, 1, p, 1)
    assert "ahead_kernel" in str(error.value)


def test_beside_a_known_kernel_what_it_does_not_write_may_be_read(kernels: Any) -> None:
    p, q = (aligned(4, np.int32, 16) for _ in range(2))
    kernels.ahead(10, 0, p, 1)  # lets the next launch start
    kernels.ahead(1, 1, q, 1)
    assert q[0] == 1
    kernels.ahead(10, 0, p, 1)
    with pytest.raises(Failure, match="what the kernel before writes is read"):
        kernels.ahead(1, 1, p, 1)
    kernels.ahead(10, 0, p, 1)
    with pytest.raises(Failure, match="written before"):
        kernels.ahead(2, 1, q, 1)


def test_beside_a_known_kernel_a_variable_may_be_written_that_it_does_not_write(
    kernels: Any,
) -> None:
    p = aligned(4, np.int32, 16)
    with pytest.raises(Failure, match="written before"):
        kernels.ahead(11, 1, p, 1)  # beside an unknown kernel
    kernels.ahead(10, 0, p, 1)  # lets the next launch start
    kernels.ahead(11, 1, p, 1)
    with pytest.raises(Failure, match="written before"):
        kernels.ahead(11, 1, p, 1)


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
