"""The same kernel and the same inputs on a GPU and in the emulator: they differ by accumulation.

A tensor core adds in an order of its own; the emulator adds one product after the other. What that
moves are last bits: of float32 sums, and of P and dS where they are rounded to 16 bits.
"""

from __future__ import annotations

import pytest
import torch

import emulator

from .test_kernels import ARCHS, inputs

flash_cuda = pytest.importorskip("flash_cuda")
pytestmark = pytest.mark.gpu

Tensors = list[torch.Tensor]


def attention(kernel: str, tensors: Tensors, weight: torch.Tensor, causal: bool) -> Tensors:
    """Out, lse and the gradients of q, k, v."""
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    with flash_cuda.use_kernel(kernel):
        out, lse = flash_cuda.attention(q, k, v, causal=causal, return_lse=True)
        grads = torch.autograd.grad(out, (q, k, v), weight)
    return [out.detach(), lse.detach(), *grads]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", ARCHS)
def test_same_as_on_the_gpu(arch: str, head_dim: int, causal: bool) -> None:
    major = torch.cuda.get_device_capability()[0]
    if arch != "sm80" and 10 * major != int(arch[2:]):
        pytest.skip(f"this GPU does not run {arch}")
    emulator.load(arch)
    torch.manual_seed(0)
    tensors = inputs((200, 300), head_dim)
    weight = torch.randn(1, 200, 2, head_dim).bfloat16()
    try:
        here = attention(f"emulated:{arch}", tensors, weight, causal)
        there = attention(arch, [x.cuda() for x in tensors], weight.cuda(), causal)
    except NotImplementedError as e:
        pytest.skip(str(e))
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), here, there, strict=True):
        difference = (x.double() - y.cpu().double()).abs()
        scale = y.double().abs().max().item()
        print(f"{arch} {head_dim} {causal} {name}: {difference.max().item():.2e} of {scale:.2e}")
        # One unit of bfloat16 each, and a few of the largest where terms cancel.
        bound = 2**-7 * y.cpu().double().abs() + 2**-9 * scale
        assert (difference <= bound).all(), f"{name}: {difference.max()} of {scale}"
