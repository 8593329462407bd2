"""Forcing another path than the one dispatch would choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flash_cuda import _C
from flash_cuda.options import shown


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Serves the calls inside the block, and their backward passes, by the named kernels.

    Holds for the calling thread and wins over the environment variable ``FLASH_CUDA_KERNEL``. A
    graph that torch.compile made before asks for the name again when it runs.

    Args:
        name: ``"sm80"``, ``"sm90"`` or ``"sm100"``, the kernels of that folder, for CUDA tensors;
            ``"cpu"``, the engine, or ``"emulated:sm90"`` (or another folder), kernels that the
            emulator runs, for CPU tensors; ``""``, what dispatch chooses.

    Raises:
        TypeError: the name is no string.
        ValueError: the name is none of these.
        NotImplementedError: raised by a call inside the block that the named kernels do not fit:
            tensors on another device, or kernels that were not built.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string such as 'sm90' or 'cpu', got {shown(name)}")
    before = _C.set_override(name)
    try:
        yield
    finally:
        _C.set_override(before)
