"""Runs suites: checks every result, times those that are right, and returns a report."""

from __future__ import annotations

import contextlib
import gc
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import cost, derived, machine, reference
from .backend import Backend, first_line
from .cases import Case, Suite
from .inputs import Inputs, make_inputs, sets_needed
from .timing import (
    Call,
    Clock,
    CpuClock,
    CudaClock,
    Timed,
    capture_graph,
    host_milliseconds,
    interleave,
    soak,
    summarize,
)

SCHEMA = 1


class DeviceLost(RuntimeError):
    """The device no longer answers: what comes after an illegal access measures nothing."""


@dataclass
class Settings:
    """How to measure."""

    device: torch.device
    rounds: int = 15
    warmup: int = 3
    fewest_rounds: int = 5  # however little time is left
    budget_seconds: float = 0.0  # 0: no limit
    soak_seconds: float = 0.0
    soak_filter: str = ""  # only cases whose key matches are soaked
    timer: str | None = None  # overrides the cases'
    seed: int = 0
    derive: bool = True


@dataclass
class Budget:
    """Shares out what is left of the time among the cases that are left."""

    seconds: float
    cases_left: int
    clock: Callable[[], float] = time.perf_counter
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        """Starts the time."""
        self.deadline = self.clock() + self.seconds if self.seconds else float("inf")

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.deadline - self.clock()

    def share(self) -> float:
        """Seconds for the next case."""
        return max(0.0, self.left / max(1, self.cases_left))


@dataclass
class Runner:
    """Measures cases on one device; `results` grows as it goes."""

    settings: Settings
    backends: list[Backend]
    clock: Clock
    telemetry: machine.Telemetry
    progress: Callable[[str], None] = lambda text: None
    results: list[dict[str, Any]] = field(default_factory=list)
    soaks: int = 0
    # Names by suite, where not every backend runs all suites.
    of_suite: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def run_case(self, case: Case, budget: Budget) -> None:
        """All passes and backends of one case."""
        with cpu_threads(case), self._stream():
            device, seed = self.settings.device, self.settings.seed
            l2 = l2_bytes(device)
            sets = [make_inputs(case, device, seed + i) for i in range(sets_needed(case, l2))]
            right = self._check(case, sets[0])
            share = budget.share()
            for name in case.passes:
                entries = self._time(case, name, right, sets, share / len(case.passes))
                self.results.extend(entries)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """A stream of our own: graphs cannot be captured on the default one."""
        if self.settings.device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self.settings.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    # ---- checking ---------------------------------------------------------------------------

    def _check(self, case: Case, x: Inputs) -> list[tuple[Backend, float]]:
        """The backends whose results are right, with their errors; the others become results."""
        willing = []
        wanted = self.of_suite.get(case.suite)
        for backend in self.backends:
            if wanted and backend.name not in wanted:
                continue
            reason = backend.refuses(case)
            if reason:
                self._refuse(case, backend, "refused", reason)
            else:
                willing.append(backend)
        if not willing:
            return []
        expected = reference.compute(case, x, case.needs_backward)
        self.synchronize("the reference")
        right = []
        for backend in willing:
            self.progress(f"{case.label}: checking {backend.name}")
            try:
                error, fault = self._judge(case, backend, x, expected)
            except NotImplementedError as refusal:
                self._refuse(case, backend, "refused", first_line(refusal))
                continue
            except Exception as failure:  # whatever a peer throws must not end the run
                self._refuse(case, backend, "failed", first_line(failure))
                self.synchronize(backend.name)
                continue
            if fault:
                self._refuse(case, backend, "wrong", fault, error=error)
            else:
                right.append((backend, error))
        return right

    def _judge(
        self, case: Case, backend: Backend, x: Inputs, expected: reference.Reference
    ) -> tuple[float, str | None]:
        """Worst error of output and gradients, and what is wrong, if anything."""
        with backend.scope(case):
            results = run_once(case, backend, x)
            again = run_once(case, backend, x) if case.deterministic else None
        wanted = [expected.out, *(expected.grads or ())]
        names = ("out", "dq", "dk", "dv")
        limit = reference.TOLERANCE[case.dtype]
        worst = 0.0
        for name, got, want in zip(names, results, wanted, strict=False):
            error = reference.worst_error(case, got, want)
            worst = max(worst, error)
            if not error <= limit:
                return error, f"{name} is off by {error:.1e}, allowed {limit:.0e}"
        if again is not None:
            for name, one, two in zip(names, results, again, strict=False):
                if not torch.equal(one, two):
                    return worst, f"{name} differs from run to run"
        return worst, None

    def synchronize(self, whose: str) -> None:
        """Waits, and finds out whether the device is still there."""
        try:
            self.clock.synchronize()
        except Exception as error:
            raise DeviceLost(f"after {whose}: {first_line(error)}") from error

    def _refuse(
        self, case: Case, backend: Backend, status: str, reason: str, error: float | None = None
    ) -> None:
        """Results without numbers, one a pass."""
        for name in case.passes:
            entry = self._entry(case, name, backend, status)
            entry["reason"] = reason
            if error is not None and math.isfinite(error):
                entry["error"] = error
            self.results.append(entry)

    # ---- timing -----------------------------------------------------------------------------

    def _time(
        self,
        case: Case,
        name: str,
        right: list[tuple[Backend, float]],
        sets: list[Inputs],
        seconds: float,
    ) -> list[dict[str, Any]]:
        """Times one pass of all backends that passed the check."""
        settings = self.settings
        timed: list[Timed] = []
        entries: dict[str, dict[str, Any]] = {}
        failed: list[dict[str, Any]] = []
        for backend, error in right:
            self.progress(f"{case.label}: {name} {backend.name}, preparing")
            entry = self._entry(case, name, backend, "ok")
            entry["error"] = error
            try:
                timed.append(self._prepare(case, name, backend, sets, entry))
                entries[backend.name] = entry
            except Exception as failure:
                self._refuse_pass(entry, failure)
                failed.append(entry)
                self.synchronize(backend.name)
        if not timed:
            return failed
        self.progress(f"{case.label}: {name}, timing")
        begin = time.perf_counter()
        try:
            rounds = (settings.rounds, settings.warmup)
            interleave(timed, self.clock, *rounds, seconds, settings.fewest_rounds)
            readings = self.telemetry.between(begin, time.perf_counter())
            for one in timed:
                entry = entries[one.name]
                fill_in(entry, case, name, one)
                entry["telemetry"] = readings
            if settings.soak_seconds and re.search(settings.soak_filter, case.key):
                # The chip is coolest for whoever is first: everyone is in turn.
                first, self.soaks = self.soaks % len(timed), self.soaks + 1
                for one in timed[first:] + timed[:first]:
                    self.progress(f"{case.label}: {name} {one.name}, soaking")
                    entry = entries[one.name]
                    entry["soak"] = self._soak(case, name, one, entry["ms"])
        except Exception as failure:  # nobody can say whose call it was
            for entry in entries.values():
                self._refuse_pass(entry, failure)
            self.synchronize(f"timing {case.label}")
        return list(entries.values()) + failed

    def _prepare(
        self, case: Case, name: str, backend: Backend, sets: list[Inputs], entry: dict[str, Any]
    ) -> Timed:
        """Calls of one backend, its host time and its memory."""

        def scoped(call: Call) -> Call:
            def run() -> None:
                with backend.scope(case):
                    call()

            return run

        with backend.scope(case):
            bare = [make_call(case, name, backend, x) for x in sets]
            entry["peak_bytes"] = peak_bytes(bare[0], self.settings.device)
            if self.settings.device.type == "cpu":
                return Timed(backend.name, [scoped(call) for call in bare], timer="wall")
            for call in bare[1:]:
                call()
            roughly = self.clock.measure(bare[0], 1.0)
            count = round(min(50.0, max(10.0, 60.0 / max(1e-3, roughly))))
            host_ms = host_milliseconds(bare, self.clock, count)
            entry["host_us"] = round(1e3 * host_ms, 2)
            timer = self.settings.timer or case.timer
            if timer == "graph":
                try:
                    graph = capture_graph(bare)
                    return Timed(backend.name, [graph.replay], 0.1, len(bare), "graph", keep=bare)
                except Exception as failure:  # not every peer can be captured
                    entry["note"] = f"no graph: {first_line(failure)}"
                    self.synchronize(backend.name)

        return Timed(backend.name, [scoped(call) for call in bare], host_ms)

    def _soak(self, case: Case, name: str, one: Timed, ms: float) -> dict[str, Any]:
        """The heat-soaked rate."""
        took, begin, end = soak(one, self.clock, self.settings.soak_seconds, ms)
        found: dict[str, Any] = {"ms": took, "tflops": cost.tflops(case, name, took)}
        found["tbps"] = cost.tbps(case, name, took)
        found["telemetry"] = self.telemetry.between(begin, end)
        return found

    @staticmethod
    def _refuse_pass(entry: dict[str, Any], failure: Exception) -> None:
        entry["status"] = "failed"
        entry["reason"] = first_line(failure)

    @staticmethod
    def _entry(case: Case, name: str, backend: Backend, status: str) -> dict[str, Any]:
        return {
            "suite": case.suite,
            "key": case.key,
            "label": case.label,
            "pass": name,
            "backend": backend.name,
            "is_peer": backend.is_peer,
            "status": status,
        }


def fill_in(entry: dict[str, Any], case: Case, name: str, one: Timed) -> None:
    """The numbers of one measurement."""
    found = summarize(one.samples)
    entry |= asdict(found)
    entry["timer"] = one.timer
    entry["samples_ms"] = [round(s, 6) for s in one.samples]
    entry["tflops"] = cost.tflops(case, name, found.ms)
    entry["tbps"] = cost.tbps(case, name, found.ms)


@contextlib.contextmanager
def cpu_threads(case: Case) -> Iterator[None]:
    """Torch's thread count for the while of a case."""
    before = torch.get_num_threads()
    if case.threads:
        torch.set_num_threads(case.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def l2_bytes(device: torch.device) -> int:
    """Size of the GPU's L2 cache."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0) or 64 << 20)


def run_once(case: Case, backend: Backend, x: Inputs) -> list[Tensor]:
    """Output, and gradients where the case has any."""
    forward = backend.setup(case, x)
    with torch.set_grad_enabled(case.grad):
        out = forward()
    if not case.needs_backward:
        return [out.detach()]
    return [out.detach(), *torch.autograd.grad(out, x.leaves, x.dout)]


def make_call(case: Case, name: str, backend: Backend, x: Inputs) -> Call:
    """One pass on one set of inputs, as a function without arguments."""
    forward = backend.setup(case, x)
    if name == "fwd":

        def run_forward() -> Tensor:
            with torch.set_grad_enabled(case.grad):
                return forward()

        return run_forward
    if name == "fwd+bwd":
        return lambda: torch.autograd.grad(forward(), x.leaves, x.dout)
    out = forward()
    return lambda: torch.autograd.grad(out, x.leaves, x.dout, retain_graph=True)


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Most memory that one call holds beyond what was held before; unknown on a CPU."""
    if device.type != "cuda":
        call()
        return None
    call()  # what is kept from the first call on is no part of a call
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated(device) - before


@dataclass
class Outcome:
    """What a run finds beside its results."""

    facts: dict[str, Any]  # of the machine
    ceilings: list[machine.Ceiling] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    device_lost: str | None = None
    interrupted: bool = False
    begin: float = field(default_factory=time.perf_counter)

    def report(self, runner: Runner, suites: list[Suite], absent: dict[str, str]) -> dict[str, Any]:
        """The report as far as the run has come."""
        settings, present = runner.settings, runner.backends
        report = {
            "schema": SCHEMA,
            "machine": self.facts,
            "settings": asdict(settings) | {"device": str(settings.device)},
            "telemetry_source": runner.telemetry.source,
            "suites": [suite.name for suite in suites],
            "cases": {case.key: case.as_dict() for suite in suites for case in suite.cases},
            "backends": {b.name: {"status": "present", "version": b.version()} for b in present}
            | {name: {"status": "absent", "reason": reason} for name, reason in absent.items()},
            "ceiling": machine.ceiling_dicts(self.ceilings),
            "seconds": round(time.perf_counter() - self.begin, 1),
            "skipped": list(self.skipped),
            "interrupted": self.interrupted,
            "broken": list(self.broken),
            "device_lost": self.device_lost,
            "results": [dict(entry) for entry in runner.results],
        }
        derived.complete(report, settings.derive)
        return report


def run_suites(
    suites: list[Suite],
    backends: list[Backend],
    absent: dict[str, str],
    settings: Settings,
    on_case: Callable[[int, int, str], None],
    on_report: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Runs suites and returns the report that run.py writes as JSON.

    Args:
        suites: what to run.
        backends: those that are present.
        absent: name and reason of those that are not.
        settings: how to measure.
        on_case: told the number of the case, of how many, and what is being done.
        on_report: told the report so far after every case.
    """
    cases = [case for suite in suites for case in suite.cases]
    clock: Clock = CudaClock() if settings.device.type == "cuda" else CpuClock()
    telemetry = machine.Telemetry(settings.device)
    outcome = Outcome(machine.describe(settings.device))
    budget = Budget(settings.budget_seconds, len(cases))
    runner = Runner(settings, backends, clock, telemetry)
    runner.of_suite = {suite.name: suite.backends for suite in suites}

    def ceiling(when: str) -> None:
        outcome.ceilings.append(machine.measure_ceiling(when, settings.device, clock))

    try:
        ceiling("start")
        for number, case in enumerate(cases):
            budget.cases_left = len(cases) - number
            if budget.left <= 0 or outcome.interrupted:
                outcome.skipped.append(case.key)
                continue
            runner.progress = lambda text, n=number: on_case(n, len(cases), text)
            try:
                runner.progress(case.label)
                if number == len(cases) // 2 and number:
                    ceiling("middle")
                runner.run_case(case, budget)
                on_report(outcome.report(runner, suites, absent))
            except DeviceLost:
                raise
            except KeyboardInterrupt:  # what was measured so far is worth keeping
                outcome.interrupted = True
                if not any(entry["key"] == case.key for entry in runner.results):
                    outcome.skipped.append(case.key)
            except Exception as error:  # a fault of ours must not cost the cases before and after
                traceback.print_exc()
                outcome.broken.append(f"{case.key}: {first_line(error)}")
                runner.synchronize(case.label)
        ceiling("end")
    except DeviceLost as error:
        outcome.device_lost = str(error)
    finally:
        telemetry.close()
    return outcome.report(runner, suites, absent)
