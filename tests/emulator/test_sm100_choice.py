"""Which backward kernel the Blackwell table takes for a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emulator

flash_cuda = pytest.importorskip("flash_cuda")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    try:
        emulator.load("sm100")
    except emulator.EmulatorBuildError as e:
        if "needs nvcc" in str(e):
            pytest.skip(str(e))
        raise


@pytest.mark.parametrize(
    ("head_dims", "keys", "options", "kernel"),
    [
        ((64, 64), 300, {}, "sm100_bwd_hdim64"),
        ((96, 96), 300, {}, "sm100_bwd_hdim96"),
        ((104, 104), 300, {}, "sm100_bwd_pair_hdim128"),
        ((128, 128), 300, {}, "sm100_bwd_pair_hdim128"),
        ((128, 128), 300, {"deterministic": True}, "sm100_bwd_pair_hdim128"),
        ((128, 128), 128, {}, "sm100_bwd_hdim128"),
        ((128, 128), 300, {"softcap": 30.0}, "sm100_bwd_pair_hdim128"),
        ((128, 128), 300, {"softmax_scale": -1.0}, "sm100_bwd_pair_hdim128"),
        ((192, 128), 300, {}, "sm100_bwd_hdim192_128"),
        ((192, 192), 300, {}, "sm100_bwd_hdim256"),
        ((256, 256), 300, {"softcap": 30.0}, "sm100_bwd_hdim256"),
    ],
)
def test_backward(
    head_dims: tuple[int, int], keys: int, options: dict[str, Any], kernel: str
) -> None:
    q = torch.zeros(1, 200, 2, head_dims[0], dtype=torch.bfloat16)
    k = torch.zeros(1, keys, 1, head_dims[0], dtype=torch.bfloat16)
    v = torch.zeros(1, keys, 1, head_dims[1], dtype=torch.bfloat16)
    with flash_cuda.use_kernel("emulated:sm100"):
        answer = flash_cuda.explain(q, k, v, backward=True, **options)
    assert answer.kernel == kernel, answer
