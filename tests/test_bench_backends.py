"""The reference that results are held against, and what the backends of a CPU compute."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

import flash_cuda
from bench import reference
from bench.backend import Abilities
from bench.backends import all_backends
from bench.calls import run_once
from bench.inputs import Inputs, make_inputs, sets_needed
from bench.runner import run_suites
from bench.torch_family import Flex, Sdpa
from tests.bench_fakes import CPU, SHAPES, Plain, case_of, plain_attention, settings, suite

# ---- the reference ---------------------------------------------------------------------------


@pytest.mark.parametrize("values", SHAPES, ids=str)
@pytest.mark.parametrize("slice_bytes", [1 << 26, 30_000])
def test_reference_is_attention(
    values: dict[str, object], slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reference.SLICE_BYTES, "cpu", slice_bytes)
    case = case_of(**values)
    x = make_inputs(case, CPU, 1)
    expected = reference.compute(case, x, backward=True)
    assert expected.grads is not None
    for got, want in zip(run_once(case, Plain(), x), [expected.out, *expected.grads], strict=True):
        assert reference.worst_error(case, got, want) < 1e-5


def test_reference_of_packed_sequences_is_that_of_each() -> None:
    case = case_of(kind="varlen", lengths=[5, 64, 1], batch=3, causal=True)
    x = make_inputs(case, CPU, 1)
    out = torch.cat(
        [
            plain_attention(
                case_of(seqlen=n, batch=1, causal=True),
                Inputs(x.q[None, a : a + n], x.k[None, a : a + n], x.v[None, a : a + n]),
            )[0]
            for a, n in ((0, 5), (5, 64), (69, 1))
        ]
    )
    expected = reference.compute(case, x, backward=False)
    assert reference.worst_error(case, out.detach(), expected.out) < 1e-5


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("lengths", [[], [96, 17]])
def test_reference_of_a_cache(page_size: int, lengths: list[int]) -> None:
    case = case_of(
        kind="decode",
        seqlen=None,
        seqlen_q=2,
        seqlen_kv=96,
        lengths=lengths,
        page_size=page_size,
        causal=True,
        passes=["fwd"],
        grad=False,
    )
    x = make_inputs(case, CPU, 1)
    rows = []
    for i, (_, n) in enumerate(case.spans):
        k, v = x.k, x.v
        if page_size:
            assert x.block_table is not None
            pages = x.block_table[i].long()
            k, v = (t[pages].reshape(1, -1, *t.shape[2:]) for t in (k, v))
            i = 0
        one = case_of(seqlen=None, seqlen_q=2, seqlen_kv=n, batch=1, causal=True)
        q = x.q[len(rows), None]
        rows.append(plain_attention(one, Inputs(q, k[i, None, :n], v[i, None, :n])))
    expected = reference.compute(case, x, backward=False)
    assert reference.worst_error(case, torch.cat(rows), expected.out) < 1e-5


def test_inputs_repeat_and_differ_by_seed() -> None:
    case = case_of()
    one, two, other = (make_inputs(case, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(one.q, two.q)
    assert not torch.equal(one.q, other.q)
    assert one.q.requires_grad


def test_enough_sets_to_miss_the_cache() -> None:
    small, large = case_of(seqlen=16), case_of(seqlen=8192, heads=32)
    assert sets_needed(small, 50 << 20) == 16
    assert sets_needed(large, 50 << 20) == 3


# ---- the backends ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash_cuda", "sdpa_flash", "sdpa_math"])
def test_backends_of_a_cpu_are_right(name: str) -> None:
    backend = all_backends()[name]
    reason = backend.missing(CPU)
    if reason:
        pytest.skip(reason)
    case = case_of(causal=True)
    report = run_suites([suite(case)], [backend], {}, settings(), print)
    assert [e["status"] for e in report["results"]] == ["ok", "ok"], report["results"]


@pytest.mark.parametrize("values", SHAPES, ids=str)
def test_flex_masks_mean_the_same(values: dict[str, object]) -> None:
    """FlexAttention uncompiled; it has no backward on a CPU."""
    flex = Flex()
    flex.module = importlib.import_module("torch.nn.attention.flex_attention")
    flex.attend = flex.module.flex_attention
    case = case_of(**values, passes=["fwd"], grad=False)
    x = make_inputs(case, CPU, 1)
    expected = reference.compute(case, x, backward=False)
    assert reference.worst_error(case, run_once(case, flex, x)[0], expected.out) < 1e-5


def test_a_lower_right_diagonal_is_flash_attentions_alone() -> None:
    chunk = case_of(
        seqlen=None, seqlen_q=40, seqlen_kv=96, causal=True, dtype="bfloat16", passes=["fwd"]
    )
    there = Abilities(bottom_right=True, kinds=frozenset({"dense"}))
    flash = Sdpa("flash", SDPBackend.FLASH_ATTENTION, there)
    assert flash.refuses(chunk) is None
    # The mask is an object that torch hands to its kernel; on a CPU it is written out.
    x = make_inputs(chunk, CPU, 1)
    with torch.no_grad():
        out = Sdpa("math", SDPBackend.MATH, there).setup(chunk, x)()
    expected = reference.compute(chunk, x, backward=False)
    assert reference.worst_error(chunk, out, expected.out) < reference.TOLERANCE["bfloat16"]
    for name in ("sdpa_cudnn", "sdpa_efficient", "sdpa_math"):
        backend = all_backends()[name]
        assert backend.refuses(chunk) in ("no bottom-right causal", "no grouped heads")


def test_flash_cuda_serves_every_kind() -> None:
    backend = all_backends()["flash_cuda"]
    if backend.missing(CPU):
        pytest.skip("flash_cuda is not built")
    forward = {"passes": ["fwd"], "grad": False, "causal": True}
    decode = forward | {"kind": "decode", "seqlen": None, "seqlen_q": 2, "seqlen_kv": 96}
    cases = [
        case_of(kind="varlen", lengths=[5, 64, 1], batch=3, causal=True),
        case_of(causal=True, window_left=7),
        case_of(window_left=5, window_right=9),
        case_of(softcap=5.0),
        case_of(deterministic=True),
        case_of(head_dim_v=16),
        case_of(**decode),
        case_of(**decode, lengths=[96, 17]),
        case_of(**decode, page_size=16),
        case_of(dtype="bfloat16", causal=True),
        case_of(**forward, dtype="float8_e4m3fn"),
    ]
    for case in cases:
        x = make_inputs(case, CPU, 1)
        expected = reference.compute(case, x, case.needs_backward)
        got = run_once(case, backend, x)
        for result, want in zip(got, [expected.out, *(expected.grads or ())], strict=True):
            error = reference.worst_error(case, result, want)
            assert error < reference.TOLERANCE[case.dtype], case.label


def test_paths_that_this_build_lacks_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that were not built are no contestants, nor is the CPU engine on a GPU."""
    known = all_backends()
    if known["flash_cuda"].missing(CPU):
        pytest.skip("flash_cuda is not built")
    assert known["flash_cuda:cpu"].missing(CPU) is None
    for name in ("sm80", "sm90", "sm100"):
        assert known[f"flash_cuda:{name}"].missing(CPU) == "needs cuda, this is cpu"
    gpu: Any = SimpleNamespace(type="cuda")
    assert known["flash_cuda:cpu"].missing(gpu) == "needs cpu, this is cuda"
    for folders, reason in ((["sm90", "sm80"], "this build has sm90, sm80"), ([], "no kernels")):
        monkeypatch.setattr(flash_cuda._C, "build_info", lambda found=folders: {"folders": found})
        assert reason in str(known["flash_cuda:sm100"].missing(gpu))
        assert (known["flash_cuda:sm90"].missing(gpu) is None) == bool(folders)


def test_deterministic_torch_is_strict_and_ends() -> None:
    """Under warn_only FlashAttention's backward keeps to any order, and would be timed so."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    with Sdpa("math", SDPBackend.MATH, Abilities()).scope(case_of(deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == before
