"""How things are timed.

A rate is the median of single calls between two events. Before each call the GPU is given a spin
kernel that lasts longer than the host needs to issue the call, so host time never shows; where the
host was later all the same, the call is measured again behind a longer one. Backends
take turns within a round, in orders that are balanced over the rounds; each call uses another set
of inputs, so that neither the L2 cache nor the clock favours one. `soak` is the other regime: calls
back to back at the power limit, where rankings can differ.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Call = Callable[[], Any]


class Clock(Protocol):
    """A device that can be timed."""

    def now(self) -> float:
        """Seconds on the host."""

    def measure(self, call: Call, host_ms: float) -> float:
        """Milliseconds that one call takes on the device; issuing it takes host_ms on the host."""

    def synchronize(self) -> None:
        """Waits for the device."""

    def mark(self) -> Any:
        """A point in the device's queue."""

    def wait(self, mark: Any) -> None:
        """Waits until the device has passed a mark."""

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds between two marks that have been passed."""


class CudaClock:
    """Events on the current CUDA stream."""

    SPIN_CYCLES_PER_MS = 2_000_000  # at the highest clock, so never too short
    LEAST_SPIN_MS, MOST_SPIN_MS = 0.5, 50.0
    ATTEMPTS = 4  # a call that waits for the device itself is later than any spin

    def __init__(self) -> None:
        """Makes one pair of events, used again for every call."""
        self._pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def now(self) -> float:
        """Seconds on the host."""
        return time.perf_counter()

    def measure(self, call: Call, host_ms: float) -> float:
        """Times one call that is queued while the GPU still spins."""
        spin_ms = max(self.LEAST_SPIN_MS, 2 * host_ms)
        begin, end = self._pair
        for _ in range(self.ATTEMPTS):
            spin_ms = min(spin_ms, self.MOST_SPIN_MS)
            start = self.now()
            torch.cuda._sleep(int(spin_ms * self.SPIN_CYCLES_PER_MS))
            begin.record()
            call()
            end.record()
            issued_ms = 1e3 * (self.now() - start)
            end.synchronize()
            if issued_ms < spin_ms or spin_ms >= self.MOST_SPIN_MS:
                break
            spin_ms = 2 * issued_ms
        return float(begin.elapsed_time(end))

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        """Records an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """Waits for an event."""
        mark.synchronize()

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Milliseconds between two events."""
        return float(begin.elapsed_time(end))


class CpuClock:
    """Wall time."""

    def now(self) -> float:
        """Seconds on the host."""
        return time.perf_counter()

    def measure(self, call: Call, host_ms: float) -> float:
        """Times one call."""
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)

    def synchronize(self) -> None:
        """Nothing runs behind the host's back."""

    def mark(self) -> float:
        """The time."""
        return time.perf_counter()

    def wait(self, mark: float) -> None:
        """A mark on the CPU has always been passed."""

    def between(self, begin: float, end: float) -> float:
        """Milliseconds between two marks."""
        return 1e3 * (end - begin)


@dataclass
class Timed:
    """Something to time: one call for each set of inputs."""

    name: str
    calls: list[Call]
    host_ms: float = 0.0  # of one call
    per_call: int = 1  # operations in one call: a graph holds several
    timer: str = "events"
    samples: list[float] = field(default_factory=list)  # ms of one operation
    keep: Any = None  # what a graph reads and must not be freed


@dataclass(frozen=True)
class Statistics:
    """Of the samples of one measurement."""

    ms: float  # median
    low: float  # quartiles
    high: float
    spread: float  # (high - low) / median
    samples: int


def summarize(samples: list[float]) -> Statistics:
    """Median and quartiles."""
    if len(samples) < 2:
        return Statistics(samples[0], samples[0], samples[0], 0.0, len(samples))
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Statistics(middle, low, high, (high - low) / middle if middle else 0.0, len(samples))


def balanced_orders(count: int) -> list[list[int]]:
    """Orders in which everyone follows everyone else equally often: a Williams design.

    A call that follows a light one finds a cooler chip and a higher clock, by up to 5 % at the
    power limit, so a rotation of one order, which keeps neighbours together, favours some.

    Args:
        count: contestants.

    Returns:
        `count` orders, twice as many if it is odd (E. J. Williams, Experimental designs balanced
        for the estimation of residual effects of treatments, 1949).
    """
    first = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    orders = [[(i + shift) % count for i in first] for shift in range(count)]
    return orders + [order[::-1] for order in orders] if count % 2 else orders


def interleave(
    timed: list[Timed], clock: Clock, rounds: int, warmup: int, seconds: float, minimum: int = 5
) -> None:
    """Fills in the samples of all, taking turns.

    Args:
        timed: what to time.
        clock: the device.
        rounds: samples of each, fewer if the time runs out, but `minimum` always.
        warmup: rounds that do not count.
        seconds: time for all of it.
        minimum: fewest rounds.
    """
    deadline, minimum = clock.now() + seconds, min(minimum, rounds)
    orders, place = balanced_orders(len(timed)), 0
    for turn in range(-warmup, rounds):
        if turn >= minimum and clock.now() > deadline:
            return
        for one in (timed[i] for i in orders[turn % len(orders)]):
            # Neighbours take different sets: the second must not find the first one's in L2.
            call = one.calls[place % len(one.calls)]
            place += 1
            ms = clock.measure(call, one.host_ms)
            if turn >= 0:
                one.samples.append(ms / one.per_call)


def host_milliseconds(calls: list[Call], clock: Clock, count: int) -> float:
    """Median time until a call returns, while the device works behind."""
    clock.synchronize()
    times = []
    for i in range(count):
        begin = clock.now()
        calls[i % len(calls)]()
        times.append(1e3 * (clock.now() - begin))
    clock.synchronize()
    return statistics.median(times)


def soak(one: Timed, clock: Clock, seconds: float, ms: float) -> tuple[float, float, float]:
    """Runs back to back; the second half counts, when the chip is warm.

    Args:
        one: what to run.
        clock: the device.
        seconds: how long.
        ms: what one operation takes, roughly.

    Returns:
        Milliseconds of one operation, and host times of the begin and the end of the second half.
    """
    chunk = max(1, round(10.0 / max(1e-6, ms * one.per_call)))  # about 10 ms of work
    queue: deque[Any] = deque()
    start = clock.now()
    counted, begin, begin_at, place = 0, None, start, 0
    while True:
        for _ in range(chunk):
            one.calls[place % len(one.calls)]()
            place += 1
        queue.append(clock.mark())
        if begin is not None:
            counted += chunk
        # Two chunks ahead: the device never waits, and the host never runs far ahead.
        if len(queue) > 2:
            clock.wait(queue.popleft())
        elapsed = clock.now() - start
        if begin is None and elapsed > seconds / 2:
            begin, begin_at = queue[-1], clock.now()
        elif begin is not None and elapsed > seconds and counted:
            break
    end = queue[-1]
    clock.wait(end)
    return clock.between(begin, end) / (counted * one.per_call), begin_at, clock.now()


def capture_graph(calls: list[Call], warmups: int = 2) -> torch.cuda.CUDAGraph:
    """One CUDA graph of one call a set of inputs, on the current stream (not the default one)."""
    stream = torch.cuda.current_stream()
    for _ in range(warmups):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph
