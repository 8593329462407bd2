"""Exact softmax attention for PyTorch, in CUDA C++ with a CPU engine.

>>> import torch, flash_cuda
>>> q, k, v = (torch.randn(2, 128, 8, 64) for _ in range(3))
>>> out = flash_cuda.attention(q, k, v, causal=True)

:func:`attention`, :func:`attention_varlen` and :func:`attention_decode` are the functions to call,
:func:`merge` joins partial results, :func:`explain` and :func:`supported` say what serves a call.
The names that begin with ``flash_attn`` are FlashAttention's.
"""

from importlib.machinery import EXTENSION_SUFFIXES as _SUFFIXES
from pathlib import Path as _Path

import torch  # noqa: F401  its libraries must be loaded before _C

if not any((_Path(__file__).parent / f"_C{suffix}").exists() for suffix in _SUFFIXES):
    # Most often a checkout that hides an installed package from a Python started in it.
    raise ImportError(
        f"flash_cuda is not built in {_Path(__file__).parent}: run `make build` or "
        "`pip install -e .` there, or start Python in another folder to use the installed package"
    )

from flash_cuda import _fake, _short_cut, _vmap  # noqa: F401  they register themselves
from flash_cuda.explain import Explanation, explain, supported
from flash_cuda.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_cuda.interface import attention, attention_decode, attention_varlen
from flash_cuda.kvcache import flash_attn_with_kvcache
from flash_cuda.merge import merge
from flash_cuda.override import use_kernel

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "attention",
    "attention_decode",
    "attention_varlen",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "merge",
    "supported",
    "use_kernel",
]
