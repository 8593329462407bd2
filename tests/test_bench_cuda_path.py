"""The runner's GPU path, with torch.cuda replaced by fakes: streams, events, graphs, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bench.runner
from bench import machine, table
from bench.backend import Abilities, Backend, Forward
from bench.cases import Case, Suite, make_case
from bench.inputs import Inputs, make_inputs
from bench.machine import Ceiling
from bench.runner import Settings, run_suites
from bench.timing import CudaClock


class FakeCuda:
    """Stands in for the parts of torch.cuda that the benchmark touches."""

    def __init__(self) -> None:
        self.time = 0.0  # ms on the device
        self.spins: list[float] = []
        self.captured: list[Any] = []
        self.refuse_capture = False
        self.capturing = False

    def event(self, enable_timing: bool = False) -> Any:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.time)
        event.synchronize = lambda: None
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def spin(self, cycles: int) -> None:
        self.spins.append(cycles / 2e6)
        self.time += cycles / 2e6

    @contextlib.contextmanager
    def graph(self, graph: Any, stream: Any) -> Iterator[None]:
        assert stream is not None
        if self.refuse_capture:
            raise RuntimeError("operation not permitted when stream is capturing")
        begin, self.capturing = self.time, True
        yield
        self.capturing = False
        took, self.time = self.time - begin, begin
        graph.replay = lambda: setattr(self, "time", self.time + took)
        self.captured.append(graph)


class OnFake(Backend):
    """Takes a known time on the fake device."""

    abilities = Abilities(dtypes=frozenset({"float32"}))

    def __init__(self, name: str, ms: float, cuda: FakeCuda) -> None:
        self.name, self.ms, self.cuda = name, ms, cuda
        self.is_peer = name != "flash_cuda"

    def backward_runs(self, gradient: torch.Tensor) -> None:
        self.cuda.time += 2.5 * self.ms

    def setup(self, case: Case, x: Inputs) -> Forward:
        def forward() -> torch.Tensor:
            self.cuda.time += self.ms
            q, k, v = (t.transpose(1, 2) for t in x.leaves)
            s = (q @ k.transpose(2, 3)) / case.head_dim**0.5
            out = (s.softmax(-1) @ v).transpose(1, 2)
            if out.requires_grad:
                out.register_hook(self.backward_runs)
            return out

        return forward


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    replaced: dict[str, Callable[..., Any]] = {
        "Stream": lambda device=None: stream,
        "stream": lambda s: contextlib.nullcontext(),
        "current_stream": lambda: stream,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "Event": fake.event,
        "_sleep": fake.spin,
        "CUDAGraph": SimpleNamespace,
        "graph": fake.graph,
        "memory_allocated": lambda device: 1000,
        "max_memory_allocated": lambda device: 5000,
        "reset_peak_memory_stats": lambda device: None,
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1 << 20),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(machine, "measure_ceiling", lambda when, *_: Ceiling(when, 700.0, 4.0))
    facts = {"card": "H200", "gpu": "NVIDIA H200", "cpu": "", "date": "", "time": "", "torch": ""}
    facts |= {"driver": "580", "cuda": "13.0", "flash_cuda": "0.1.0"}
    monkeypatch.setattr(machine, "describe", lambda device: dict(facts))
    telemetry = SimpleNamespace(
        between=lambda begin, end: {"clock_mhz": 1.0, "power_w": 2.0, "temperature_c": 3.0},
        close=lambda: None,
        source="fake",
    )
    monkeypatch.setattr(machine, "Telemetry", lambda device: telemetry)
    monkeypatch.setattr(
        bench.runner,
        "make_inputs",
        lambda case, _, seed: make_inputs(case, torch.device("cpu"), seed),
    )
    return fake


def run(cuda: FakeCuda, **values: Any) -> dict[str, Any]:
    base = {"seqlen": 32, "batch": 2, "heads": 2, "head_dim": 16, "dtype": "float32"}
    case = make_case("test", base | values)
    device: Any = SimpleNamespace(type="cuda", index=0)
    settings = Settings(device, rounds=6, warmup=2)
    backends: list[Backend] = [OnFake("flash_cuda", 0.25, cuda), OnFake("peer", 0.5, cuda)]
    return run_suites([Suite("test", "", "cuda", (), (case,))], backends, {}, settings, print)


def by_backend(report: dict[str, Any], name: str = "fwd") -> dict[str, dict[str, Any]]:
    assert not report["broken"]
    assert report["device_lost"] is None
    return {e["backend"]: e for e in report["results"] if e["pass"] == name}


def test_events_measure_the_device_alone(cuda: FakeCuda) -> None:
    found = by_backend(run(cuda))
    assert {name: e["ms"] for name, e in found.items()} == pytest.approx(
        {"flash_cuda": 0.25, "peer": 0.5}
    )
    assert found["flash_cuda"]["ratio"] == pytest.approx(2.0)
    assert found["flash_cuda"]["timer"] == "events"
    assert found["flash_cuda"]["peak_bytes"] == 4000
    assert found["flash_cuda"]["telemetry"]["power_w"] == 2.0
    assert min(cuda.spins) >= 0.3
    assert not cuda.captured


def test_a_host_that_was_late_is_given_more_time(cuda: FakeCuda) -> None:
    """The GPU spins, then waits for the call if the host needed longer than the spin."""
    host, late = [0.0], [3.0, 0.2]  # ms that issuing the call takes, first and then

    class Clock(CudaClock):
        def now(self) -> float:
            return host[0] / 1e3

    def call() -> None:
        needs = late.pop(0) if len(late) > 1 else late[0]
        host[0] += needs
        cuda.time += max(0.0, needs - cuda.spins[-1]) + 1.0

    assert Clock().measure(call, 0.1) == pytest.approx(1.0)
    assert cuda.spins == pytest.approx([0.5, 6.0])
    late[:] = [1000.0]  # it waits for the device itself: no spin is long enough
    assert Clock().measure(call, 0.1) > 900
    assert cuda.spins[2:] == pytest.approx([0.5, 50.0])


def test_a_graph_holds_one_call_a_set(cuda: FakeCuda) -> None:
    found = by_backend(run(cuda, timer="graph"))
    assert {name: e["ms"] for name, e in found.items()} == pytest.approx(
        {"flash_cuda": 0.25, "peer": 0.5}
    )
    assert found["peer"]["timer"] == "graph"
    assert len(cuda.captured) == 2


def test_who_cannot_be_captured_is_timed_by_events(cuda: FakeCuda) -> None:
    cuda.refuse_capture = True
    found = by_backend(run(cuda, timer="graph"))
    assert found["peer"]["timer"] == "events"
    assert found["peer"]["note"].startswith("no graph: RuntimeError: operation not permitted")
    assert found["peer"]["ms"] == pytest.approx(0.5)


def test_backward_is_timed_without_the_forward(cuda: FakeCuda) -> None:
    report = run(cuda, passes=["fwd", "bwd", "fwd+bwd"], grad=True)
    assert by_backend(report, "fwd")["peer"]["ms"] == pytest.approx(0.5)
    assert by_backend(report, "bwd")["peer"]["ms"] == pytest.approx(1.25)
    assert by_backend(report, "fwd+bwd")["peer"]["ms"] == pytest.approx(1.75)


def test_report_of_a_gpu_can_be_shown(cuda: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    table.show(run(cuda))
    out = capsys.readouterr().out
    assert "NVIDIA H200, driver 580" in out
    assert "2.00" in out
