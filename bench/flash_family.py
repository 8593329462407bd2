"""flash_cuda and the FlashAttention family, whose function names it has too."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .backend import HALF, Abilities, Backend, Forward
from .cases import Case
from .inputs import Inputs

ROOT = Path(__file__).resolve().parent.parent
FA4_CACHE = Path(tempfile.gettempdir()) / "flash_cuda_bench_fa4"


def ends(case: Case, unlimited: int | None) -> tuple[int | None, int | None]:
    """The window as FlashAttention's functions take it, beside causal."""
    right = 0 if case.causal and case.window_left >= 0 else case.window_right
    return tuple(unlimited if end < 0 else end for end in (case.window_left, right))


class FlashAttn2(Backend):
    """The functions of FlashAttention-2: flash_attn_func, _varlen_func, _with_kvcache."""

    name = "fa2"
    distribution = "flash-attn"
    module: ModuleType
    page_argument = "block_table"
    unlimited: int | None = -1
    abilities = Abilities(page_multiple=256, softcap_backward=True)

    def load(self) -> None:
        """Imports flash_attn, which FlashAttention-4 alone also provides, without functions."""
        module = importlib.import_module("flash_attn")
        if not hasattr(module, "flash_attn_func"):
            raise ImportError("flash_attn has no flash_attn_func (FlashAttention-2 is absent)")
        self.module = module

    def options(self, case: Case) -> dict[str, Any]:
        """Keywords that all functions share."""
        options: dict[str, Any] = {
            "causal": case.causal,
            "window_size": ends(case, self.unlimited),
        }
        if case.softcap:
            options["softcap"] = case.softcap
        return options

    def setup(self, case: Case, x: Inputs) -> Forward:
        """The function that fits the kind of case."""
        options = self.options(case)
        if case.kind == "decode":
            if x.block_table is not None:
                options[self.page_argument] = x.block_table
            return lambda: first(
                self.module.flash_attn_with_kvcache(
                    x.q, x.k, x.v, cache_seqlens=x.cache_seqlens, **options
                )
            )
        if case.deterministic:
            options["deterministic"] = True
        if case.kind == "varlen":
            longest = max(case.lengths)
            return lambda: first(
                self.module.flash_attn_varlen_func(
                    x.q,
                    x.k,
                    x.v,
                    cu_seqlens_q=x.cu_seqlens,
                    cu_seqlens_k=x.cu_seqlens,
                    max_seqlen_q=longest,
                    max_seqlen_k=longest,
                    **options,
                )
            )
        return lambda: first(self.module.flash_attn_func(x.q, x.k, x.v, **options))


def first(result: Any) -> Tensor:
    """The output, of functions that return it alone or before others."""
    return result[0] if isinstance(result, tuple) else result


class FlashCuda(FlashAttn2):
    """This package; `kernel` forces a path, None lets it choose."""

    distribution = "flash-cuda"
    is_peer = False
    abilities = Abilities(
        dtypes=frozenset({"bfloat16", "float16", "float32", "float8_e4m3fn"}),
        devices=frozenset({"cuda", "cpu"}),
        other_head_dim_v=True,
    )

    def __init__(self, kernel: str | None = None) -> None:
        """Names the path."""
        self.kernel = kernel
        self.name = f"flash_cuda:{kernel}" if kernel else "flash_cuda"

    def missing(self, device: torch.device) -> str | None:
        """Also where this build has no kernels of the path, or they are for another device."""
        wanted = "cpu" if self.kernel == "cpu" else "cuda"
        if self.kernel and device.type != wanted:
            return f"needs {wanted}, this is {device.type}"
        absent = super().missing(device)
        folders = [] if absent else self.module._C.build_info()["folders"]
        if absent or self.kernel in (None, "cpu", *folders):
            return absent
        return f"this build has {', '.join(folders) or 'no kernels'}"

    def load(self) -> None:
        """Imports flash_cuda: this folder's if it is built here, else the installed one."""
        if any((ROOT / "flash_cuda").glob("_C*.so")):
            self.module = importlib.import_module("flash_cuda")
            return
        # `python -m` puts the current folder first, where sources without kernels would hide it.
        before = list(sys.path)
        sys.path[:] = [entry for entry in before if Path(entry or ".").resolve() != ROOT]
        try:
            self.module = importlib.import_module("flash_cuda")
        finally:
            sys.path[:] = before

    def refuses(self, case: Case) -> str | None:
        """As its abilities, with float32 and float8 where they are served."""
        if case.dtype == "float8_e4m3fn" and case.needs_backward:
            return "no float8 backward"
        return super().refuses(case)

    def scope(self, case: Case) -> contextlib.AbstractContextManager[Any]:
        """Forces the path."""
        if self.kernel is None:
            return contextlib.nullcontext()
        return self.module.use_kernel(self.kernel)


class FlashAttn3(FlashAttn2):
    """FlashAttention-3."""

    name = "fa3"
    distribution = "flash-attn-3"
    page_argument = "page_table"
    abilities = Abilities(
        dtypes=HALF | {"float8_e4m3fn"}, other_head_dim_v=True, softcap_backward=True
    )

    def load(self) -> None:
        """Imports it under either of its names."""
        try:
            self.module = importlib.import_module("flash_attn_interface")
        except ImportError:
            self.module = importlib.import_module("flash_attn_3.flash_attn_interface")

    def refuses(self, case: Case) -> str | None:
        """It is for Hopper alone."""
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
            return "Hopper only"
        if case.dtype == "float8_e4m3fn" and case.needs_backward:
            return "no float8 backward"
        return super().refuses(case)


class FlashAttn4(Backend):
    """FlashAttention-4, `flash_attn.cute`; compiles a kernel at its first call."""

    name = "fa4"
    distribution = "flash-attn-4"
    abilities = Abilities(kinds=frozenset({"dense", "varlen", "decode"}), other_head_dim_v=True)

    def load(self) -> None:
        """Imports it, with the disk cache on: `bench.warm` fills it from several processes."""
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(FA4_CACHE))
        self.module = importlib.import_module("flash_attn.cute")

    def options(self, case: Case) -> dict[str, Any]:
        """Keywords that both functions share."""
        options: dict[str, Any] = {"causal": case.causal}
        if case.has_window:
            options["window_size"] = ends(case, None)
            options["causal"] = case.causal and case.window_left < 0
        if case.softcap:
            options["softcap"] = case.softcap
        if case.deterministic:
            options["deterministic"] = True
        return options

    def setup(self, case: Case, x: Inputs) -> Forward:
        """flash_attn_func, or flash_attn_varlen_func for packed sequences and caches."""
        options = self.options(case)
        if case.kind == "decode":
            options |= {"seqused_k": x.cache_seqlens, "page_table": x.block_table}
            options["max_seqlen_k"] = case.seqlen_kv
            options["num_splits"] = 0
        if case.kind == "varlen":
            longest = max(case.lengths)
            options |= {"cu_seqlens_q": x.cu_seqlens, "cu_seqlens_k": x.cu_seqlens}
            options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        if case.kind == "dense":
            return lambda: first(self.module.flash_attn_func(x.q, x.k, x.v, **options))
        return lambda: first(self.module.flash_attn_varlen_func(x.q, x.k, x.v, **options))
