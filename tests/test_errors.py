"""Every refusal: which error, and a text that names the argument, the value and what is allowed.

A wrong call is a right one with a few arguments replaced. Each is tried through the checks alone,
the public op (the CPU engine) and the C++ op body, and has to say the same in all three.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_cuda
from flash_cuda import _C

ops = torch.ops.flash_cuda
Case = tuple[str, dict[str, Any], type[Exception], str]


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


HALF, DOUBLE, LONG, FP8 = torch.float16, torch.float64, torch.int64, torch.float8_e4m3fn


def dense_call(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "q": zeros(2, 5, 4, 8, dtype=dtype),
        "k": zeros(2, 7, 2, 8, dtype=dtype),
        "v": zeros(2, 7, 2, 16, dtype=dtype),
    }


def packed_call() -> dict[str, Any]:
    return {
        "q": zeros(10, 4, 8),
        "k": zeros(14, 2, 8),
        "v": zeros(14, 2, 16),
        "cu_seqlens_q": i32(0, 5, 10),
        "cu_seqlens_k": i32(0, 7, 14),
    }


def paged_call() -> dict[str, Any]:
    return {
        "q": zeros(2, 5, 4, 8),
        "k": zeros(6, 4, 2, 8),
        "v": zeros(6, 4, 2, 16),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "seqused_k": i32(9, 4),
    }


def huge(*shape: int) -> torch.Tensor:
    """Rows of zeros that are all the same one."""
    return zeros(shape[-1]).expand(shape)


def transposed(*shape: int) -> torch.Tensor:
    return zeros(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


DENSE: list[Case] = [
    # dtypes
    ("q of ints", {"q": zeros(2, 5, 4, 8, dtype=LONG)}, TypeError, "q must be float16.*got int64"),
    ("mixed", {"v": zeros(2, 7, 2, 16, dtype=HALF)}, TypeError,
     "q, k and v must have the same dtype, got float32, float32 and float16"),
    ("e5m2", {n: t.to(torch.float8_e5m2) for n, t in dense_call().items()}, TypeError,
     "q must be .* got float8_e5m2"),
    # shapes of q, k, v
    ("q 3-d", {"q": zeros(5, 4, 8)}, ValueError,
     r"q must have shape .*got \(5, 4, 8\) without cu_seqlens_q"),
    ("q 5-d", {"q": zeros(1, 2, 5, 4, 8)}, ValueError,
     r"q must have shape .*got \(1, 2, 5, 4, 8\)"),
    ("k 3-d", {"k": zeros(7, 2, 8)}, ValueError, r"k must have shape .*got \(7, 2, 8\) without"),
    ("v 2-d", {"v": zeros(2, 16)}, ValueError, r"v must have shape .*got \(2, 16\)"),
    ("k batch", {"k": zeros(3, 7, 2, 8), "v": zeros(3, 7, 2, 16)}, ValueError,
     r"k and v must have the batch of q \(2\).*\(3, 7, 2, 8\)"),
    ("k v batch", {"v": zeros(1, 7, 2, 16)}, ValueError,
     r"k and v must have the same batch and length"),
    ("k v length", {"v": zeros(2, 6, 2, 16)}, ValueError, r"same batch and length, got .*6, 2, 16"),
    ("k v heads", {"v": zeros(2, 7, 4, 16)}, ValueError, "same number of heads, got 2 and 4"),
    ("heads", {"q": zeros(2, 5, 5, 8)}, ValueError, "multiple of that of k and v, got 5 and 2"),
    ("no kv heads", {"k": zeros(2, 7, 0, 8), "v": zeros(2, 7, 0, 16)}, ValueError, "got 4 and 0"),
    ("head_dim", {"k": zeros(2, 7, 2, 16)}, ValueError, "same head_dim, got 8 and 16"),
    ("head_dim 0", {"q": zeros(2, 5, 4, 0), "k": zeros(2, 7, 2, 0)}, ValueError,
     "head_dim of q and k must be at least 1.* got 0"),
    ("head_dim_v 0", {"v": zeros(2, 7, 2, 0)}, ValueError,
     "head_dim_v of v must be at least 1.* got 0"),
    ("q strides", {"q": transposed(2, 5, 4, 8)}, ValueError,
     r"q must have a last dimension with stride 1, got stride 4; q\.contiguous\(\) has it"),
    ("v strides", {"v": zeros(2, 7, 2, 1).expand(2, 7, 2, 16)}, ValueError,
     "v must .* got stride 0"),
    # scores
    ("bias dtype", {"bias": zeros(2, 4, 5, 7, dtype=HALF)}, TypeError,
     "bias must be float32, got float16"),
    ("bias shape", {"bias": zeros(2, 2, 5, 7)}, ValueError,
     r"bias must have shape \(batch or 1.*\(2, 4, 5, 7\), got \(2, 2, 5, 7\)"),
    ("bias 3-d", {"bias": zeros(4, 5, 7)}, ValueError, r"bias must .* got \(4, 5, 7\)"),
    ("bias columns", {"bias": zeros(2, 4, 5, 1)}, ValueError, r"bias must .* got \(2, 4, 5, 1\)"),
    ("alibi dtype", {"alibi_slopes": zeros(4, dtype=HALF)}, TypeError,
     "alibi_slopes must be float32"),
    ("alibi shape", {"alibi_slopes": zeros(2)}, ValueError,
     r"alibi_slopes must have shape \(num_heads_q\) = \(4,\) or .*\(2, 4\), got \(2,\)"),
    ("alibi batch", {"alibi_slopes": zeros(3, 4)}, ValueError, r"alibi_slopes .* got \(3, 4\)"),
    ("alibi stride", {"alibi_slopes": zeros(8)[::2]}, ValueError, "alibi_slopes .* got stride 2"),
    ("sink dtype", {"sink": zeros(4, dtype=torch.bfloat16)}, TypeError,
     "sink must be float32, got bf"),
    ("sink shape", {"sink": zeros(2)}, ValueError,
     r"sink must .*\(num_heads_q\) = \(4,\), got \(2,\)"),
    ("qv dtype", {"qv": zeros(2, 5, 4, 16, dtype=HALF)}, TypeError,
     "qv must be float32, got float16"),
    ("qv shape", {"qv": zeros(2, 5, 4, 8)}, ValueError, r"qv must .* = 16 .*got \(2, 5, 4, 8\)"),
    ("descale", {"q_descale": zeros(2, 2)}, TypeError,
     "q_descale is for float8_e4m3fn inputs, got float32"),
    # lengths
    ("seqused dtype", {"seqused_k": zeros(2, dtype=LONG)}, TypeError,
     "seqused_k must be int32, got int64"),
    ("seqused shape", {"seqused_q": i32(1)}, ValueError,
     r"seqused_q must .*\(batch\) = \(2,\), got \(1,\)"),
    ("leftpad shape", {"leftpad_k": i32(1, 2, 3)}, ValueError, r"leftpad_k must .*got \(3,\)"),
    ("cache idx dtype", {"cache_batch_idx": zeros(2, dtype=LONG)}, TypeError,
     "cache_batch_idx must be int32"),
    ("cache idx shape", {"cache_batch_idx": i32(0)}, ValueError,
     r"cache_batch_idx must .*got \(1,\)"),
    # options
    ("window left", {"window_left": -2}, ValueError,
     r"window_left must be -1 \(unlimited\) or at least 0, got -2"),
    ("window right", {"window_right": -7}, ValueError, "window_right must .* got -7"),
    ("chunk", {"attention_chunk": -1}, ValueError, r"attention_chunk must be at least 0 .*got -1"),
    ("scale", {"softmax_scale": float("nan")}, ValueError, "softmax_scale must .* got nan"),
    ("softcap", {"softcap": -1.0}, ValueError, "softcap must be 0 .none. or finite.* got -1"),
    ("softcap nan", {"softcap": float("nan")}, ValueError, "softcap must .* got nan"),
    ("softcap below float32", {"softcap": 1e-45}, ValueError, "softcap must .* got 1e-45"),
    ("softcap above float32", {"softcap": 1e300}, ValueError, r"softcap must .* got 1e\+300"),
    ("scale above float32", {"softmax_scale": -1e300}, ValueError, "softmax_scale must .* got -1e"),
    ("dropout 1", {"dropout_p": 1.0}, ValueError,
     "dropout_p must be at least 0 and under 1, got 1"),
    ("dropout < 0", {"dropout_p": -0.1}, ValueError, "dropout_p must .* got -0.1"),
    ("no rng_state", {"dropout_p": 0.1}, ValueError, "rng_state must be given when dropout_p > 0"),
    ("rng dtype", {"dropout_p": 0.1, "rng_state": i32(1, 2)}, TypeError, "rng_state must be int64"),
    ("rng shape", {"dropout_p": 0.1, "rng_state": zeros(3, dtype=LONG)}, ValueError,
     r"rng_state must have shape \(2\) = \(2,\), got \(3,\)"),
    ("splits", {"num_splits": -1}, ValueError,
     r"num_splits must be 0 \(automatic\) to 256, got -1"),
    ("many splits", {"num_splits": 257}, ValueError, "num_splits must .* got 257"),
    ("split_size", {"split_size": -1}, ValueError, "split_size must be at least 0.* got -1"),
    ("tiny split_size", {"k": huge(2, 8193, 2, 8), "v": huge(2, 8193, 2, 16), "split_size": 2},
     ValueError, r"split_size must be at least 3 for 8193 keys \(4096 parts\), got 2"),
    ("rows of q", {"q": huge(2, 2**29, 4096, 8)}, ValueError,
     "q can have at most 1099511627776 rows of all heads together, got 1073741824 of 4096 heads"),
    ("rows of k", {"q": huge(2, 1, 2**20, 8), "k": huge(2, 2**29, 2**20, 8),
                   "v": huge(2, 2**29, 2**20, 16)}, ValueError,
     "k can have at most .* rows"),
    ("both splits", {"split_size": 8, "num_splits": 2}, ValueError,
     "num_splits and split_size exclude each other, got 2 and 8"),
    ("pack_gqa", {"pack_gqa": 2}, ValueError, "pack_gqa must be -1 .*got 2"),
    ("hint q", {"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0, got -1"),
    ("hint k", {"max_seqlen_k": -5}, ValueError, "max_seqlen_k must be at least 0, got -5"),
]  # fmt: skip

PACKED: list[Case] = [
    ("q 4-d", {"q": zeros(2, 5, 4, 8)}, ValueError,
     r"q must .*got \(2, 5, 4, 8\) with cu_seqlens_q"),
    ("cu dtype", {"cu_seqlens_q": zeros(3, dtype=LONG)}, TypeError,
     "cu_seqlens_q must be int32, got int64"),
    ("cu 2-d", {"cu_seqlens_k": i32(0, 7, 14)[None]}, ValueError,
     r"cu_seqlens_k must have shape \(batch \+ 1\), got \(1, 3\)"),
    ("cu empty", {"cu_seqlens_q": i32()}, ValueError, r"cu_seqlens_q must .* got \(0,\)"),
    ("cu lengths", {"cu_seqlens_k": i32(0, 14)}, ValueError,
     r"cu_seqlens_k must have shape \(batch \+ 1\) = \(3,\), got \(2,\)"),
    ("cu strides", {"cu_seqlens_q": i32(0, 0, 5, 5, 10)[::2]}, ValueError,
     "cu_seqlens_q .* stride 2"),
    ("bias", {"bias": zeros(2, 4, 5, 7)}, ValueError, "bias needs dense q and k, got cu_seqlens"),
    ("cache idx", {"cache_batch_idx": i32(0, 1)}, ValueError,
     "cache_batch_idx and cu_seqlens_k exclude each other"),
    ("table", {"block_table": torch.zeros(2, 2, dtype=torch.int32)}, ValueError,
     "block_table and cu_seqlens_k exclude each other.*seqused_k"),
    ("used", {"seqused_k": i32(1, 2, 3)}, ValueError, r"seqused_k must .*\(2,\), got \(3,\)"),
]  # fmt: skip

PAGED: list[Case] = [
    ("table dtype", {"block_table": zeros(2, 3, dtype=LONG)}, TypeError,
     "block_table must be int32"),
    ("table 1-d", {"block_table": i32(1, 2)}, ValueError,
     r"block_table must have shape \(batch, pages a sequence\) = \(2, \.\.\.\), got \(2,\)"),
    ("table batch", {"block_table": torch.zeros(3, 3, dtype=torch.int32)}, ValueError,
     r"block_table must .* got \(3, 3\)"),
    ("table strides", {"block_table": torch.zeros(3, 2, dtype=torch.int32).T}, ValueError,
     "block_table .* got stride 2"),
    ("cache idx", {"cache_batch_idx": i32(0, 1)}, ValueError,
     "block_table and cache_batch_idx exclude each other"),
    ("huge pages", {"k": huge(6, 2**40, 2, 8), "v": huge(6, 2**40, 2, 16)}, ValueError,
     "batch, lengths and pages can be at most 536870912, got 1099511627776"),
    ("page size", {"k": zeros(6, 0, 2, 8), "v": zeros(6, 0, 2, 16)}, ValueError, "at least 1 row"),
]  # fmt: skip

DESCALES: list[Case] = [
    ("shape", {"q_descale": zeros(3, 2)}, ValueError,
     r"q_descale must have shape \(batch, num_heads_kv\) = \(2, 2\), got \(3, 2\)"),
    ("heads", {"k_descale": zeros(2, 4)}, ValueError, r"k_descale must .* got \(2, 4\)"),
    ("dtype", {"v_descale": zeros(2, 2, dtype=DOUBLE)}, TypeError,
     "v_descale must be float32, got float64"),
    ("bias", {"bias": zeros(2, 4, 5, 7, dtype=HALF)}, TypeError,
     "bias must be float32, got float16"),
]  # fmt: skip

DOUBLES: list[Case] = [
    ("sink", {"sink": zeros(4)}, TypeError, "sink must be float64, got float32"),
    ("slopes", {"alibi_slopes": zeros(4)}, TypeError, "alibi_slopes must be float64, got float32"),
]  # fmt: skip

FWD = [
    *[(dense_call, *case) for case in DENSE],
    *[(packed_call, *case) for case in PACKED],
    *[(paged_call, *case) for case in PAGED],
    *[(lambda: dense_call(FP8), *case) for case in DESCALES],
    *[(lambda: dense_call(DOUBLE), *case) for case in DOUBLES],
]


def bwd_call(call: dict[str, Any] | None = None) -> dict[str, Any]:
    return (call or dense_call()) | {
        "dout": zeros(2, 5, 4, 16),
        "dlse": None,
        "out": zeros(2, 5, 4, 16),
        "lse": zeros(2, 4, 5),
    }


BWD: list[Case] = [
    ("dout shape", {"dout": zeros(2, 5, 4, 8)}, ValueError,
     r"dout must have shape \(batch, seqlen_q, .* = \(2, 5, 4, 16\), got \(2, 5, 4, 8\)"),
    ("dout dtype", {"dout": zeros(2, 5, 4, 16, dtype=HALF)}, TypeError,
     "dout must be float32, got float16"),
    ("out shape", {"out": zeros(2, 4, 5, 16)}, ValueError, r"out must .* got \(2, 4, 5, 16\)"),
    ("lse shape", {"lse": zeros(2, 5, 4)}, ValueError,
     r"lse must have shape \(batch, num_heads_q, seqlen_q\) = \(2, 4, 5\), got \(2, 5, 4\)"),
    ("lse dtype", {"lse": zeros(2, 4, 5, dtype=HALF)}, TypeError,
     "lse must be float32, got float16"),
    ("dlse", {"dlse": zeros(2, 4)}, ValueError, r"dlse must .* got \(2, 4\)"),
    ("wanted", {"wanted": 32}, ValueError, r"wanted must be a sum of 1 \(dq\).* got 32"),
    ("dbias", {"wanted": 8}, ValueError, "wanted asks for dbias, but bias is not given"),
    ("dsink", {"wanted": 16}, ValueError, "wanted asks for dsink, but sink is not given"),
    ("dbias of 2^60 scores", {
        "q": huge(1, 2**29, 2, 8), "k": huge(1, 2**29, 2, 8), "v": huge(1, 2**29, 2, 16),
        "bias": zeros(1).expand(1, 1, 1, 2**29), "dout": huge(1, 2**29, 2, 16),
        "out": huge(1, 2**29, 2, 16), "lse": huge(1, 2, 2**29), "wanted": 8,
    }, ValueError, r"a gradient of bias can sum at most 2\^58 scores, got .* = 5.76461e\+17"),
    ("forward's", {"window_left": -3}, ValueError, "window_left must .* got -3"),
    ("fp8", {n: t.to(FP8) for n, t in dense_call().items()}, TypeError,
     "q must be .* in the backward, got float8_e4m3fn"),
]  # fmt: skip


def combine_call() -> dict[str, Any]:
    return {"out_partial": zeros(3, 2, 5, 4, 8), "lse_partial": zeros(3, 2, 4, 5)}


COMBINE: list[Case] = [
    ("dtype", {"out_partial": zeros(3, 2, 5, 4, 8, dtype=HALF)}, TypeError,
     "out_partial must be float32"),
    ("lse dtype", {"lse_partial": zeros(3, 2, 4, 5, dtype=DOUBLE)}, TypeError,
     "lse_partial must be float32"),
    ("ndim", {"out_partial": zeros(2, 5, 4, 8)}, ValueError,
     r"out_partial must .* got \(2, 5, 4, 8\)"),
    ("lse", {"lse_partial": zeros(3, 2, 5, 4)}, ValueError,
     r"lse_partial must have shape \(splits, batch, num_heads, seqlen\) = \(3, 2, 4, 5\), got"),
    ("strides", {"out_partial": transposed(3, 2, 5, 4, 8)}, ValueError,
     "out_partial .* got stride 4"),
    ("result", {"dtype": torch.int32}, TypeError, "dtype must be float16, .* got int32"),
]  # fmt: skip


def append_call() -> dict[str, Any]:
    return {
        "k_cache": zeros(2, 10, 2, 8),
        "v_cache": zeros(2, 10, 2, 16),
        "k": zeros(2, 3, 2, 8),
        "v": zeros(2, 3, 2, 16),
        "cache_seqlens": i32(0, 0),
    }


TABLE = torch.zeros(2, 1, dtype=torch.int32)
APPEND: list[Case] = [
    ("dtype", {"k_cache": zeros(2, 10, 2, 8, dtype=HALF)}, TypeError, "must have the same dtype"),
    ("ndim", {"k": zeros(3, 2, 8)}, ValueError, r"k must have shape .* got \(3, 2, 8\)"),
    ("v", {"v": zeros(2, 3, 2, 8)}, ValueError, r"v must .* = \(2, 3, 2, 16\), got \(2, 3, 2, 8\)"),
    ("k_cache", {"k_cache": zeros(2, 10, 4, 8)}, ValueError,
     r"k_cache must .* got \(2, 10, 4, 8\)"),
    ("v_cache", {"v_cache": zeros(2, 9, 2, 16)}, ValueError,
     r"v_cache must .* got \(2, 9, 2, 16\)"),
    ("strides", {"k": transposed(2, 3, 2, 8)}, ValueError, "k must .* got stride 2"),
    ("lengths", {"cache_seqlens": i32(0)}, ValueError, r"cache_seqlens must .* got \(1,\)"),
    ("lengths dtype", {"cache_seqlens": zeros(2, dtype=LONG)}, TypeError,
     "cache_seqlens must be int32"),
    ("expanded", {"k_cache": zeros(1, 10, 2, 8).expand(2, -1, -1, -1)}, ValueError,
     "k_cache is written to and must not be expanded, got stride 0 in dimension 0"),
    ("batch", {"k_cache": zeros(3, 10, 2, 8), "v_cache": zeros(3, 10, 2, 16)}, ValueError,
     r"k_cache must have the batch of k \(2\)"),
    ("capacity", {"k": zeros(2, 11, 2, 8), "v": zeros(2, 11, 2, 16)}, ValueError,
     "k has 11 new rows a sequence, more than the capacity of the cache, 10"),
    ("pages", {"block_table": TABLE[:1]}, ValueError, r"block_table must .* got \(1, 1\)"),
    ("both", {"block_table": TABLE, "cache_batch_idx": i32(0, 1)}, ValueError,
     "exclude each other"),
    ("cos alone", {"rotary_cos": zeros(10, 4)}, ValueError,
     "rotary_cos and rotary_sin must be given together"),
    ("cos dtype", {"rotary_cos": zeros(10, 4, dtype=HALF), "rotary_sin": zeros(10, 4)}, TypeError,
     "rotary_cos must be float32, got float16"),
    ("cos shape", {"rotary_cos": zeros(10, 5), "rotary_sin": zeros(10, 5)}, ValueError,
     r"rotary_cos must .* at most head_dim = 8, got \(10, 5\)"),
    ("sin shape", {"rotary_cos": zeros(10, 4), "rotary_sin": zeros(10, 2)}, ValueError,
     r"rotary_sin must .* got \(10, 2\)"),
]  # fmt: skip


def check_refused(name: str, call: dict[str, Any], error: type[Exception], pattern: str) -> None:
    """The same refusal from the checks, the public op and the C++ op body."""
    op_name = {"kv_append": ("kv_append_", "_kv_append_emulated_")}.get(
        name, (name, f"_{name}_emulated")
    )
    with pytest.raises(error, match=pattern) as checked:
        getattr(_C, f"check_{name}")(**call)
    text = str(checked.value)
    assert type(checked.value) is error
    with pytest.raises(error, match=re.escape(text)):
        getattr(ops, op_name[0])(**call)
    with pytest.raises(ValueError, match=re.escape(text)) as raised:
        getattr(ops, op_name[1])(**call)
    assert str(raised.value) == text
    assert _C.refusal_type(text) is error


def ids(cases: list[Any]) -> list[str]:
    return [f"{case[-4]}" for case in cases]


@pytest.mark.parametrize(("make", "what", "wrong", "error", "pattern"), FWD, ids=ids(FWD))
def test_fwd(
    make: Any, what: str, wrong: dict[str, Any], error: type[Exception], pattern: str
) -> None:
    _C.check_fwd(**make())  # right before
    check_refused("fwd", make() | wrong, error, pattern)


@pytest.mark.parametrize(("what", "wrong", "error", "pattern"), BWD, ids=ids(BWD))
def test_bwd(what: str, wrong: dict[str, Any], error: type[Exception], pattern: str) -> None:
    _C.check_bwd(**bwd_call())
    check_refused("bwd", bwd_call() | wrong, error, pattern)


@pytest.mark.parametrize(("what", "wrong", "error", "pattern"), COMBINE, ids=ids(COMBINE))
def test_combine(what: str, wrong: dict[str, Any], error: type[Exception], pattern: str) -> None:
    _C.check_combine(**combine_call())
    check_refused("combine", combine_call() | wrong, error, pattern)


@pytest.mark.parametrize(("what", "wrong", "error", "pattern"), APPEND, ids=ids(APPEND))
def test_kv_append(what: str, wrong: dict[str, Any], error: type[Exception], pattern: str) -> None:
    _C.check_kv_append(**append_call())
    check_refused("kv_append", append_call() | wrong, error, pattern)


RIGHT = [
    {"window_left": 10**12, "window_right": 10**12, "attention_chunk": 10**12},
    {"softmax_scale": 0.0},
    {"softmax_scale": -2.0},
    {"bias": zeros(1, 1, 1, 7)},
    {"bias": zeros(2, 4, 5, 1).expand(2, 4, 5, 7)},
    {"alibi_slopes": zeros(2, 4)},
    {"q": transposed(2, 5, 4, 1).expand(2, 5, 4, 1), "k": zeros(2, 7, 2, 1)},
    {"k": zeros(1, 1, 1, 8).expand(2, 7, 2, 8), "v": zeros(1, 1, 1, 16).expand(2, 7, 2, 16)},
    {"k": zeros(9, 7, 2, 8), "v": zeros(9, 7, 2, 16), "cache_batch_idx": i32(8, 3)},
    {"q": zeros(2, 0, 4, 8)},
    {"max_seqlen_q": 0, "max_seqlen_k": 3},
]


@pytest.mark.parametrize("change", RIGHT, ids=lambda c: " ".join(c))
def test_right_calls_pass(change: dict[str, Any]) -> None:
    _C.check_fwd(**(dense_call() | change))


# ---- devices


def test_a_folder_without_a_build_says_so(tmp_path: Path) -> None:
    """As a checkout that hides an installed package from a Python started in it."""
    package = Path(flash_cuda.__file__).parent
    shutil.copytree(package, tmp_path / "flash_cuda", ignore=shutil.ignore_patterns("_C*.so"))
    done = subprocess.run(
        [sys.executable, "-c", "import flash_cuda"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"flash_cuda is not built in {tmp_path / 'flash_cuda'}" in done.stderr


def test_too_many_heads() -> None:
    """More than an int holds wrapped to 0, and a division by that ended the process."""
    for heads in (2**20 + 1, 2**31, 2**32, 2**33):
        x = torch.empty(1, device="meta").expand(1, 1, heads, 8)
        with pytest.raises(ValueError, match=rf"heads of q can be at most 1048576, got {heads}"):
            _C.check_fwd(x, x, x)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_splits": 10**6},
        {"num_splits": -1},
        {"softcap": float("nan")},
        {"window_size": (-7, 0)},
        {"alibi_slopes": torch.zeros(3)},
    ],
)
def test_a_refused_call_leaves_the_cache_as_it_was(wrong: dict[str, Any]) -> None:
    cache = torch.randn(2, 2, 16, 2, 16)
    before = cache.clone()
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("_size")):
        flash_cuda.flash_attn_with_kvcache(
            q, *cache.unbind(), new, new, cache_seqlens=lengths, **wrong
        )
    assert torch.equal(cache, before)


def test_devices_must_agree() -> None:
    for name in ("k", "v", "sink", "seqused_k"):
        call = dense_call() | {"sink": zeros(4), "seqused_k": i32(1, 2)}
        call[name] = call[name].to("meta")
        pattern = rf"{name} must be on the device of q \(cpu\), got meta"
        with pytest.raises(ValueError, match=pattern):
            _C.check_fwd(**call)


@pytest.mark.gpu
def test_lengths_on_the_host_beside_cuda_tensors() -> None:
    call = packed_call()
    on_gpu = {n: t.cuda().bfloat16() if n in "qkv" else t for n, t in call.items()}
    with pytest.raises(
        ValueError, match=r"cu_seqlens_q must be on the device of q \(cuda:0\), got cpu"
    ):
        ops.fwd(**on_gpu)


@pytest.mark.gpu
def test_cuda_tensors_without_kernels() -> None:
    if _C.build_info()["folders"]:
        pytest.skip("this build has kernels")
    call = {name: t.cuda().bfloat16() for name, t in dense_call().items()}
    pattern = "built without CUDA kernels.*FLASH_CUDA_ARCHS=native"
    with pytest.raises(ValueError, match=pattern):
        ops.fwd(**call)
    with pytest.raises(NotImplementedError, match=pattern):
        flash_cuda.attention(*call.values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cpu", "emulated:sm80"])
def test_overrides_for_cpu_tensors_refuse_cuda_tensors(name: str) -> None:
    call = {name: t.cuda().bfloat16() for name, t in dense_call().items()}
    pattern = f"override '{name}' serves CPU tensors, got q on cuda:0"
    with flash_cuda.use_kernel(name), pytest.raises(ValueError, match=pattern):
        ops.fwd(**call)


WRONG_TYPES = [
    ({"softmax_scale": "x"}, r"softmax_scale must be a number, got 'x' \(str\)"),
    ({"softmax_scale": [1]}, r"softmax_scale must be a number, got \[1\] \(list\)"),
    ({"softcap": 1j}, r"softcap must be a number, got 1j \(complex\)"),
    ({"dropout_p": "x"}, "dropout_p must be a number, got 'x'"),
    ({"window": "ab"}, "window must be an integer, got 'a'"),
    ({"attention_chunk": 2.0}, r"attention_chunk must be an integer, got 2.0 \(float\)"),
    ({"num_splits": 2**64}, "num_splits must be an integer of 64 bits, got 18446744073709551616"),
    ({"pack_gqa": "x"}, r"pack_gqa must be True, False or None, got 'x' \(str\)"),
    ({"bias": 3}, r"bias must be a tensor, got 3 \(int\)"),
    ({"sink": 3}, r"sink must be a tensor, got 3 \(int\)"),
    ({"alibi_slopes": [1, 2]}, r"alibi_slopes must be a tensor, got \[1, 2\] \(list\)"),
]


@pytest.mark.parametrize(("wrong", "pattern"), WRONG_TYPES, ids=[str(c[0]) for c in WRONG_TYPES])
def test_arguments_of_another_type_are_named(wrong: dict[str, Any], pattern: str) -> None:
    with pytest.raises(TypeError, match=pattern):
        flash_cuda.attention(**dense_call(), **wrong)
    explained = flash_cuda.explain(**dense_call(), **wrong)
    assert not explained.served
    assert explained.reason.startswith(next(iter(wrong)))


@pytest.mark.parametrize("value", [None, "q", [1.0], 3])
def test_what_is_no_tensor_is_named(value: Any) -> None:
    q, k, v = dense_call().values()
    packed = packed_call()
    for name, call in (
        ("q", lambda: flash_cuda.attention(value, k, v)),
        ("k", lambda: flash_cuda.attention(q, value, v)),
        ("q", lambda: flash_cuda.attention_varlen(**packed | {"q": value})),
        ("q", lambda: flash_cuda.attention_decode(value, k, v, cache_seqlens=3)),
        ("k_cache", lambda: flash_cuda.attention_decode(q, value, v)),
        ("q", lambda: flash_cuda.flash_attn_with_kvcache(value, k, v)),
        ("q", lambda: flash_cuda.flash_attn_func(value, k, v)),
        ("v", lambda: flash_cuda.flash_attn_func(q, k, value, softcap=1.0)),
        ("qkv", lambda: flash_cuda.flash_attn_qkvpacked_func(value)),
        ("kv", lambda: flash_cuda.flash_attn_kvpacked_func(q, value)),
        (
            "k",
            lambda: flash_cuda.flash_attn_varlen_func(
                packed["q"], value, packed["v"], i32(0, 5, 10), i32(0, 7, 14), 5, 7
            ),
        ),
    ):
        with pytest.raises(TypeError, match=f"^{name} must be a tensor, got"):
            call()


def test_a_length_beyond_32_bits_is_named() -> None:
    with pytest.raises(ValueError, match="cache_seqlens must be 0 to 2147483647, got 1099"):
        flash_cuda.attention_decode(*dense_call().values(), cache_seqlens=2**40)


@pytest.mark.parametrize("name", ["q", "v", "bias"])
def test_tensors_of_other_layouts_are_named(name: str) -> None:
    call = dense_call() | {"bias": zeros(2, 4, 5, 7)}
    for change, words in (
        (lambda t: t.to_sparse(), "torch.sparse_coo"),
        (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "quantized"),
    ):
        wrong = call | {name: change(call[name])}
        with pytest.raises(TypeError, match=f"{name} must be a plain dense tensor, got a {words}"):
            flash_cuda.attention(**wrong)


# ---- values

# Those that every backend cuts to fit are refused in the debug mode alone; with the others memory
# outside of a tensor would be read, and on the CPU they are always refused.
CUT_TO_FIT = ("max_seqlen_q", "seqused_k", "seqused_q")
VALUES = [
    (packed_call, {"cu_seqlens_q": i32(1, 5, 10)}, "cu_seqlens_q must start with 0, got 1"),
    (packed_call, {"cu_seqlens_k": i32(0, 8, 7)},
     "cu_seqlens_k must not decrease, got 8 before 7 at 2"),
    (packed_call, {"cu_seqlens_k": i32(0, 7, 15)},
     "cu_seqlens_k must end at most at .* 14, got 15"),
    (packed_call, {"max_seqlen_q": 4},
     "max_seqlen_q must be at least every length, got 4 and a length of 5"),
    (packed_call, {"seqused_k": i32(3, 8)}, "seqused_k must be 0 to .* 7, got 8 for sequence 1"),
    (dense_call, {"seqused_q": i32(-1, 2)}, "seqused_q must be 0 to .* 5, got -1 for sequence 0"),
    (dense_call, {"leftpad_k": i32(0, 8)},
     "leftpad_k must be at most the length .* 7, got 8 for sequence 1"),
    (dense_call, {"leftpad_k": i32(0, -1)}, "leftpad_k must be at least 0, got -1 for sequence 1"),
    (dense_call, {"cache_batch_idx": i32(0, 2)},
     "cache_batch_idx must be 0 to 1, got 2 for sequence 1"),
    (paged_call, {"block_table": torch.tensor([[0, 1, 6], [5, 9, 9]], dtype=torch.int32)},
     r"block_table must hold pages 0 to 5, got 6 at \(0, 2\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "wrong", "pattern"), VALUES, ids=[str(list(v[1])) for v in VALUES]
)
def test_values(
    make: Any, wrong: dict[str, Any], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = make() | wrong
    monkeypatch.delenv("FLASH_CUDA_DEBUG", raising=False)
    if next(iter(wrong)) in CUT_TO_FIT or "at most the length" in pattern:
        _C.check_fwd(**call)
    else:
        with pytest.raises(ValueError, match=pattern):
            ops.fwd(**call)
    monkeypatch.setenv("FLASH_CUDA_DEBUG", "1")
    _C.check_fwd(**make())
    for function in (_C.check_fwd, ops.fwd, ops._fwd_emulated):
        with pytest.raises(ValueError, match=pattern):
            function(**call)


APPEND_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"cache_seqlens": i32(0, 8)}, "cache_seqlens must .* 3 new keys .* 10, got 8 for sequence 1"),
    ({"cache_seqlens": i32(-1, 0)}, "cache_seqlens must leave room .* got -1 for sequence 0"),
    ({"cache_batch_idx": i32(1, 2)}, "cache_batch_idx must be 0 to 1, got 2 for sequence 1"),
    ({"block_table": TABLE + 2}, r"block_table must hold pages 0 to 1, got 2 at \(0, 0\)"),
    ({"rotary_cos": zeros(2, 4), "rotary_sin": zeros(2, 4)},
     r"rotary_cos must have a row for each position, 3 of them, got \(2, 4\)"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "pattern"), APPEND_VALUES, ids=[str(list(v[0])) for v in APPEND_VALUES]
)
def test_values_of_kv_append(
    wrong: dict[str, Any], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU they are always checked."""
    for function in (_C.check_kv_append, ops.kv_append_):
        with pytest.raises(ValueError, match=pattern):
            function(**(append_call() | wrong))
    monkeypatch.setenv("FLASH_CUDA_DEBUG", "1")
    with pytest.raises(ValueError, match=pattern):
        ops._kv_append_emulated_(**(append_call() | wrong))


# ---- what is not served, and what is no call at all


def test_an_unknown_name_in_the_environment() -> None:
    code = "import flash_cuda, torch; flash_cuda.attention(*[torch.ones(1, 2, 1, 8)] * 3)"
    environment = os.environ | {"FLASH_CUDA_KERNEL": "sm70"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "ValueError: the kernel override must be sm80, sm90" in run.stderr


def test_without_kernels_cuda_says_how_to_build_them() -> None:
    if _C.build_info()["folders"]:
        pytest.skip("this build has kernels")
    with flash_cuda.use_kernel(""):
        text = _C.explain_fwd(90, **dense_call())["text"]
    assert "serves CPU tensors only" in text
    assert "FLASH_CUDA_ARCHS=native pip install" in text


@pytest.mark.parametrize("name", ["sm80", "sm90", "sm100"])
def test_kernels_of_gpus_do_not_serve_cpu_tensors(name: str) -> None:
    with flash_cuda.use_kernel(name), pytest.raises(NotImplementedError, match=f"'{name}'"):
        ops.fwd(**dense_call())


@pytest.mark.parametrize("name", ["cpu", "emulated:sm90"])
def test_cpu_kernels_do_not_serve_gpus(name: str) -> None:
    with flash_cuda.use_kernel(name):
        explanation = _C.explain_fwd(90, **dense_call())
    assert f"the kernel override '{name}' serves CPU tensors, got q on cuda" in explanation["text"]


def test_arguments_that_no_op_has() -> None:
    with pytest.raises(TypeError, match="causal"):
        _C.check_fwd(**dense_call(), causal=True)
    with pytest.raises(TypeError, match="q must be a tensor, got None"):
        _C.check_fwd(None, None, None)
    with pytest.raises(TypeError, match="too many by position"):
        _C.check_combine(*combine_call().values(), None, 1)
