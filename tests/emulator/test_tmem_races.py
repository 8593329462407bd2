"""The race check of tensor memory: waits, fences and commits of tcgen05."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .library import Failure, load

POLICIES = ("eager", "lazy", "random")
# Number in tmem.cu, what is missing.
MISTAKES = [
    (1, "tcgen05.wait::st"),
    (2, "fence::before_thread_sync of the writers"),
    (3, "fence::after_thread_sync of the readers"),
    (4, "__syncthreads between writers and readers"),
    (5, "tcgen05.wait::ld"),
    (6, "fence::before_thread_sync of the readers"),
    (7, "fence::after_thread_sync before the columns are written again"),
    (8, "tcgen05.commit: the barrier says nothing of the product"),
    (9, "fence::after_thread_sync after the wait for the product"),
]


def numbers_are_right(library: Any, mistake: int) -> bool:
    out = np.full(384, np.nan, np.float32)
    library.tmem(out, mistake)
    rows = np.arange(128)
    sums = [16 * (1000 * r + 10 * rows) + 120 for r in range(2)]
    return bool((out == np.concatenate([*sums, np.full(128, 16)])).all())


@pytest.mark.parametrize("policy", POLICIES)
def test_ordered(policy: str) -> None:
    library = load("tmem", "sm100")
    for seed in (1, 2, 3):
        for race in (0, 1):
            library.configure(policy, seed, race=race)
            assert numbers_are_right(library, 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("mistake", "what"), MISTAKES, ids=[what for _, what in MISTAKES])
def test_missing(policy: str, mistake: int, what: str) -> None:
    library = load("tmem", "sm100")
    library.configure(policy, 1, race=1)
    with pytest.raises(Failure, match=r"race: not ordered; .* tensor memory, lane") as error:
        numbers_are_right(library, mistake)
    assert "tmem.cu:" in str(error.value)
