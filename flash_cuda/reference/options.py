"""What the engine may be told besides the arguments of an op: tile sizes and numerics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    """Tile sizes, and the numeric shortcuts that GPU kernels take. The default is exact.

    Attributes:
        block_q: query rows of a tile; None: 128, or 256 with several threads, which meet after
            every operation on a tile.
        block_kv: keys of a tile; None: twice as many, and more for few query rows.
        tile_scores: scores held at once, all heads of a part together; more heads and sequences
            are worked on one after the other. None: half a million, 2 MB in float32, which is
            the level 2 cache of a core; four times that with several threads.
        rescale_threshold: conditional rescaling. The reference that is subtracted from the
            scores follows the running maximum only when it is left behind by more than this
            many powers of two. 0 follows at once; kernels use 8.
        exp_share: share of the exponentials (0 to 1) taken from a polynomial instead of exp2,
            spread evenly over the columns.
        exp_degree: degree of that polynomial, 2 to 5.
        exp_in_backward: the polynomial also serves the recomputation of P in the backward pass.
        round_p: P and dS are rounded to the input dtype before they are multiplied, as tensor
            cores take them.
    """

    block_q: int | None = None
    block_kv: int | None = None
    tile_scores: int | None = None
    rescale_threshold: float = 0.0
    exp_share: float = 0.0
    exp_degree: int = 3
    exp_in_backward: bool = False
    round_p: bool = False

    def __post_init__(self) -> None:
        """Refuses what no kernel could mean."""
        if any(n is not None and n < 1 for n in (self.block_q, self.block_kv)):
            raise ValueError(f"tiles need at least one row, got {self.block_q} x {self.block_kv}")
        if not 0.0 <= self.exp_share <= 1.0:
            raise ValueError(f"exp_share must be between 0 and 1, got {self.exp_share}")
        if self.exp_degree not in (2, 3, 4, 5):
            raise ValueError(f"exp_degree must be 2, 3, 4 or 5, got {self.exp_degree}")
        if not self.rescale_threshold >= 0.0:
            raise ValueError(f"rescale_threshold must be >= 0, got {self.rescale_threshold}")

    def strict(self) -> EngineOptions:
        """Returns the same tiles without shortcuts."""
        return EngineOptions(self.block_q, self.block_kv, self.tile_scores, round_p=self.round_p)


_EXACT = EngineOptions()
_current: ContextVar[EngineOptions] = ContextVar("flash_cuda_engine", default=_EXACT)


def current_options() -> EngineOptions:
    """Returns the options that calls of the engine use now."""
    return _current.get()


@contextmanager
def use_options(options: EngineOptions) -> Iterator[None]:
    """Runs the calls inside the block, and their backward passes there, with `options`."""
    token = _current.set(options)
    try:
        yield
    finally:
        _current.reset(token)
