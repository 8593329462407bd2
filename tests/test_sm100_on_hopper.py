"""The Blackwell kernels on a Hopper card: an opinion that does not come from the emulator.

Their sources are compiled for compute capability 9.0 with `shadow/` before `csrc/`: tensor memory
is global memory there, and products are plain code of the issuing warp. Copies, mbarriers,
fences, reductions and concurrency are the card's own. Products, loads and stores of tensor memory
are done when they are issued, so what nobody waits for goes unseen: the emulator finds that. The
warp that issues for a pair of blocks reaches into the other one, and a copy of that one tells the
leader's barrier itself.
"""

from __future__ import annotations

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from build_tools.toolchain import find_nvcc

from .cases import AttentionCase
from .check import Backend, check

ROOT = Path(__file__).resolve().parent.parent
SHADOW = ROOT / "tests" / "shadow"
CSRC = ROOT / "csrc"
# Head dims of Q and V, and the backward: single thread blocks, pairs, two passes of pairs.
LIBRARIES: dict[str, tuple[int, int, list[str]]] = {
    "64": (64, 64, []),
    "96": (96, 96, []),
    "128": (128, 128, []),
    "192/128": (192, 128, []),
    "128 by pairs": (128, 128, ["-DPAIRS"]),
    "256": (256, 256, ["-DWIDE"]),
}

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ARRAYS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
POINTERS = (
    "lse", "dsink", "dlse", "alibi_slopes", "sink",
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
)  # fmt: skip
LONGS = ("alibi_batch_stride", "total_q", "total_kv")
INTS = (
    "is_bf16", "batch", "seqlen_q", "seqlen_kv", "heads", "heads_kv", "head_dim", "head_dim_v",
    "window_left", "window_right", "chunk", "top_left", "strict", "deterministic", "wanted",
    "bias_is_f32",
)  # fmt: skip
FLOATS = ("softmax_scale", "softcap")


class Array(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "row", "head")),
    ]

    @classmethod
    def of(cls, x: Tensor | None) -> Array:
        if x is None:
            return cls()
        strides = (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]
        return cls(x.data_ptr(), *strides)


class Bias(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "row", "col")),
    ]

    @classmethod
    def of(cls, x: Tensor | None) -> Bias:
        if x is None:
            return cls()
        pairs = zip(x.shape, x.stride(), strict=True)
        return cls(x.data_ptr(), *(stride if size > 1 else 0 for size, stride in pairs))


class Call(ctypes.Structure):
    _fields_ = [
        *((name, Bias) for name in ("bias", "dbias")),
        *((name, Array) for name in ARRAYS),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in LONGS),
        *((name, ctypes.c_int) for name in INTS),
        *((name, ctypes.c_float) for name in FLOATS),
    ]


def build(name: str) -> ctypes.CDLL:
    """The library of this name, from build/shadow if nothing has changed."""
    nvcc = find_nvcc(ROOT / "build" / "fetched" / "nvcc")
    assert nvcc is not None
    library = ROOT / "build" / "shadow" / f"shadow_{name.replace('/', '_').replace(' ', '_')}.so"
    sources = [x for folder in (SHADOW, CSRC) for x in folder.rglob("*") if x.is_file()]
    if not library.exists() or library.stat().st_mtime < max(x.stat().st_mtime for x in sources):
        compile_library(str(nvcc.path), name, library)
    loaded = ctypes.CDLL(str(library))
    for function in ("shadow_forward", "shadow_backward"):
        getattr(loaded, function).restype = ctypes.c_char_p
    return loaded


def compile_library(nvcc: str, name: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    others = (
        "common/tensor_map.cpp", "common/bwd_preprocess.cu", "common/bwd_dbias.cu",
        "sm100/fwd_refuse.cpp", "sm100/bwd_refuse.cpp",
    )  # fmt: skip
    head_dim, head_dim_v, flags = LIBRARIES[name]
    command = [
        nvcc, "-std=c++17", "-O2", "-gencode=arch=compute_90a,code=sm_90a", "-shared",
        "-Xcompiler=-fPIC", f"-I{SHADOW}", f"-I{CSRC}", f"-DHEAD_DIM={head_dim}",
        f"-DHEAD_DIM_V={head_dim_v}", *flags, SHADOW / "api.cu", *(CSRC / x for x in others),
        "-o", library,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Shadow(Backend):
    """A backend for `check`, whose calls are made without dispatch."""

    library: ctypes.CDLL

    def call(self, case: AttentionCase, op: str, *args: Any, **kw: Any) -> Any:
        if op == "fwd":
            return self.forward(case, kw)
        return self.backward(case, *args, **kw)

    def describe(self, case: AttentionCase, t: dict[str, Any]) -> Call:
        """`t`: tensors and options by the names that the ops give them."""
        c = Call()
        q, k, v = t["q"], t["k"], t["v"]
        for name in ARRAYS:
            setattr(c, name, Array.of(t.get(name)))
        for name in POINTERS:
            x = t.get(name)
            setattr(c, name, None if x is None else x.data_ptr())
        c.bias, c.dbias = Bias.of(t.get("bias")), Bias.of(t.get("dbias"))
        c.bias_is_f32 = t.get("bias") is not None and t["bias"].dtype == torch.float32
        packed = q.dim() == 3
        c.is_bf16 = q.dtype == torch.bfloat16
        c.batch = len(case.rows)
        c.seqlen_q, c.seqlen_kv = q.shape[-3], k.shape[-3]
        c.total_q = q.shape[0] if packed else q.shape[0] * q.shape[1]
        c.total_kv = k.shape[0] if packed else k.shape[0] * k.shape[1]
        c.heads, c.heads_kv = q.shape[-2], k.shape[-2]
        c.head_dim, c.head_dim_v = q.shape[-1], v.shape[-1]
        slopes = t.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            c.alibi_batch_stride = slopes.stride(0)
        c.window_left, c.window_right = case.window_left, case.window_right
        c.chunk, c.top_left, c.strict = case.chunk, case.top_left, case.strict
        c.softcap = case.softcap
        c.softmax_scale = case.head_dim**-0.5 if case.scale is None else case.scale
        return c

    def run(self, function: str, c: Call) -> None:
        error = getattr(self.library, function)(ctypes.byref(c))
        assert not error, error.decode()

    def forward(self, case: AttentionCase, kw: dict[str, Any]) -> tuple[Tensor, Tensor]:
        q, v = kw["q"], kw["v"]
        out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype, device="cuda")
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
        lse = torch.full(shape, torch.nan, device="cuda")
        self.run("shadow_forward", self.describe(case, {**kw, "out": out, "lse": lse}))
        return out, lse

    def backward(
        self, case: AttentionCase, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor,
        v: Tensor, out: Tensor, lse: Tensor, *, deterministic: bool, wanted: int, **kw: Any,
    ) -> list[Tensor]:  # fmt: skip
        nothing = torch.empty(0, dtype=q.dtype, device="cuda")
        grads = {
            name: torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
            for bit, (name, x) in enumerate((("dq", q), ("dk", k), ("dv", v)))
            if wanted >> bit & 1
        }
        if wanted & 8:
            grads["dbias"] = torch.zeros_like(kw["bias"], dtype=torch.float32)
        if wanted & 16:
            grads["dsink"] = torch.zeros_like(kw["sink"])
        tensors = dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse, **grads, **kw)
        c = self.describe(case, tensors)
        c.deterministic, c.wanted = deterministic, wanted
        self.run("shadow_backward", c)
        empty = torch.empty(0, device="cuda")
        return [
            *(grads.get(name, nothing) for name in ("dq", "dk", "dv")),
            grads.get("dbias", empty),
            grads.get("dsink", empty),
        ]


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper card")
    if find_nvcc(ROOT / "build" / "fetched" / "nvcc") is None:
        pytest.skip("needs nvcc")
    with ThreadPoolExecutor(len(LIBRARIES)) as pool:
        return dict(zip(LIBRARIES, pool.map(build, LIBRARIES), strict=True))


CASES: dict[str, dict[str, Any]] = {
    "one block": {"rows": (128,), "keys": (128,), "heads": 1, "heads_kv": 1},
    "causal": {"rows": (300,), "keys": (333,), "heads_kv": 1, "window_right": 0},
    "short": {"rows": (1,), "keys": (257,), "heads": 1, "heads_kv": 1, "window_right": 0},
    "tall": {"rows": (520,), "keys": (90,), "heads": 1, "heads_kv": 1, "window_right": 0},
    "window": {"rows": (140,), "keys": (500,), "heads": 1, "heads_kv": 1, "window_left": 100,
               "window_right": 20},
    "chunk": {"rows": (300,), "keys": (300,), "heads": 1, "heads_kv": 1, "chunk": 77},
    "packed": {"rows": (130, 0, 257, 5), "keys": (200, 60, 0, 300), "layout": "packed",
               "slack": 7, "heads_kv": 1, "window_right": 0},
    "used": {"rows": (20, 133, 0, 1), "keys": (164, 0, 7, 133), "slack": 5, "heads": 1,
             "heads_kv": 1, "dlse": True},
    "grouped": {"rows": (70,), "keys": (200,), "heads": 4, "heads_kv": 1, "dlse": True,
                "sink": True},
    "deterministic": {"rows": (300,), "keys": (600,), "window_right": 0, "deterministic": True},
    "softcap": {"rows": (150,), "keys": (200,), "heads": 1, "heads_kv": 1, "softcap": 3.0},
    "alibi": {"rows": (150,), "keys": (200,), "heads_kv": 1, "alibi": "head", "window_right": 0},
    "bias": {"rows": (150,), "keys": (200,), "heads_kv": 1, "bias": "b1qk", "window_right": 0},
    "strict": {"rows": (300,), "keys": (500,), "heads": 1, "heads_kv": 1, "strict": True},
    "many blocks": {"rows": (384,) * 4, "keys": (512,) * 4, "heads": 16, "heads_kv": 8,
                    "window_right": 0},
}  # fmt: skip


# What pairs leave to single thread blocks: few keys.
NOT_BY_PAIRS = ("one block", "tall")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", LIBRARIES)
def test_on_hopper(libraries: dict[str, ctypes.CDLL], which: str, name: str) -> None:
    if which == "128 by pairs" and name in NOT_BY_PAIRS:
        pytest.skip("served by single thread blocks")
    backend = Shadow("cuda")
    object.__setattr__(backend, "library", libraries[which])
    head_dim, head_dim_v, _ = LIBRARIES[which]
    number = list(LIBRARIES).index(which) + list(CASES).index(name)
    dtype = ("bfloat16", "float16")[number % 2]
    case = AttentionCase(
        dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, grads=True, **CASES[name]
    )
    check(case, backend)
