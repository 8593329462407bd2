"""Calls that run at the same time: on streams, from threads, in CUDA graphs.

Launches share counters in device memory, for the order of tiles and for the parts of a tile that
several thread blocks leave (common/launch_slots.h). They are zero between launches, so who meets
another's gives wrong results from then on, or none. Every call has been made alone before, and has
to give the same bits.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import flash_cuda

pytestmark = pytest.mark.gpu


@dataclass
class Call:
    """A call, and what it gives."""

    name: str
    make: Callable[[], Tensor]
    want: Tensor


def rand(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def dense(rows: int, keys: int, heads: int, head_dim: int, causal: bool) -> Callable[[], Tensor]:
    q = rand(1, rows, heads, head_dim, seed=1)
    k, v = (rand(1, keys, heads, head_dim, seed=s) for s in (2, 3))
    return lambda: flash_cuda.attention(q, k, v, causal=causal)


def packed(head_dim: int) -> Callable[[], Tensor]:
    lengths = (300, 1, 0, 700, 129, 64)
    cu = torch.tensor((0, *lengths), device="cuda").cumsum(0).int()
    q, k, v = (rand(sum(lengths), 5, head_dim, seed=s) for s in (4, 5, 6))
    return lambda: flash_cuda.attention_varlen(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=700, max_seqlen_k=700, causal=True
    )


def decode(head_dim: int) -> Callable[[], Tensor]:
    q = rand(3, 1, 16, head_dim, seed=7)
    k, v = (rand(3, 3000, 2, head_dim, seed=s) for s in (8, 9))
    used = torch.tensor((3000, 17, 1111), device="cuda", dtype=torch.int32)
    return lambda: flash_cuda.attention_decode(q, k, v, cache_seqlens=used)


def shared_tail(head_dim: int) -> Callable[[], Tensor]:
    """Half a round of tiles on an H200, cut into parts that meet in a workspace."""
    return dense(150, 3000, 70, head_dim, False)


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """On Hopper: every kind of tile, with more and with fewer of them than the card has SMs."""
    kinds = {
        "shares_64": shared_tail(64),
        "few_128": dense(300, 500, 9, 128, True),
        "shares_96": shared_tail(96),
        "tall": dense(1000, 700, 40, 128, False),
        "decode_128": decode(128),
        "tall_diagonal": dense(900, 900, 90, 128, True),
        "pairs_256": dense(1024, 1100, 20, 256, False),
        "packed_64": packed(64),
        "pairs_192": dense(768, 2100, 30, 192, False),
        "pairs_128": dense(1150, 1100, 44, 128, False),
        "decode_64": decode(64),
        "diagonal_64": dense(777, 777, 30, 64, True),
        "packed_128": packed(128),
    }
    result = []
    with torch.no_grad():
        for name, make in kinds.items():
            result.append(Call(name, make, make()))
            torch.cuda.synchronize()
            assert not result[-1].want.isnan().any(), name
    return result


def assert_same(got: list[tuple[Call, Tensor]]) -> None:
    torch.cuda.synchronize()
    wrong = torch.stack([(out != call.want).any() for call, out in got]).tolist()
    names = [f"{call.name}, call {i}" for i, (call, _) in enumerate(got) if wrong[i]]
    assert not names, f"{len(names)} of {len(got)} differ: {names[:5]}"


def run(calls: list[Call], times: int, first: int = 0) -> list[tuple[Call, Tensor]]:
    """On the current stream, starting with call `first`."""
    order = calls[first:] + calls[:first]
    with torch.no_grad():
        return [(call, call.make()) for _ in range(times) for call in order]


def capture(calls: list[Call], stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, list]:
    """A graph of all calls, one after the other, and what they will have written."""
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        got = run(calls, 1)
    return graph, got


def poison(got: list[tuple[Call, Tensor]]) -> None:
    for _, out in got:
        out.fill_(torch.nan)


def test_streams(calls: list[Call]) -> None:
    """Every stream starts with another call, behind a kernel that sleeps."""
    got = []
    streams = [torch.cuda.Stream() for _ in range(8)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
    for i in range(6 * len(streams)):
        with torch.cuda.stream(streams[i % len(streams)]):
            got += run(calls, 1, i % len(calls))
    assert_same(got)


def test_same_call_on_many_streams(calls: list[Call]) -> None:
    """Of one kernel, as often as fits on the card together."""
    streams = [torch.cuda.Stream() for _ in range(16)]
    for call in calls:
        got = []
        for stream in streams:
            with torch.cuda.stream(stream), torch.no_grad():
                torch.cuda._sleep(3_000_000)
                got += [(call, call.make()) for _ in range(6)]
        assert_same(got)


def test_threads(calls: list[Call]) -> None:
    """Two of them on one stream, one captures and replays graphs."""
    shared = torch.cuda.Stream()
    streams = [shared, shared, torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    errors: list[BaseException] = []

    def work(number: int, stream: torch.cuda.Stream) -> None:
        try:
            with torch.cuda.stream(stream):
                for i in range(4):
                    if number == 4:
                        graph, got = capture(calls, stream)
                        graph.replay()
                    else:
                        got = run(calls, 2, (3 * number + i) % len(calls))
                    stream.synchronize()
                    for call, out in got:
                        assert torch.equal(out, call.want), f"{call.name}, thread {number}"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    if errors:
        raise errors[0]


def test_graph_replayed_often(calls: list[Call]) -> None:
    graph, got = capture(calls, torch.cuda.Stream())
    for _ in range(5):
        poison(got)
        for _ in range(20):
            graph.replay()
        assert_same(got)


def test_graphs_at_the_same_time(calls: list[Call]) -> None:
    """Two graphs that were captured on one stream, and eager calls on that and another stream."""
    origin = torch.cuda.Stream()
    graphs = [capture(calls, origin), capture(calls[3:] + calls[:3], origin)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(4):
        eager = []
        for _, got in graphs:
            poison(got)
        torch.cuda.synchronize()
        for i in range(5):
            for stream, (graph, _) in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            for stream in (origin, torch.cuda.default_stream()):
                with torch.cuda.stream(stream):
                    eager += run(calls, 1, i)
        assert_same(eager)
        for _, got in graphs:
            assert_same(got)


def test_branches_of_a_graph(calls: list[Call]) -> None:
    """Calls that a graph runs side by side."""
    graph = torch.cuda.CUDAGraph()
    origin, side = torch.cuda.Stream(), [torch.cuda.Stream() for _ in range(3)]
    got = []
    with torch.cuda.graph(graph, stream=origin):
        for i, stream in enumerate(side):
            stream.wait_stream(origin)
            with torch.cuda.stream(stream):
                got += run(calls, 1, 2 * i)
        got += run(calls, 1)
        for stream in side:
            origin.wait_stream(stream)
    for _ in range(5):
        poison(got)
        for _ in range(4):
            graph.replay()
        assert_same(got)


def test_workspace_goes_to_others_at_once(calls: list[Call]) -> None:
    """The memory of a call's parts is free again before its kernel has started."""
    side = torch.cuda.Stream()
    got = []
    with torch.cuda.stream(side), torch.no_grad():
        torch.cuda._sleep(20_000_000)
        for _ in range(10):
            for call in calls:
                if call.name.startswith("shares"):
                    got.append((call, call.make()))
                    for mib in (1, 4, 10, 20, 40):
                        torch.full((mib << 18,), torch.nan, device="cuda")
    for mib in (1, 4, 10, 20, 40):
        torch.full((mib << 18,), torch.nan, device="cuda")
    assert_same(got)


@contextmanager
def own_stream() -> Iterator[torch.cuda.ExternalStream]:
    """A stream that is none of torch's few, and is gone afterwards."""
    cudart, handle = torch.cuda.cudart(), ctypes.c_void_p()
    error = cudart.cudaStreamCreate(ctypes.addressof(handle))
    assert int(error) == 0
    try:
        yield torch.cuda.ExternalStream(handle.value)
    finally:
        cudart.cudaStreamDestroy(handle.value)


def test_more_streams_than_counters(calls: list[Call]) -> None:
    """Streams come and go, more than there are counters; one more of them works beside a graph."""
    small = [call for call in calls if call.name in ("few_128", "decode_128")]
    shares = [call for call in calls if call.name.startswith("shares")]
    for i in range(1100):
        with own_stream() as stream, torch.cuda.stream(stream):
            got = run(small if i % 4 else shares, 1)
            stream.synchronize()
        if i % 50 == 0:
            assert_same(got)
            torch.cuda.empty_cache()
    graph, in_graph = capture(small * 10, torch.cuda.Stream())
    replays = torch.cuda.Stream()
    poison(in_graph)
    torch.cuda.synchronize()
    with own_stream() as stream:
        for _ in range(330):  # as many launches as a kernel has counters
            with torch.cuda.stream(replays):
                for _ in range(6):
                    graph.replay()
            with torch.cuda.stream(stream):
                got = run(small, 50)
            assert_same(got)
            assert_same(in_graph)
