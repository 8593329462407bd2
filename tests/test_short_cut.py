"""The short form of `fwd`: who takes it, and that nobody who listens misses the op itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash_cuda
from flash_cuda import _autograd, _handles

OPS = torch.ops.flash_cuda


def qkv(grad: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes)
    return q, k, v


class _Calls(TorchDispatchMode):
    """Notes which ops are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_the_short_form_of_fwd_is_seen_by_no_mode(grad: bool) -> None:
    """Without a mode a plain call may take `_fwd_dense`; whoever listens sees `fwd`."""
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=grad) for _ in range(3))
    plain = flash_cuda.attention(q, k, v, causal=True)
    with _Calls() as calls:
        seen = flash_cuda.attention(q, k, v, causal=True)
    assert "flash_cuda::fwd" in calls.names
    assert "flash_cuda::_fwd_dense" not in calls.names
    assert torch.equal(plain, seen)


class _Functions(TorchFunctionMode):
    """Notes which ops are called, above the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class _Subclass(Tensor):
    pass


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of `_fwd_dense` so far."""
    calls: list[tuple[Any, ...]] = []
    short = _handles.FWD_DENSE

    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return short(*args, **kwargs)

    for module in (_handles, _autograd):
        monkeypatch.setattr(module, "FWD_DENSE", noting)
    return calls


@pytest.mark.parametrize("op", [OPS.fwd, OPS.fwd.default], ids=["packet", "overload"])
def test_a_plain_call_of_the_op_takes_the_short_form(op: Any, short_calls: list[Any]) -> None:
    q, k, v = qkv()
    for options in ({}, {"window_right": 0}, {"softmax_scale": 0.3, "window_left": 2}):
        short_calls.clear()
        got = op(q, k, v, **options)
        assert len(short_calls) == 1
        assert got[0].grad_fn is None
        want = op._op(q, k, v, **options)  # as torch calls it
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        short_calls.clear()
        with torch.no_grad():
            op(*qkv(True), **options)
        assert len(short_calls) == 1


def _dual_call() -> None:
    q, k, v = qkv()
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(NotImplementedError):
        OPS.fwd(forward_ad.make_dual(q, q), k, v)


LONG_CALLS: dict[str, Callable[[], Any]] = {
    "options": lambda: OPS.fwd(*qkv(), softcap=1.0),
    "subclass": lambda: OPS.fwd(*(t.as_subclass(_Subclass) for t in qkv())),
    "dual": _dual_call,
}


@pytest.mark.parametrize("name", LONG_CALLS)
def test_other_calls_of_the_op_are_torchs(name: str, short_calls: list[Any]) -> None:
    LONG_CALLS[name]()
    assert not short_calls


def _graph_of_fwd(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    assert OPS.fwd in [node.target for node in module.graph.nodes]
    return lambda *args: (args[0],)


def test_graphs_hold_the_op_itself() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _scripted(q, k, v)

    torch.compile(_scripted, fullgraph=True, backend=_graph_of_fwd)(*qkv())
    exported = torch.export.export(Model(), qkv())
    assert OPS.fwd.default in [node.target for node in exported.graph.nodes]
    traced = torch.jit.trace(_scripted, qkv(), check_trace=False)
    assert "flash_cuda::fwd" in [node.kind() for node in traced.graph.nodes()]


@pytest.mark.parametrize("mode", [_Functions, _Calls])
def test_modes_see_the_op_itself(mode: Callable[[], Any]) -> None:
    with mode() as calls:
        OPS.fwd(*qkv(), window_right=0)
    assert any("fwd" in name for name in calls.names)
    assert not any("_fwd_dense" in name for name in calls.names)


def test_the_ops_objects_are_still_torchs() -> None:
    assert isinstance(OPS.fwd, torch._ops.OpOverloadPacket)
    assert isinstance(OPS.fwd.default, torch._ops.OpOverload)
    assert copy.deepcopy(OPS.fwd.default) is OPS.fwd.default
    assert hash(OPS.fwd.default) == hash(OPS.fwd.default._op)
    assert torch._library.utils.lookup_op("flash_cuda::fwd") is OPS.fwd.default
    scripted = torch.jit.script(_scripted)
    q, k, v = qkv()
    assert torch.equal(scripted(q, k, v), OPS.fwd(q, k, v)[0])


def _scripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.flash_cuda.fwd(q, k, v)[0]
