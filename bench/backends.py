"""All contestants, by name."""

from __future__ import annotations

from .backend import Backend
from .flash_family import FlashAttn2, FlashAttn3, FlashAttn4, FlashCuda
from .other_peers import FlashInfer, Xformers
from .torch_family import Flex, TorchVarlen, sdpa_backends


def all_backends() -> dict[str, Backend]:
    """Every backend, by name."""
    paths = ("sm80", "sm90", "sm100", "cpu")
    backends: list[Backend] = [FlashCuda(), *(FlashCuda(path) for path in paths)]
    backends += [*sdpa_backends(), TorchVarlen(), Flex()]
    backends += [FlashAttn2(), FlashAttn3(), FlashAttn4(), FlashInfer(), Xformers()]
    return {backend.name: backend for backend in backends}
