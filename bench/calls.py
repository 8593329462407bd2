"""One pass of one backend on one set of inputs, and what it needs around it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .backend import Backend
from .cases import Case
from .inputs import Inputs
from .timing import Call


@contextlib.contextmanager
def cpu_threads(case: Case) -> Iterator[None]:
    """Torch's thread count for the while of a case."""
    before = torch.get_num_threads()
    if case.threads:
        torch.set_num_threads(case.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def l2_bytes(device: torch.device) -> int:
    """Size of the GPU's L2 cache."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0) or 64 << 20)


def run_once(case: Case, backend: Backend, x: Inputs) -> list[Tensor]:
    """Output, and gradients where the case has any."""
    forward = backend.setup(case, x)
    with torch.set_grad_enabled(case.grad):
        out = forward()
    if not case.needs_backward:
        return [out.detach()]
    return [out.detach(), *torch.autograd.grad(out, x.leaves, x.dout)]


def make_call(case: Case, name: str, backend: Backend, x: Inputs) -> Call:
    """One pass on one set of inputs, as a function without arguments."""
    forward = backend.setup(case, x)
    if name == "fwd":

        def run_forward() -> Tensor:
            with torch.set_grad_enabled(case.grad):
                return forward()

        return run_forward
    if name == "fwd+bwd":
        return lambda: torch.autograd.grad(forward(), x.leaves, x.dout)
    out = forward()
    return lambda: torch.autograd.grad(out, x.leaves, x.dout, retain_graph=True)


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Most memory that one call holds beyond what was held before; unknown on a CPU."""
    if device.type != "cuda":
        call()
        return None
    call()  # what is kept from the first call on is no part of a call
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated(device) - before
