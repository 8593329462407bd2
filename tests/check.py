"""Runs a case on a backend and compares every result with the oracle.

The rule (docs/numerics.md): an error is at most twice that of the same mathematics evaluated by
PyTorch in the input's dtype, plus half a unit in the last place of the largest value. What must
hold exactly is exact: rows without keys, rows and keys that do not count, no NaN anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_cuda
from flash_cuda.reference import EngineOptions, use_options

from . import oracle
from .cases import AttentionCase, Inputs, build

BITS = {"dq": 1, "dk": 2, "dv": 4, "dbias": 8, "dsink": 16}
# Options of fwd that bwd does not have: they change how the forward is done, not what it means.
FORWARD_ONLY = frozenset(("num_splits", "split_size", "pack_gqa"))
# Half a unit in the last place of 1.0; float32 and float64 see `floor_of`.
HALF_ULP = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-21,
    torch.float64: 1e-12,
}


class Unsupported(pytest.skip.Exception):
    """No kernel of the backend serves the call, and it said so: a test that meets it is skipped."""


@dataclass(frozen=True)
class Backend:
    """Where the ops run: `cpu` (the engine), `cuda`, or `emulated:ARCH` kernels on CPU tensors."""

    name: str

    @property
    def device(self) -> str:
        return "cuda" if self.name == "cuda" else "cpu"

    @property
    def is_engine(self) -> bool:
        return self.name == "cpu"

    @property
    def is_emulated(self) -> bool:
        return self.name.startswith("emulated")

    @property
    def num_sms(self) -> int:
        """Multiprocessors; 4 for the engine, which has none."""
        if self.is_emulated:
            import emulator

            arch = self.name.removeprefix("emulated:")
            emulator.load(arch)
            return int(emulator.settings(arch)["sms"])
        if self.name == "cuda":
            return int(torch.cuda.get_device_properties().multi_processor_count)
        return 4

    @contextmanager
    def context(self, case: AttentionCase) -> Iterator[None]:
        """What calls have to be wrapped in."""
        options = EngineOptions()
        if self.is_engine and case.tiles is not None:
            block_q, block_kv = case.tiles
            options = EngineOptions(block_q, block_kv, tile_scores=3 * block_q * block_kv)
        # On a GPU whatever FLASH_CUDA_KERNEL says stays in force.
        with flash_cuda.use_kernel("" if self.name == "cuda" else self.name), use_options(options):
            yield

    def call(self, case: AttentionCase, op: str, *args: Any, **kw: Any) -> Any:
        """Calls an op with memory that is NaN before it is written."""
        with self.context(case), nan_memory(), torch.no_grad():
            try:
                return getattr(torch.ops.flash_cuda, op)(*args, **kw)
            except (ValueError, NotImplementedError) as error:
                refused = flash_cuda._C.refusal_type(str(error)) is NotImplementedError
                if refused and not self.is_engine:
                    raise Unsupported(str(error)) from error
                raise


@contextmanager
def nan_memory() -> Iterator[None]:
    """Makes torch.empty, here and in C++, return NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def precision_of(case: AttentionCase, backend: Backend) -> oracle.Precision:
    """The same mathematics in the dtype of the case."""
    dtype = case.torch_dtype
    if dtype == torch.float8_e4m3fn:
        p_dtype = None if backend.is_engine else dtype
        return oracle.Precision(torch.float32, torch.bfloat16, p_dtype)
    if dtype in (torch.float32, torch.float64):
        return oracle.Precision(dtype)
    return oracle.Precision(torch.float32, dtype)


def largest_error(got: Tensor, want: Tensor) -> float:
    finite = torch.isfinite(want)
    return float((got.double() - want)[finite].abs().max()) if finite.any() else 0.0


def largest(want: Tensor) -> float:
    finite = want[torch.isfinite(want)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def assert_near(
    name: str,
    got: Tensor,
    want: Tensor,
    simulated: Tensor,
    floor: float,
    least: float = 0.0,
    chance: float = 0.0,
) -> None:
    """Compares one result.

    Args:
        name: for the message.
        got: the result.
        want: float64.
        simulated: the same mathematics in a lower precision.
        floor: allowed error relative to the largest value, beside twice the error of `simulated`.
        least: allowed error whatever the values are, where they are differences of larger ones.
        chance: what rounding may do to any value, in place of the error of `simulated`, where
            there are so few values that its largest error came out small by chance.
    """
    assert got.shape == want.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert not torch.isnan(got).any(), f"{name} has {int(torch.isnan(got).sum())} NaN"
    infinite = torch.isinf(want)
    assert torch.equal(got.double()[infinite], want[infinite]), f"{name}: infinities differ"
    bound = max(2.0 * largest_error(simulated, want), chance) + floor * largest(want) + least
    error = largest_error(got, want)
    if error > bound:
        worst = (got.double() - want).masked_fill(infinite, 0.0).abs().argmax()
        place = [int(i) for i in torch.unravel_index(worst, want.shape)]
        raise AssertionError(
            f"{name} is off by {error:.3g} at {place}, allowed {bound:.3g}: "
            f"got {got[tuple(place)].item():.6g}, right is {want[tuple(place)].item():.6g}"
        )


def floor_of(dtype: torch.dtype, score: Tensor) -> float:
    """Allowed relative to the largest value, beside twice the error of the yardstick.

    In float32 sums run in another order, and a score that is off in its last place moves P by
    that much: score * 2^-23 of it. Behind 16-bit rounding neither shows.
    """
    if dtype == torch.float32:
        return max(HALF_ULP[dtype], 2.0**-23 * float(score))
    return HALF_ULP[dtype]


def product_error(case: AttentionCase, inputs: Inputs) -> float:
    """How far rounding moves the largest scaled product of a query and a key in float32.

    Its terms may be larger than their sum, which is all that is left of them in the scores.
    """
    scale = case.head_dim**-0.5 if case.scale is None else abs(case.scale)
    q, k = (inputs.kw[name].double().norm(dim=-1) for name in "qk")
    return 2.0**-23 * scale * largest(q) * largest(k)


def lse_floor(case: AttentionCase, backend: Backend, inputs: Inputs, want: Tensor) -> float:
    """lse is float32 whatever the inputs are, so wrong masks show even where out is coarse.

    Kernels take fast (and some polynomial) exponentials; fp8 tensor cores add up in about 14 bits.
    """
    if case.dtype == "float64":
        return HALF_ULP[torch.float64]
    scale = max(largest(want), 1.0) / max(largest(want), 1e-30)
    if backend.is_engine:
        return max(2.0**-20 * scale, product_error(case, inputs) / max(largest(want), 1e-30))
    return (5e-3 if case.dtype.startswith("float8") else 2e-4) * scale


def check(case: AttentionCase, backend: Backend) -> None:
    """Runs a case, forward and, if it has gradients, backward, and compares everything.

    Raises:
        Unsupported: the backend has no kernel for it.
        AssertionError: a result is wrong.
    """
    inputs = build(case, backend.device)
    precision = precision_of(case, backend)
    out, lse = backend.call(case, "fwd", **inputs.kw)
    want = oracle.solve(inputs.kw, inputs.dout, inputs.dlse)
    near = oracle.solve(inputs.kw, inputs.dout, inputs.dlse, precision)
    out_dtype = torch.bfloat16 if case.torch_dtype == torch.float8_e4m3fn else case.torch_dtype
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    assert out.dtype == out_dtype, f"out is {out.dtype}"
    assert lse.dtype == wide, f"lse is {lse.dtype}"
    assert_near("lse", lse, want["lse"], near["lse"], lse_floor(case, backend, inputs, want["lse"]))
    assert_near("out", out, want["out"], near["out"], floor_of(out_dtype, want["score"]))
    empty = (want["out"] == 0.0).all(-1)
    assert (out[empty] == 0.0).all(), "out is not exactly 0 in rows without keys"
    if case.grads:
        check_gradients(case, backend, inputs, (out, lse), want, near)


def cancellation(case: AttentionCase, inputs: Inputs, want: dict[str, Tensor], name: str) -> float:
    """What rounding leaves of a gradient whose terms cancel, even to exactly 0.

    dsink and dbias sum a term for each row (and more, if bias is repeated); the rounding of out
    makes each term wrong by chance, and the sum by the root of the sum of squares: at most four
    times that is allowed, because a few such numbers have no reliable maximum to compare with.
    dS = P * (dP - delta) is a difference of two float32 dot products of dout with v and with out.
    """
    if name in ("dbias", "dsink"):
        largest_spread = want[f"{name}_spread"].max() if want[name].numel() else torch.zeros(())
        return 4.0 * HALF_ULP[case.torch_dtype] * float(largest_spread.sqrt())
    unit = 2.0**-50 if case.dtype == "float64" else 2.0**-21
    assert inputs.dout is not None
    dp = largest(inputs.dout.double()) * largest(inputs.kw["v"].double()) * case.dim_v**0.5
    scale = case.head_dim**-0.5 if case.scale is None else abs(case.scale)
    factor = {"dq": scale * largest(inputs.kw["k"].double())}
    factor["dk"] = scale * largest(inputs.kw["q"].double())
    return unit * dp * factor.get(name, 1.0) if name != "dv" else 0.0


def check_gradients(
    case: AttentionCase,
    backend: Backend,
    inputs: Inputs,
    result: tuple[Tensor, Tensor],
    want: dict[str, Tensor],
    near: dict[str, Tensor],
) -> None:
    """Runs `bwd` on the backend's own out and lse and compares the gradients."""
    exists = sum(bit for name, bit in BITS.items() if name in want)
    wanted = exists if case.wanted is None else case.wanted & exists
    kw = {name: value for name, value in inputs.kw.items() if name not in FORWARD_ONLY}
    grads = backend.call(
        case, "bwd", inputs.dout, inputs.dlse, kw.pop("q"), kw.pop("k"), kw.pop("v"), *result,
        deterministic=case.deterministic, wanted=wanted, **kw,
    )  # fmt: skip
    got = dict(zip(BITS, grads, strict=True))
    for name, bit in BITS.items():
        if not wanted & bit:
            assert got[name].numel() == 0, f"{name} was not wanted"
            continue
        dtype = case.torch_dtype
        if name in ("dbias", "dsink"):
            dtype = torch.float64 if case.dtype == "float64" else torch.float32
        assert got[name].dtype == dtype, f"{name} is {got[name].dtype}"
        least = cancellation(case, inputs, want, name)
        floor = floor_of(dtype, want["score"])
        spread = want.get(f"{name}_spread") if name in ("dq", "dk") else None
        chance = 0.0 if spread is None else HALF_ULP[dtype] * largest(spread) ** 0.5
        assert_near(name, got[name], want[name], near[name], floor, least, chance)
    no_keys = (want["lse"] == -torch.inf).transpose(-1, -2)
    unseen = (want["dk"] == 0.0).all(-1) & (want["dv"] == 0.0).all(-1)
    for name, zero in (("dq", no_keys), ("dk", unseen), ("dv", unseen)):
        if wanted & BITS[name]:
            assert (got[name][zero] == 0.0).all(), f"{name} is not exactly 0 where nothing flows"


def with_cases(*groups: Iterable[AttentionCase]) -> pytest.MarkDecorator:
    """Parametrises a test over groups of cases; the first of each group is also a smoke test."""
    params = []
    for group in groups:
        for i, case in enumerate(group):
            marks = [pytest.mark.smoke] if i == 0 else []
            params.append(pytest.param(case, id=str(case), marks=marks))
    return pytest.mark.parametrize("case", params)
