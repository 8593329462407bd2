"""The timing logic, on a device that is made of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from bench.compare import median_error
from bench.machine import parse_smi
from bench.runner import Budget
from bench.timing import Timed, host_milliseconds, interleave, soak, summarize


class FakeDevice:
    """A clock whose calls take a known time on the host and on the device."""

    def __init__(self) -> None:
        self.host = 0.0  # seconds
        self.device = 0.0  # when the device will have done all that is queued
        self.log: list[str] = []

    def call(self, name: str, device_ms: float, host_ms: float = 0.0) -> Callable[[], None]:
        def run() -> None:
            self.log.append(name)
            self.host += host_ms / 1e3
            self.device = max(self.device, self.host) + device_ms / 1e3

        return run

    def now(self) -> float:
        return self.host

    def measure(self, call: Callable[[], None], host_ms: float) -> float:
        # As on a GPU: the device spins until the call has been issued.
        begin = max(self.device, self.host) + (2 * host_ms + 0.1) / 1e3
        self.device = begin
        call()
        self.synchronize()
        return 1e3 * (self.device - begin)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def mark(self) -> float:
        return self.device

    def wait(self, mark: float) -> None:
        self.host = max(self.host, mark)

    def between(self, begin: float, end: float) -> float:
        return 1e3 * (end - begin)


def timed(device: FakeDevice, name: str, ms: float, sets: int = 3, **more: float) -> Timed:
    return Timed(name, [device.call(f"{name}{i}", ms, **more) for i in range(sets)])


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcd", "abcde"])
def test_in_every_round_everyone_and_everyone_follows_everyone(names: str) -> None:
    device = FakeDevice()
    contestants = [timed(device, name, 1.0, sets=1) for name in names]
    count = len(names)
    period = count * (1 + count % 2)
    interleave(contestants, device, rounds=period, warmup=0, seconds=1e9)
    rounds = [
        "".join(entry[0] for entry in device.log[i : i + count])
        for i in range(0, count * period, count)
    ]
    assert all(sorted(order) == sorted(names) for order in rounds)
    assert [len(one.samples) for one in contestants] == [period] * count
    follows = Counter(pair for order in rounds for pair in pairwise(order))
    assert len(follows) == count * (count - 1)
    assert len(set(follows.values())) <= 1


def test_neighbours_use_different_inputs_and_everyone_uses_all() -> None:
    for backends, sets in ((2, 3), (3, 3), (4, 3), (4, 4), (1, 3)):
        device = FakeDevice()
        contestants = [timed(device, "abcd"[i], 1.0, sets=sets) for i in range(backends)]
        interleave(contestants, device, rounds=12, warmup=0, seconds=1e9)
        places = [entry[1] for entry in device.log]
        assert all(a != b for a, b in pairwise(places))
        for name in "abcd"[:backends]:
            assert {e[1] for e in device.log if e[0] == name} == set("012345"[:sets])


def test_warm_up_does_not_count_and_host_time_never_shows() -> None:
    device = FakeDevice()
    one = timed(device, "a", 0.5, host_ms=3.0)
    one.host_ms = 3.0
    interleave([one], device, rounds=7, warmup=2, seconds=1e9)
    assert len(device.log) == 9
    assert one.samples == pytest.approx([0.5] * 7)


def test_a_graph_of_several_calls_is_divided() -> None:
    device = FakeDevice()
    one = Timed("a", [device.call("a", 12.0)], per_call=4)
    interleave([one], device, rounds=2, warmup=0, seconds=1e9)
    assert one.samples == pytest.approx([3.0, 3.0])


def test_time_limit_keeps_a_minimum_of_rounds() -> None:
    device = FakeDevice()
    one = timed(device, "a", 100.0)
    interleave([one], device, rounds=50, warmup=1, seconds=0.2, minimum=5)
    assert len(one.samples) == 5
    interleave([two := timed(device, "b", 100.0)], device, rounds=50, warmup=0, seconds=1.0)
    assert 5 <= len(two.samples) <= 12


def test_host_time_does_not_wait_for_the_device() -> None:
    device = FakeDevice()
    calls = [device.call("a", 50.0, host_ms=0.02)]
    assert host_milliseconds(calls, device, 9) == pytest.approx(0.02)


def test_soak_counts_the_warm_half_and_never_runs_far_ahead() -> None:
    device = FakeDevice()
    warm = {"ms": 1.0}

    def call() -> None:
        # The chip slows down as it heats up.
        warm["ms"] = 1.0 if device.host < 1.0 else 1.25
        device.host += 1e-6
        device.device = max(device.device, device.host) + warm["ms"] / 1e3
        lag.append(device.device - device.host)

    lag: list[float] = []
    took, begin, end = soak(Timed("a", [call]), device, seconds=3.0, ms=1.0)
    assert took == pytest.approx(1.25, rel=1e-3)
    assert 1.5 <= begin < end <= 3.2
    assert max(lag) < 0.06


def test_summary() -> None:
    found = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.ms, found.low, found.high, found.samples) == (3.0, 2.0, 4.0, 5)
    assert found.spread == pytest.approx(2 / 3)
    assert summarize([2.0]).spread == 0.0


def test_median_error_is_that_of_normal_noise() -> None:
    import random
    import statistics

    generator = random.Random(1)
    samples = [[generator.gauss(10, 0.2) for _ in range(25)] for _ in range(400)]
    actual = statistics.stdev(statistics.median(s) for s in samples) / 10
    told = statistics.mean(
        median_error({"spread": summarize(s).spread, "samples": len(s)}) for s in samples
    )
    assert told == pytest.approx(actual, rel=0.25)


def test_budget_is_shared_among_what_is_left() -> None:
    now = [0.0]
    budget = Budget(100.0, 4, lambda: now[0])
    assert budget.share() == 25.0
    now[0], budget.cases_left = 70.0, 2
    assert budget.share() == 15.0
    now[0] = 200.0
    assert budget.share() == 0.0
    assert budget.left < 0
    assert Budget(0.0, 3, lambda: now[0]).left == float("inf")


def test_smi_lines() -> None:
    reading = parse_smi("1980, 691.20, 54\n")
    assert reading is not None
    assert (reading.clock_mhz, reading.power_w, reading.temperature_c) == (1980, 691.2, 54)
    assert parse_smi("1980, [N/A], 54\n") is None
    assert parse_smi("") is None
