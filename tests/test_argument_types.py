"""Every argument of every public function with values that nobody should pass.

Each is either taken, where it means the right thing, or refused by a TypeError, ValueError or
NotImplementedError that names it. Nothing else may come out, least of all an error of torch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flash_cuda
from flash_cuda.compat import fa2, fa3, fa4, sdpa, transformers

B, S, K, H, G, D = 2, 5, 7, 4, 2, 8
REFUSALS = (TypeError, ValueError, NotImplementedError)
Call = dict[str, Any]


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense() -> Call:
    return {"q": zeros(B, S, H, D), "k": zeros(B, K, G, D), "v": zeros(B, K, G, D)}


def packed() -> Call:
    return {
        "q": zeros(10, H, D), "k": zeros(14, G, D), "v": zeros(14, G, D),
        "cu_seqlens_q": i32(0, 5, 10), "cu_seqlens_k": i32(0, 7, 14),
    }  # fmt: skip


def cached(lengths: Tensor | int) -> Call:
    caches = {"k_cache": zeros(B, 16, G, D), "v_cache": zeros(B, 16, G, D)}
    return {"q": zeros(B, S, H, D), **caches, "cache_seqlens": lengths}


def appended() -> Call:
    new = {"k": zeros(B, S, G, D), "v": zeros(B, S, G, D)}
    rotary = {"rotary_cos": zeros(32, D // 2), "rotary_sin": zeros(32, D // 2)}
    return cached(i32(7, 9)) | new | rotary


def partials() -> Call:
    return {"out_partial": zeros(3, B, S, H, D), "lse_partial": zeros(3, B, S, H)}


def heads_first(heads: int) -> Call:
    return {
        "query": zeros(B, H, S, D),
        "key": zeros(B, heads, S, D),
        "value": zeros(B, heads, S, D),
    }


def enter_kernel(name: Any) -> None:
    with flash_cuda.use_kernel(name):
        pass


def private(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """FlashAttention-2's private functions have no defaults."""
    return lambda **call: function(**(fixed | call))


FA2_OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size_left": -1,
    "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None,
}  # fmt: skip
PUBLIC: dict[str, tuple[Callable[..., Any], Callable[[], Call]]] = {
    "attention": (flash_cuda.attention, dense),
    "attention_varlen": (flash_cuda.attention_varlen, packed),
    "attention_decode": (flash_cuda.attention_decode, lambda: cached(i32(7, 9))),
    "explain": (flash_cuda.explain, lambda: dense() | {"device": "cpu"}),
    "merge": (flash_cuda.merge, lambda: dict.fromkeys(
        ("first", "second"), (zeros(B, S, H, D), zeros(B, H, S)))),
    "use_kernel": (enter_kernel, lambda: {"name": "cpu"}),
    "flash_attn_func": (flash_cuda.flash_attn_func, dense),
    "kvpacked": (flash_cuda.flash_attn_kvpacked_func,
                 lambda: {"q": zeros(B, S, H, D), "kv": zeros(B, K, 2, G, D)}),
    "qkvpacked": (flash_cuda.flash_attn_qkvpacked_func, lambda: {"qkv": zeros(B, S, 3, H, D)}),
    "varlen": (flash_cuda.flash_attn_varlen_func, packed),
    "varlen_kvpacked": (flash_cuda.flash_attn_varlen_kvpacked_func, lambda: {
        "q": zeros(10, H, D), "kv": zeros(14, 2, G, D),
        "cu_seqlens_q": i32(0, 5, 10), "cu_seqlens_k": i32(0, 7, 14)}),
    "varlen_qkvpacked": (flash_cuda.flash_attn_varlen_qkvpacked_func,
                         lambda: {"qkv": zeros(10, 3, H, D), "cu_seqlens": i32(0, 5, 10)}),
    "with_kvcache": (flash_cuda.flash_attn_with_kvcache, appended),
    "with_kvcache of a number": (flash_cuda.flash_attn_with_kvcache, lambda: cached(5)),
    "fa2 forward": (private(fa2._flash_attn_forward, **FA2_OPTIONS), dense),
    "fa2 backward": (
        private(fa2._flash_attn_backward, **FA2_OPTIONS, deterministic=False, dk=None, dv=None),
        lambda: dense() | {"dout": zeros(B, S, H, D), "out": zeros(B, S, H, D),
                           "softmax_lse": zeros(B, H, S), "dq": zeros(B, S, H, D)}),
    "fa3": (fa3.flash_attn_func, dense),
    "fa3 qkvpacked": (fa3.flash_attn_qkvpacked_func, lambda: {"qkv": zeros(B, S, 3, H, D)}),
    "fa3 combine": (fa3.flash_attn_combine, partials),
    "fa3 kvcache": (fa3.flash_attn_with_kvcache, lambda: cached(5)),
    "fa4": (fa4.flash_attn_func, dense),
    "fa4 varlen": (fa4.flash_attn_varlen_func, packed),
    "fa4 combine": (fa4.flash_attn_combine, partials),
    "sdpa": (sdpa.scaled_dot_product_attention, lambda: heads_first(H)),
    "transformers": (transformers.attention,
                     lambda: {"module": nn.Module(), "attention_mask": None} | heads_first(G)),
}  # fmt: skip
# What errors call an argument of the adapters and of packed tensors, besides its own name.
ALSO_CALLED = {
    "qkv": ("q must", "k and v", "head_dim", "cu_seqlens_q", "k must"),
    "kv": ("k must", "k and v", "head_dim", "cu_seqlens_k"),
    "k_cache": ("k must", "k and v", "k_cache and v_cache"),
    "v_cache": ("v must", "k and v", "head_dim_v"),
    "value": ("head_dim_v",),
    "block_table": ("k must", "capacity"), "page_table": ("block_table", "k must", "capacity"),
    "cu_seqlens_q": ("batch",), "cu_seqlens": ("cu_seqlens_q",),
    "cache_seqlens": ("seqused_k",), "cache_leftpad": ("leftpad_k",),
    "learnable_sink": ("sink",), "softmax_lse": ("lse",), "window_size": ("window",),
    "window_size_left": ("window",), "window_size_right": ("window",),
    "out": ("dtype",), "name": ("the kernel override",), "out_dtype": ("dtype",),
    "out_partial": ("lse_partial",), "seqused_k": ("cache_seqlens",),
    "rotary_cos": ("rotary_sin",), "rotary_sin": ("rotary_cos",),
}  # fmt: skip
EXPLAINED = (
    "q", "k", "v", "backward", "causal", "window", "softcap", "softmax_scale", "bias", "sink",
    "alibi_slopes", "cu_seqlens_q", "seqused_k", "cache_seqlens", "block_table", "leftpad_k", "qv",
    "q_descale", "dropout_p", "num_splits", "split_size", "pack_gqa", "strict", "deterministic",
    "top_left", "max_seqlen_q", "attention_chunk",
)  # fmt: skip


class Odd:
    """An object that is nothing."""


def odd_values(right: Any) -> dict[str, Any]:
    """Values of every type, and if the right one is a tensor, tensors of every kind."""
    values: dict[str, Any] = {
        "None": None, "str": "x", "3": 3, "-5": -5, "2^70": 2**70, "2^62": 2**62,
        "nan": float("nan"), "inf": float("inf"), "1.5": 1.5, "1j": 1j, "list": [1, 2], "dict": {},
        "object": Odd(), "class": Odd, "int64": np.int64(3), "float32": np.float32(0.5),
        "bool_": np.bool_(True), "array": np.ones(3), "True": True, "()": (),
        "(1, 2, 3)": (1, 2, 3),
        "(a, b)": ("a", "b"), "(nan, 0)": (float("nan"), 0), "(2^70, 0)": (2**70, 0),
        "0-d": torch.tensor(1.0), "0-d int": torch.tensor(2), "empty": torch.empty(0),
        "1-d": torch.ones(3), "flags": torch.ones(2, dtype=torch.bool), "2-d": torch.ones(2, 3),
        "9-d": torch.ones([1] * 9), "dtype": torch.float16, "device": torch.device("cpu"),
    }  # fmt: skip
    if isinstance(right, Tensor):
        types = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
                 torch.uint16, torch.complex64)  # fmt: skip
        values |= {str(dtype): right.to(dtype) for dtype in types}
        values |= {
            "meta": right.to("meta"), "a dimension less": right[0], "one more": right[None],
            "no rows": right[:0], "no columns": right[..., :0],
            "one for all": right[:1].expand(right.shape),
            "strided": torch.stack([right, right], -1)[..., 0], "sparse": right.to_sparse(),
        }  # fmt: skip
        if right.is_floating_point():
            values |= {"parameter": nn.Parameter(right), "negated": torch._neg_view(right)}
        if right.dim() > 1:
            layout = torch.jagged
            values["nested"] = torch.nested.nested_tensor([right[0], right[0]], layout=layout)
    return values


def names_it(text: str, argument: str) -> bool:
    return any(name in text for name in (argument, *ALSO_CALLED.get(argument, ())))


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.filterwarnings("ignore")
def test_odd_values_are_taken_or_named(name: str) -> None:
    function, make = PUBLIC[name]
    arguments = dict(make())
    if name == "explain":
        arguments = dict.fromkeys(EXPLAINED)
    elif not name.startswith("fa2"):
        kinds = inspect.signature(function).parameters.values()
        arguments |= dict.fromkeys(p.name for p in kinds if p.kind is not p.VAR_KEYWORD)
    else:
        arguments |= dict.fromkeys(FA2_OPTIONS)
    faults = []
    for argument in arguments:
        for what, value in odd_values(make().get(argument)).items():
            try:
                result = function(**(make() | {argument: value}))
                if isinstance(result, flash_cuda.Explanation) and not result.served:
                    raise ValueError(result.reason)
            except REFUSALS as refusal:
                if not names_it(str(refusal), argument) and what != "nested":
                    faults.append(f"{argument}={what}: does not name it: {refusal}")
            except Exception as error:
                faults.append(f"{argument}={what}: {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("value", ["False", None, 2, "", [], np.ones(2)], ids=repr)
@pytest.mark.parametrize("name", ["causal", "top_left", "strict", "deterministic", "return_lse"])
def test_a_flag_is_true_or_false(name: str, value: Any) -> None:
    """A string that says False is true to Python."""
    with pytest.raises(TypeError, match=f"{name} must be True or False, got"):
        flash_cuda.attention(**dense(), **{name: value})


def test_numbers_of_numpy_and_tensors_of_one_are_numbers() -> None:
    q, k, v = (torch.randn(t.shape) for t in dense().values())
    want = flash_cuda.attention(q, k, v, causal=True, window=(2, 0), softmax_scale=0.5, softcap=3.0)
    for one in (np.float32, np.float64, torch.tensor):
        out = flash_cuda.attention(
            q, k, v, causal=np.bool_(True), window=(np.int64(2), torch.tensor(0)),
            softmax_scale=one(0.5), softcap=one(3.0), num_splits=np.int32(0),
        )  # fmt: skip
        assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_a_number_that_wants_a_gradient_is_refused(name: str) -> None:
    """It would get none, in silence."""
    number = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(NotImplementedError, match=f"{name} must not require a gradient"):
        flash_cuda.attention(**dense(), **{name: number})
    with torch.no_grad():
        flash_cuda.attention(**dense(), **{name: number})


@pytest.mark.parametrize("softcap", [1e-30, 1e-25])
def test_a_scale_that_softcap_cannot_divide_is_refused(softcap: float) -> None:
    """Kernels keep their ratio in float32: infinite, it would make NaN of a logit of 0."""
    with pytest.raises(ValueError, match=r"softmax_scale must be at most 1e\+30 times softcap"):
        flash_cuda.attention(**dense(), softmax_scale=1e10, softcap=softcap)


@pytest.mark.parametrize("length", [-1, 17, 2**40])
def test_a_length_that_the_cache_has_not_is_refused(length: int) -> None:
    for function in (flash_cuda.attention_decode, flash_cuda.flash_attn_with_kvcache):
        with pytest.raises(ValueError, match=f"cache_seqlens .*{length}"):
            function(**cached(length))
    flash_cuda.attention_decode(**cached(16))


def test_caches_must_not_overlap() -> None:
    call = appended()
    memory = torch.zeros(B * 16 * G * D * 2)
    shape = call["k_cache"].shape
    both = memory.view(B, 16, 2, G, D)  # keys beside values in one buffer
    flash_cuda.flash_attn_with_kvcache(
        **call | {"k_cache": both[:, :, 0], "v_cache": both[:, :, 1]}
    )
    shifted = memory.as_strided(shape, (G * D, G * D, D, 1))
    with pytest.raises(ValueError, match="k_cache is written to and its rows must not overlap"):
        flash_cuda.flash_attn_with_kvcache(**call | {"k_cache": shifted})
    with pytest.raises(ValueError, match=r"k_cache and v_cache .* not be the same tensor"):
        flash_cuda.flash_attn_with_kvcache(**call | {"v_cache": call["k_cache"]})


def test_results_are_not_broadcast_into_a_larger_tensor() -> None:
    with pytest.raises(ValueError, match=r"out must have shape \(2, 5, 4, 8\), got \(3, 2, 5"):
        fa3.flash_attn_combine(**partials(), out=torch.zeros(3, B, S, H, D))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e5m2fnuz])
def test_dtypes_are_named(dtype: torch.dtype) -> None:
    call = {name: t.to(dtype) for name, t in dense().items()}
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"q must be float16, .* got {name}"):
        flash_cuda.attention(**call)
    with pytest.raises(ValueError, match=f"q must be float16, .* got {name}"):
        torch.ops.flash_cuda._fwd_emulated(**call)
