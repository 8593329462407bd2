"""Wrong calls of the ops: arguments to replace, the error, and its text."""

from __future__ import annotations

from typing import Any

import torch

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
