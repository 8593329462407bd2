"""Calls that run on from each other: a kernel starts before the one before it has ended.

What it may touch then is a matter of order on the device, so a queue is filled behind a kernel that
sleeps, and every call takes what the call before it, or a kernel of torch, has just written. The
emulator stops kernels that touch it too early (tests/emulator/test_failures.py).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flash_cuda

pytestmark = pytest.mark.gpu
CALLS = 24
NAN = float("nan")


def rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def forward_chain(head_dim: int, rows: int, between: bool, sync: bool) -> list[Tensor]:
    """The output of each call is the query of the next."""
    k, v = 4 * rand(2, rows, 4, head_dim, seed=1), rand(2, rows, 4, head_dim, seed=2)
    outs = [rand(2, rows, 4, head_dim)]
    for _ in range(CALLS):
        with torch.no_grad():
            outs.append(flash_cuda.attention(outs[-1], k, v, causal=True))
            if between:
                outs[-1] = outs[-1] * 2
        if sync:
            torch.cuda.synchronize()
    return outs[1:]


def step_chain(head_dim: int, rows: int, deterministic: bool, sync: bool) -> list[Tensor]:
    """Forward and backward in turns; with `deterministic`, each step goes on from the gradients."""
    x = [rand(2, rows, 4, head_dim, seed=s) for s in range(3)]
    dout = rand(2, rows, 4, head_dim, seed=3)
    results = []
    for _ in range(CALLS // 3):
        x = [t.detach().requires_grad_() for t in x]
        out = flash_cuda.attention(*x, causal=True, deterministic=deterministic)
        if sync:
            torch.cuda.synchronize()
        grads = torch.autograd.grad(out, x, dout)
        if sync:
            torch.cuda.synchronize()
        results += [out.detach(), *grads]
        if deterministic:
            x = [(g / g.float().std()).to(torch.bfloat16) for g in grads]
        x = [t.roll(1, 0) for t in x]
    return results


def queued(chain: Callable[..., list[Tensor]], *args: object) -> list[Tensor]:
    """The calls wait in the queue, so that nothing but the device orders them."""
    junk = [torch.full((1 << 22,), NAN, device="cuda") for _ in range(8)]
    del junk  # what is allocated next holds NaN
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    results = chain(*args, False)
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("between", [False, True], ids=["alone", "torch_between"])
@pytest.mark.parametrize("rows", [200, 1000])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_forward(head_dim: int, rows: int, between: bool) -> None:
    expected = forward_chain(head_dim, rows, between, True)
    for _ in range(3):
        got = queued(forward_chain, head_dim, rows, between)
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(a, b), f"call {i} of {CALLS}"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [200, 1000])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_forward_and_backward(head_dim: int, rows: int, deterministic: bool) -> None:
    expected = step_chain(head_dim, rows, deterministic, True)
    for _ in range(3):
        got = queued(step_chain, head_dim, rows, deterministic)
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            if deterministic:
                assert torch.equal(a, b), f"result {i}"
            else:  # dQ is summed in any order
                error = (a.float() - b.float()).norm() / b.float().norm()
                assert error < 5e-3, f"result {i}: {error}"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_graph(head_dim: int) -> None:
    expected = forward_chain(head_dim, 500, False, True)
    graph = torch.cuda.CUDAGraph()
    q = rand(2, 500, 4, head_dim)
    k, v = 4 * rand(2, 500, 4, head_dim, seed=1), rand(2, 500, 4, head_dim, seed=2)
    outs = [q]
    with torch.cuda.graph(graph), torch.no_grad():
        for _ in range(CALLS):
            outs.append(flash_cuda.attention(outs[-1], k, v, causal=True))
    for _ in range(3):
        for out in outs[1:]:
            out.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        for i, (a, b) in enumerate(zip(outs[1:], expected, strict=True)):
            assert torch.equal(a, b), f"call {i} of {CALLS}"
