"""Autocast of `fwd`: casts q, k, v (and qv, bias) and nothing else.

Lengths, slopes, sinks and scales keep the types that the kernels read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_cuda._handles import FWD, FWD_NAMES, Options, OutLse

_CAST = ("q", "k", "v", "qv", "bias")


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Casts float32 and 16-bit tensors, as torch's own ops do: float64 and fp8 stay."""
    if tensor is None or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return tensor
    return tensor.to(dtype)


def fwd_kernel(device_type: str) -> Callable[..., OutLse]:
    key = getattr(torch._C.DispatchKey, "AutocastCPU" if device_type == "cpu" else "AutocastCUDA")
    keys = torch._C.DispatchKeySet(key)

    def kernel(*args: Any, **kwargs: Any) -> OutLse:
        options = {**dict(zip(FWD_NAMES, args)), **kwargs}  # noqa: B905
        dtype = torch.get_autocast_dtype(device_type)
        for name in _CAST:
            if name in options:
                options[name] = _cast(options[name], dtype)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return FWD(**options)

    return kernel


def cast_call(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Returns the call as the kernel makes it, where torch.compile traces around the kernel."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return q, k, v, options
    tensors = {"q": q, "k": k, "v": v, **options}
    dtype = torch.get_autocast_dtype(device_type)
    tensors.update({name: _cast(tensors.get(name), dtype) for name in _CAST})
    q, k, v = tensors.pop("q"), tensors.pop("k"), tensors.pop("v")
    return q, k, v, {name: value for name, value in tensors.items() if value is not None}
