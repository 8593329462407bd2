"""torch.compile and torch.export: whole graphs, static and dynamic, gradients included."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

import flash_cuda

# Traces forward and backward through AOTAutograd, and runs what comes out without generating code.
BACKEND = "aot_eager"
Args = Sequence[Any]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rand(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, requires_grad=grad)


def qkv(rows: int, keys: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return rand(batch, rows, 4, 16), rand(batch, keys, 2, 16), rand(batch, keys, 2, 16)


def results(call: Callable[..., Tensor], args: Args) -> list[Tensor]:
    """The output and all gradients."""
    out = call(*args)
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


def check(
    call: Callable[..., Tensor], *calls: Args, backend: str = BACKEND, **options: Any
) -> list[int]:
    """Compares eager and compiled; returns the number of graphs after each call."""
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, fullgraph=True, backend=graphs, **options)
    counts = []
    for args in calls:
        torch.testing.assert_close(results(compiled, args), results(call, args))
        counts.append(int(graphs.frame_count))
    return counts


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_cuda.attention(q * 2, k, v, causal=True).cos()


def test_static_shapes() -> None:
    check(causal, qkv(8, 11), dynamic=False)


def test_dynamic_shapes_need_no_further_graph() -> None:
    counts = check(causal, qkv(8, 11, 3), qkv(13, 17, 3), qkv(21, 30, 5), dynamic=True)
    assert counts[0] == counts[-1]


def test_shapes_that_change_need_one_further_graph() -> None:
    counts = check(causal, qkv(8, 11), qkv(13, 17), qkv(21, 24), qkv(30, 35))
    assert counts[1] == counts[-1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_gradient(deterministic: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor, slopes: Tensor) -> Tensor:
        return flash_cuda.attention(
            q, k, v, bias=bias, sink=sink, alibi_slopes=slopes, softcap=4.0, window=(3, 2),
            deterministic=deterministic,
        )  # fmt: skip

    check(call, (*qkv(8, 11), rand(1, 4, 8, 11), rand(4), torch.rand(4)))


def test_deterministic_reaches_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fwd` has no such argument, so the graph must carry it to `bwd` in another way."""
    seen: list[bool] = []
    check_bwd = flash_cuda._C.check_bwd

    def spy(*args: Any, **kwargs: Any) -> None:
        bound = {**dict(zip(flash_cuda._handles.BWD_NAMES, args, strict=False)), **kwargs}
        seen.append(bool(bound.get("deterministic", False)))
        check_bwd(*args, **kwargs)

    monkeypatch.setattr(flash_cuda._C, "check_bwd", spy)
    for deterministic in (True, False):

        def call(q: Tensor, k: Tensor, v: Tensor, flag: bool = deterministic) -> Tensor:
            return flash_cuda.attention(q, k, v, deterministic=flag)

        check(call, qkv(8, 11))
        # Eager and compiled.
        assert seen == [deterministic] * 2
        seen.clear()


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_tensor_in_three_places(deterministic: bool) -> None:
    def call(x: Tensor) -> Tensor:
        return flash_cuda.attention(x, x, x, deterministic=deterministic)

    check(call, (rand(2, 8, 4, 16),))


def test_packed() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        out = flash_cuda.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True
        )
        assert isinstance(out, Tensor)
        return out

    def args(*cu_seqlens: int) -> Args:
        n = cu_seqlens[-1]
        longest = max(b - a for a, b in itertools.pairwise(cu_seqlens))
        cu = torch.tensor(cu_seqlens, dtype=torch.int32)
        return rand(n, 4, 16), rand(n, 2, 16), rand(n, 2, 16), cu, longest

    check(call, args(0, 3, 10), args(0, 3, 10, 19), dynamic=True)


def test_dropout_draws_anew_at_each_call() -> None:
    q, k, v = qkv(16, 16)
    compiled = torch.compile(
        lambda q, k, v: flash_cuda.attention(q, k, v, dropout_p=0.5),
        fullgraph=True,
        backend=BACKEND,
    )
    one, two = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(one, two)
    dq, dv = torch.autograd.grad(one, [q, v], torch.ones_like(one))
    # out is linear in v for one mask: <out, dout> = <v, dv> only if both passes used the same.
    torch.testing.assert_close(one.sum(), (v * dv).sum(), rtol=1e-4, atol=1e-3)
    assert dq.any()


def test_decode_appends_in_place() -> None:
    cos, sin = torch.rand(32, 8), torch.rand(32, 8)

    def call(q: Tensor, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], n: Tensor) -> Any:
        return flash_cuda.flash_attn_with_kvcache(
            q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=n, causal=True
        )

    lengths = torch.tensor([3, 9], dtype=torch.int32)
    with torch.no_grad():
        q, k, v = qkv(1, 1)
        eager = (rand(2, 32, 2, 16, grad=False), rand(2, 32, 2, 16, grad=False))
        compiled = (eager[0].clone(), eager[1].clone())
        want = call(q, k, v, eager, lengths)
        graph = torch.compile(call, fullgraph=True, backend=BACKEND)
        torch.testing.assert_close(graph(q, k, v, compiled, lengths), want)
    assert torch.equal(eager[0], compiled[0])
    assert torch.equal(eager[1], compiled[1])


@pytest.mark.parametrize("deterministic", [False, True])
def test_autocast(deterministic: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_cuda.attention(q, k, v, deterministic=deterministic)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(call, qkv(8, 11))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ for CPU code")
def test_inductor() -> None:
    check(causal, qkv(8, 11), backend="inductor", dynamic=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_cuda.attention(q, k, v, causal=True, softcap=3.0)

    rows, keys = Dim("rows", min=2, max=64), Dim("keys", min=2, max=64)
    shapes = ({1: rows}, {1: keys}, {1: keys})
    sample, other = ([t.detach() for t in qkv(*n)] for n in ((8, 11), (21, 30)))
    program = export(Module(), tuple(sample), dynamic_shapes=shapes, strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert "flash_cuda.fwd.default" in targets
    torch.testing.assert_close(program.module()(*other), Module()(*other))
