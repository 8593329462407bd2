"""The whole way of a call through C++ without a GPU: arguments, plan, params, launch, results.

tests/cpp/fake_kernels.cpp is loaded as a library of emulated kernels. They are plain loops over
the params in float32, so the results equal the CPU engine's only if the binding has told them
every pointer, stride, size and option right.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_cuda
from flash_cuda import _C

from .cpp.test_cpp import HERE as CPP
from .cpp.test_cpp import compile_cpp

ops = torch.ops.flash_cuda
INF = float("inf")


@pytest.fixture(scope="module", autouse=True)
def fake_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    library = tmp_path_factory.mktemp("fake") / "fake_kernels.so"
    compile_cpp([CPP / "fake_kernels.cpp"], library, "-fPIC", "-shared", "-static-libubsan")
    assert _C.load_emulated(str(library), num_sms=4) == 80
    before = _C.set_override("emulated:sm80")
    yield
    _C.set_override(before)
    _C.unload_emulated(str(library))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(
    batch: int = 2, seqlen_q: int = 9, seqlen_kv: int = 13, heads: int = 4, heads_kv: int = 2,
    dim: int = 16, dim_v: int = 24,
) -> dict[str, Any]:  # fmt: skip
    return {
        "q": torch.randn(batch, seqlen_q, heads, dim),
        "k": torch.randn(batch, seqlen_kv, heads_kv, dim),
        "v": torch.randn(batch, seqlen_kv, heads_kv, dim_v),
    }


def packed(cu_q: tuple[int, ...], cu_k: tuple[int, ...]) -> dict[str, Any]:
    return {
        "q": torch.randn(cu_q[-1], 4, 16),
        "k": torch.randn(cu_k[-1], 2, 16),
        "v": torch.randn(cu_k[-1], 2, 24),
        "cu_seqlens_q": i32(*cu_q),
        "cu_seqlens_k": i32(*cu_k),
    }


def on_engine(op: Any, *args: Any, **kwargs: Any) -> Any:
    with flash_cuda.use_kernel("cpu"):
        return op(*args, **kwargs)


def check_close(ours: torch.Tensor, right: torch.Tensor, what: str) -> None:
    assert (ours.shape, ours.dtype) == (right.shape, right.dtype), what
    assert ours.is_contiguous(), what
    torch.testing.assert_close(ours, right, atol=2e-5, rtol=2e-5, msg=lambda m: f"{what}: {m}")


def check_fwd(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = ops.fwd(**call)
    right = on_engine(ops.fwd, **call)
    check_close(out, right[0], "out")
    check_close(lse, right[1], "lse")
    return out, lse


def check_bwd(wanted: int = 7, dlse: bool = True, **call: Any) -> tuple[torch.Tensor, ...]:
    out, lse = on_engine(ops.fwd, **call)
    call = {"deterministic": False, "wanted": wanted, **call}
    dout = torch.randn_like(out)
    grad_lse = torch.randn_like(lse) if dlse else None
    ours = ops.bwd(dout=dout, dlse=grad_lse, out=out, lse=lse, **call)
    right = on_engine(ops.bwd, dout=dout, dlse=grad_lse, out=out, lse=lse, **call)
    for name, a, b in zip(("dq", "dk", "dv", "dbias", "dsink"), ours, right, strict=True):
        check_close(a, b, name)
    return ours


SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": -0.3},
    "causal": {"window_right": 0},
    "window": {"window_left": 3, "window_right": 2},
    "top_left": {"window_right": 0, "top_left": True},
    "chunk": {"attention_chunk": 4},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.rand(4)},
    "alibi_batch": {"alibi_slopes": torch.rand(2, 4)},
    "sink": {"sink": torch.randn(4), "window_right": 0},
    "bias": {"bias": torch.randn(2, 4, 9, 13)},
    "bias_broadcast": {"bias": torch.randn(1, 4, 1, 13)},
    "bias_rows": {"bias": torch.randn(2, 1, 9, 26)[..., ::2]},
}
SPLITS = [{"num_splits": 1}, {"num_splits": 3}, {"split_size": 5}, {}]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_fwd_scores(name: str, splits: dict[str, int]) -> None:
    check_fwd(**dense(), **SCORES[name], **splits)


@pytest.mark.parametrize("name", SCORES)
def test_bwd_scores(name: str) -> None:
    scores = SCORES[name]
    wanted = 7 + 8 * ("bias" in scores) + 16 * ("sink" in scores)
    check_bwd(wanted, **dense(), **scores)


@pytest.mark.parametrize("wanted", range(32))
def test_bwd_gives_what_is_wanted(wanted: int) -> None:
    call = dense() | {"bias": torch.randn(2, 1, 9, 13), "sink": torch.randn(4)}
    grads = check_bwd(wanted, dlse=wanted % 2 == 0, **call)
    for bit, grad in enumerate(grads):
        assert (grad.numel() > 0) == bool(wanted >> bit & 1)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_qv(splits: dict[str, int]) -> None:
    call = dense()
    check_fwd(**call, qv=torch.randn(2, 9, 4, 24), **splits)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("hints", [{}, {"max_seqlen_q": 5, "max_seqlen_k": 7}], ids=str)
def test_packed(splits: dict[str, int], hints: dict[str, int]) -> None:
    call = packed((0, 4, 4, 9), (0, 7, 10, 10)) | hints
    _, lse = check_fwd(**call, window_right=0, **splits)
    assert (lse == -INF).any()
    check_bwd(**call, window_right=0)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_packed_with_gaps_and_rest(splits: dict[str, int]) -> None:
    call = packed((0, 4, 9), (0, 7, 10)) | {"seqused_q": i32(3, 5), "seqused_k": i32(0, 2)}
    for name, rows in (("q", 2), ("k", 3), ("v", 3)):  # rows behind the last sequence
        call[name] = torch.cat((call[name], torch.full((rows, *call[name].shape[1:]), INF)))
    out, lse = check_fwd(**call, **splits)
    assert (out[-2:] == 0).all()
    assert (lse[:, -2:] == -INF).all()
    check_bwd(**call)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_cache(splits: dict[str, int]) -> None:
    call = dense(batch=2, seqlen_q=3)
    for name in ("k", "v"):
        call[name] = torch.randn(5, 13, *call[name].shape[2:])
    call |= {"cache_batch_idx": i32(4, 1), "seqused_k": i32(12, 5), "leftpad_k": i32(2, 0)}
    check_fwd(**call, window_right=0, **splits)
    # Columns of bias count from the first key that counts.
    check_fwd(**call, bias=torch.randn(2, 4, 3, 13), **splits)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("packed_q", [False, True])
def test_pages(packed_q: bool, splits: dict[str, int]) -> None:
    call = dense(seqlen_q=3)
    for name in ("k", "v"):
        call[name] = torch.randn(6, 4, *call[name].shape[2:])
    table = torch.tensor([[5, 0, 3, -7], [2, -1, 99, 99]], dtype=torch.int32)
    call |= {"block_table": table, "seqused_k": i32(10, 4)}
    if packed_q:
        call |= {"q": torch.randn(4, 4, 16), "cu_seqlens_q": i32(0, 1, 4)}
    check_fwd(**call, window_right=0, **splits)
    if not packed_q:
        check_fwd(**call, bias=torch.randn(2, 4, 3, 16), **splits)


def strided(name: str, call: dict[str, Any]) -> dict[str, Any]:
    if name == "head_major":
        return call | {n: call[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    if name == "sliced":
        return call | {
            n: torch.randn(*call[n].shape[:-1], 40)[..., : call[n].shape[-1]] for n in "qkv"
        }
    if name == "broadcast":
        return call | {n: call[n][:1, :, :1].expand_as(call[n]) for n in "kv"}
    # Strides of dimensions of one element mean nothing.
    return {n: t[:1].as_strided(t[:1].shape, (1, *t.stride()[1:])) for n, t in call.items()}


@pytest.mark.parametrize("name", ["head_major", "sliced", "broadcast", "single"])
def test_strides(name: str) -> None:
    call = strided(name, dense())
    check_fwd(**call)
    check_fwd(**call, num_splits=2)
    check_bwd(**call)


@pytest.mark.parametrize("dlse_strided", [False, True])
def test_strides_of_gradients(dlse_strided: bool) -> None:
    call = dense()
    out, lse = on_engine(ops.fwd, **call)
    dlse = torch.randn(4, 9, 2).permute(2, 0, 1) if dlse_strided else torch.ones(()).expand_as(lse)
    for dout in (torch.ones(()).expand_as(out), torch.randn(2, 9, 24, 4).transpose(2, 3)):
        saved = {"out": out.transpose(2, 3).contiguous().transpose(2, 3), "lse": lse}
        ours = ops.bwd(dout=dout, dlse=dlse, **saved, **call)
        right = on_engine(ops.bwd, dout=dout, dlse=dlse, **saved, **call)
        for a, b in zip(ours, right, strict=True):
            check_close(a, b, "gradient")


SIZES_OF_NOTHING = {
    "no batch": {"batch": 0},
    "no queries": {"seqlen_q": 0},
    "no keys": {"seqlen_kv": 0},
    "nothing": {"seqlen_q": 0, "seqlen_kv": 0},
}


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("name", SIZES_OF_NOTHING)
def test_empty(name: str, with_sink: bool) -> None:
    call = dense(**SIZES_OF_NOTHING[name])
    if with_sink:
        call["sink"] = torch.randn(4)
    for used in ({}, {"seqused_q": torch.full((call["q"].shape[0],), 5, dtype=torch.int32)}):
        if call["q"].shape[1] < 5:
            used = {}
        check_fwd(**call, **used)
        for dlse in (False, True):
            check_bwd(7 + 16 * with_sink, dlse, **call, **used)


@pytest.mark.parametrize("with_sink", [False, True])
def test_empty_packed_and_paged(with_sink: bool) -> None:
    sink = {"sink": torch.randn(4)} if with_sink else {}
    call = packed((0, 3, 5), (0, 0, 0)) | sink
    check_fwd(**call)
    check_bwd(7 + 16 * with_sink, **call)
    no_sequence = packed((0,), (0,)) | {"q": torch.randn(3, 4, 16)}
    check_fwd(**no_sequence, **sink)
    rest = packed((0, 0, 0), (0, 3, 5)) | {"q": torch.randn(3, 4, 16), "max_seqlen_q": 0}
    check_fwd(**rest, **sink)
    check_bwd(**rest)
    pages = dense() | {"k": torch.randn(0, 4, 2, 16), "v": torch.randn(0, 4, 2, 24)} | sink
    check_fwd(**pages, block_table=torch.zeros(2, 0, dtype=torch.int32), seqused_k=i32(0, 0))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_combine(dtype: torch.dtype | None) -> None:
    out, lse = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4).transpose(2, 3)
    lse[0] = lse[1, 0] = lse[2, 0] = -INF
    ours, right = ops.combine(out, lse, dtype), on_engine(ops.combine, out, lse, dtype)
    check_close(ours[0], right[0], "out")
    check_close(ours[1], right[1], "lse")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["rows", "indexed", "pages"])
def test_kv_append(layout: str, interleaved: bool) -> None:
    k, v = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 24)
    caches = torch.randn(6, 8, 2, 16), torch.randn(6, 8, 2, 24)
    options: dict[str, Any] = {"cache_seqlens": i32(5, 0)}
    if layout == "rows":
        caches = caches[0][:2], caches[1][:2]
    elif layout == "indexed":
        options["cache_batch_idx"] = i32(3, 0)
    else:
        caches = caches[0].reshape(12, 4, 2, 16), caches[1].reshape(12, 4, 2, 24)
        options["block_table"] = torch.tensor([[3, 11], [0, 7]], dtype=torch.int32)
    angles = torch.rand(8, 4)
    options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    options["rotary_interleaved"] = interleaved
    right = [c.clone() for c in caches]
    on_engine(ops.kv_append_, *right, k, v, **options)
    ops.kv_append_(*caches, k, v, **options)
    for ours, expected in zip(caches, right, strict=True):
        torch.testing.assert_close(ours, expected)


# ---- which kernel


def kernel_of(**call: Any) -> dict[str, Any]:
    explanation: dict[str, Any] = _C.explain_fwd(0, **call)
    assert explanation["served"], explanation["refusal"]
    return explanation


def test_explain_shows_the_plan() -> None:
    many = dense(batch=4, seqlen_q=200, seqlen_kv=200)
    assert kernel_of(**many)["kernel"] == "fake_fwd"
    assert not kernel_of(**many)["split"]
    step = dense(batch=1, seqlen_q=1, seqlen_kv=1000, heads=4, heads_kv=1)
    plan = kernel_of(**step)
    assert plan["kernel"] == "fake_decode"
    assert plan["split"]
    assert plan["pack_gqa"]
    assert plan["num_splits"] == _C.plan_num_splits(1, 4, 1, 1, 1000, 4, 16, 4, True) > 1
    partials = 4 * plan["num_splits"] * 4 * (24 + 1)
    assert plan["workspace_bytes"] == 1000 + partials
    assert not kernel_of(**step, num_splits=1)["split"]
    assert kernel_of(**step, split_size=300)["num_splits"] == 4
    assert kernel_of(**step, pack_gqa=0)["pack_gqa"] is False
    assert "merged by combine" in plan["text"]
    bwd = {"dout": torch.randn(4, 200, 4, 24), "out": torch.randn(4, 200, 4, 24)}
    bwd |= {"lse": torch.randn(4, 4, 200), "dlse": None}
    assert _C.explain_bwd(0, **bwd, **many)["kernel"] == "fake_bwd"
    assert kernel_of(**dense(seqlen_kv=0))["kernel"] == "none needed"


def test_refusals_name_reason_and_nearest_call() -> None:
    call = dense(dim=160)
    explanation = _C.explain_fwd(0, **call)
    assert not explanation["served"]
    assert "sm80: head_dim/head_dim_v up to 128/128, got 160/24" in explanation["refusal"]
    with pytest.raises(ValueError, match="got 160/24") as raised:
        ops._fwd_emulated(**call)
    assert _C.refusal_type(str(raised.value)) is NotImplementedError
    assert _C.refusal_type("another text") is None

    dropout = dense() | {"dropout_p": 0.5, "rng_state": torch.zeros(2, dtype=torch.int64)}
    explanation = _C.explain_fwd(0, **dropout)
    assert "fake_fwd: dropout is not faked" in explanation["refusal"]
    assert explanation["nearest"] == "dropout_p=0"
    odd = dense() | {
        "q": torch.randn(2, 9, 4, 17)[..., 1:].as_strided((2, 9, 4, 16), (600, 65, 16, 1))
    }
    explanation = _C.explain_fwd(0, **odd)
    assert "16 bytes" in explanation["refusal"]
    assert explanation["nearest"] == "contiguous q, k and v"
    double = {name: t.double() for name, t in dense().items()}
    assert "float64" in _C.explain_fwd(0, **double)["refusal"]
    assert _C.explain_fwd(0, **double)["nearest"] == "bfloat16 q, k and v"


def test_rows_are_tried_in_order() -> None:
    assert kernel_of(**dense(), num_splits=1, strict=True)["kernel"] == "fake_strict"
    assert kernel_of(**dense(), num_splits=1)["kernel"] == "fake_fwd"
    names = [row["name"] for row in _C.kernel_table(emulated=True)]
    assert names == ["fake_strict", "fake_fwd", "fake_fwd_bf16", "fake_decode", "fake_bwd"]


def test_an_exception_of_a_launcher_is_an_exception_here() -> None:
    with pytest.raises(RuntimeError, match="deadlock in block 3"):
        ops.fwd(**dense(), num_splits=1, strict=True)
    check_fwd(**dense())


def test_bfloat16() -> None:
    call = {name: t.bfloat16() for name, t in dense().items()}
    out, lse = ops.fwd(**call, num_splits=1)
    right, right_lse = on_engine(ops.fwd, **call)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)


# ---- override


def test_override_names() -> None:
    before = _C.override_name()
    for name in ("sm80", "sm90", "sm100", "cpu", "emulated", "emulated:sm100", ""):
        assert _C.set_override(name) == before
        assert _C.set_override(before) == name
    for wrong in ("sm70", "gpu", "emulated:gpu"):
        with pytest.raises(ValueError, match=f"got '{wrong}'"):
            _C.set_override(wrong)
    assert _C.override_name() == before


def test_override_of_what_is_not_loaded() -> None:
    with flash_cuda.use_kernel("emulated:sm100"), pytest.raises(ValueError, match="sm100"):
        ops._fwd_emulated(**dense())


def test_override_belongs_to_its_thread() -> None:
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(_C.override_name()))
    thread.start()
    thread.join()
    with flash_cuda.use_kernel(""):  # what the process says
        assert seen == [_C.override_name()]


def test_the_library_loaded_last_serves(tmp_path: Path) -> None:
    source = tmp_path / "bare.cpp"
    source.write_text(
        '#include "common/kernel_table.h"\n'
        'extern "C" const flash_cuda::KernelTable* flash_cuda_kernel_table() {\n'
        "  static const flash_cuda::KernelTable table;\n"
        "  return &table;\n"
        "}\n"
    )
    bare = tmp_path / "bare.so"
    compile_cpp([source], bare, "-fPIC", "-shared", "-static-libubsan")
    _C.load_emulated(str(bare))
    assert _C.kernel_table(emulated=True) == []
    assert "sm80: has no kernel for this op" in _C.explain_fwd(0, **dense())["refusal"]
    _C.unload_emulated(str(bare))
    check_fwd(**dense())


def test_libraries_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot load"):
        _C.load_emulated(str(tmp_path / "none.so"))
    empty = tmp_path / "empty.so"
    source = tmp_path / "empty.cpp"
    source.write_text("int nothing;\n")
    compile_cpp([source], empty, "-fPIC", "-shared")
    with pytest.raises(ValueError, match="flash_cuda_kernel_table"):
        _C.load_emulated(str(empty))


def test_which_folder_serves_which_device() -> None:
    served = {
        c: [a for a in (100, 90, 80) if _C.serves(a, c)]
        for c in (75, 80, 86, 89, 90, 100, 103, 120)
    }
    assert served == {
        75: [], 80: [80], 86: [80], 89: [80], 90: [90, 80], 100: [100, 80], 103: [100, 80],
        120: [80],
    }  # fmt: skip


def test_table_and_build_info_agree() -> None:
    arches = {row["arch"] for row in _C.kernel_table()}
    info = _C.build_info()
    assert {f"sm{arch}" for arch in arches} <= set(info["folders"])
    if not info["folders"]:
        with flash_cuda.use_kernel(""):
            explanation = _C.explain_fwd(90, **dense())
        assert "built without CUDA kernels" in explanation["refusal"]
