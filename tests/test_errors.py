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
from tests.error_cases import (
    APPEND,
    BWD,
    COMBINE,
    FWD,
    TABLE,
    append_call,
    bwd_call,
    combine_call,
    dense_call,
    i32,
    packed_call,
    paged_call,
    transposed,
    zeros,
)

ops = torch.ops.flash_cuda

ops = torch.ops.flash_cuda


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
