"""Runs suites: checks every result, times those that are right, and returns a report."""

from __future__ import annotations

import contextlib
import gc
import math
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from . import cost, derived, machine, reference
from .backend import Backend, first_line
from .calls import cpu_threads, l2_bytes, make_call, peak_bytes, run_once
from .cases import Case, Suite
from .inputs import Inputs, make_inputs, sets_needed
from .timing import (
    Call,
    Clock,
    CpuClock,
    CudaClock,
    Timed,
    balanced_orders,
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
    soak_seconds: float = 0.0  # of each backend, in all turns together
    soak_turns: int = 4
    soak_filter: str = ""  # only cases are soaked whose key and pass ("... fwd") match
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


class Right(NamedTuple):
    """A backend whose results are right, and how far they are off."""

    case: Case
    backend: Backend
    error: float


class Measured(NamedTuple):
    """What is timed, and the result that its numbers go into."""

    case: Case
    entry: dict[str, Any]
    timed: Timed


class Soaked(NamedTuple):
    """One turn at the power limit."""

    ms: float
    telemetry: dict[str, float] | None


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

    def run_together(self, cases: list[Case], budget: Budget) -> None:
        """All passes and backends of cases that differ in `deterministic` alone.

        They share inputs and reference, and are timed in the same rounds: what one costs more than
        the other must not be the clock's doing.
        """
        first = cases[0]
        with cpu_threads(first), self._stream():
            device, seed = self.settings.device, self.settings.seed
            l2 = l2_bytes(device)
            sets = [make_inputs(first, device, seed + i) for i in range(sets_needed(first, l2))]
            right = self._check(cases, sets[0])
            share = budget.share() * len(cases)
            for name in first.passes:
                self.results.extend(self._time(name, right, sets, share / len(first.passes)))

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

    def _check(self, cases: list[Case], x: Inputs) -> list[Right]:
        """The backends whose results are right, by case; the others become results."""
        willing = []
        wanted = self.of_suite.get(cases[0].suite)
        for backend in self.backends:
            if wanted and backend.name not in wanted:
                continue
            for case in cases:
                reason = backend.refuses(case)
                if reason:
                    self._refuse(case, backend, "refused", reason)
                else:
                    willing.append((case, backend))
        if not willing:
            return []
        expected = reference.compute(cases[0], x, cases[0].needs_backward)
        self.synchronize("the reference")
        right = []
        for case, backend in willing:
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
                right.append(Right(case, backend, error))
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
        self, name: str, right: list[Right], sets: list[Inputs], seconds: float
    ) -> list[dict[str, Any]]:
        """Times one pass of all that passed the check."""
        timed: list[Timed] = []
        measured: list[Measured] = []
        failed: list[dict[str, Any]] = []
        for case, backend, error in right:
            self.progress(f"{case.label}: {name} {backend.name}, preparing")
            entry = self._entry(case, name, backend, "ok")
            entry["error"] = error
            try:
                timed.append(self._prepare(case, name, backend, sets, entry))
                measured.append(Measured(case, entry, timed[-1]))
            except Exception as failure:
                self._refuse_pass(entry, failure)
                failed.append(entry)
                self.synchronize(backend.name)
        if not timed:
            return failed
        label = measured[0].case.label
        self.progress(f"{label}: {name}, timing")
        settings, begin = self.settings, time.perf_counter()
        try:
            rounds = (settings.rounds, settings.warmup)
            interleave(timed, self.clock, *rounds, seconds, settings.fewest_rounds)
            readings = self.telemetry.between(begin, time.perf_counter())
            for case, entry, one in measured:
                fill_in(entry, case, name, one)
                entry["telemetry"] = readings
            hot = [m for m in measured if re.search(settings.soak_filter, f"{m.case.key} {name}")]
            if settings.soak_seconds and hot:
                self._soak(name, hot)
        except Exception as failure:  # nobody can say whose call it was
            for _, entry, _ in measured:
                self._refuse_pass(entry, failure)
            self.synchronize(f"timing {label}")
        # By case, then in the order of the backends: the sort is stable.
        return [m.entry for m in sorted(measured, key=lambda m: m.case.deterministic)] + failed

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

    def _soak(self, name: str, measured: list[Measured]) -> None:
        """The heat-soaked rates: several turns of each, and another order in every turn."""
        turns = self.settings.soak_turns
        seconds = self.settings.soak_seconds / turns
        found: list[list[Soaked]] = [[] for _ in measured]
        orders = balanced_orders(len(measured))
        for _ in range(turns):
            # The chip is coolest for whoever is first: everyone is in turn.
            order, self.soaks = orders[self.soaks % len(orders)], self.soaks + 1
            for i in order:
                case, entry, one = measured[i]
                self.progress(f"{case.label}: {name} {one.name}, soaking")
                ms, begin, end = soak(one, self.clock, seconds, entry["ms"])
                found[i].append(Soaked(ms, self.telemetry.between(begin, end)))
        for (case, entry, _), parts in zip(measured, found, strict=True):
            entry["soak"] = soaked_entry(case, name, parts)

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


def soaked_entry(case: Case, name: str, parts: list[Soaked]) -> dict[str, Any]:
    """Median of the turns, their distance, and the means of what was read along."""
    times = [part.ms for part in parts]
    ms = statistics.median(times)
    readings = [part.telemetry for part in parts if part.telemetry]
    means = {
        key: round(statistics.fmean(reading[key] for reading in readings), 1)
        for key in (readings[0] if readings else ())
    }
    return {
        "ms": ms,
        "spread": (max(times) - min(times)) / ms,
        "turns_ms": [round(t, 6) for t in times],
        "tflops": cost.tflops(case, name, ms),
        "tbps": cost.tbps(case, name, ms),
        "telemetry": means or None,
    }


def together(cases: list[Case]) -> list[list[Case]]:
    """Groups of cases that differ in `deterministic` alone, in the order of their first ones."""
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        groups.setdefault(replace(case, deterministic=False), []).append(case)
    return list(groups.values())


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
    groups = together(cases)
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
        number = 0
        for group in groups:
            keys = [case.key for case in group]
            budget.cases_left = len(cases) - number
            if budget.left <= 0 or outcome.interrupted:
                outcome.skipped += keys
                continue
            runner.progress = lambda text, n=number: on_case(n, len(cases), text)
            try:
                runner.progress(group[0].label)
                if number <= len(cases) // 2 < number + len(group) and number:
                    ceiling("middle")
                runner.run_together(group, budget)
                on_report(outcome.report(runner, suites, absent))
            except DeviceLost:
                raise
            except KeyboardInterrupt:  # what was measured so far is worth keeping
                outcome.interrupted = True
                measured = {entry["key"] for entry in runner.results}
                outcome.skipped += [key for key in keys if key not in measured]
            except Exception as error:  # a fault of ours must not cost the cases before and after
                traceback.print_exc()
                outcome.broken += [f"{key}: {first_line(error)}" for key in keys]
                runner.synchronize(keys[0])
            number += len(group)
        ceiling("end")
    except DeviceLost as error:
        outcome.device_lost = str(error)
    finally:
        telemetry.close()
    return outcome.report(runner, suites, absent)
