"""FLASH_CUDA_KERNEL=emulated:ARCH and use_kernel, where there is nothing to emulate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import emulator

flash_cuda = pytest.importorskip("flash_cuda")


def _nothing_loaded(**_: bool) -> None:
    raise NotImplementedError


def call() -> None:
    q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    flash_cuda.attention(q, q, q)


@pytest.mark.skipif("sm100" in emulator.architectures(), reason="every folder has kernels")
def test_folder_without_kernels() -> None:
    with (
        flash_cuda.use_kernel("emulated:sm100"),
        pytest.raises(NotImplementedError, match="a folder without kernels; this checkout has sm"),
    ):
        call()


def test_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flash_cuda import _emulated

    monkeypatch.setattr(_emulated, "_ready", set())
    monkeypatch.setattr(_emulated._C, "kernel_table", _nothing_loaded)
    monkeypatch.setattr(_emulated, "__file__", str(tmp_path / "flash_cuda" / "_emulated.py"))
    with (
        flash_cuda.use_kernel("emulated:sm100"),
        pytest.raises(NotImplementedError, match="needs a source checkout"),
    ):
        call()
