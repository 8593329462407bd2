"""The runner on a CPU: what is right is timed, what is wrong is named, nothing ends the run."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

import bench.runner
from bench import derived, machine, reference, run
from bench.backend import Backend
from bench.cases import Case, Suite
from bench.machine import Ceiling
from bench.runner import Budget, DeviceLost, Runner, run_suites, together
from bench.timing import CpuClock, Timed
from tests.bench_fakes import (
    BadGradient,
    Broken,
    Nan,
    OneBadRow,
    Plain,
    Restless,
    Shy,
    case_of,
    settings,
    suite,
)


@pytest.fixture(autouse=True)
def cheap_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large matrix product for every run would be most of the tests' time."""
    monkeypatch.setattr(machine, "measure_ceiling", lambda when, *_: Ceiling(when, 1.0, 1.0))


class Silent:
    """Telemetry without a GPU."""

    def between(self, begin: float, end: float) -> None:
        return None


def test_right_is_timed_and_wrong_is_named() -> None:
    contestants: list[Backend] = [Plain("flash_cuda", is_peer=False), Plain("peer")]
    faulty = {"row": OneBadRow, "nan": Nan, "gradient": BadGradient, "shy": Shy, "broken": Broken}
    contestants += [kind(name) for name, kind in faulty.items()]
    report = run_suites(
        [suite(case_of(causal=True))], contestants, {"gone": "no module"}, settings(), print
    )
    status = {
        (e["backend"], e["pass"]): (e["status"], e.get("reason", "")) for e in report["results"]
    }
    assert len(status) == 14
    for name in ("fwd", "bwd"):
        assert status["flash_cuda", name][0] == status["peer", name][0] == "ok"
        assert status["row", name][0] == "wrong"
        assert status["row", name][1].startswith("out is off")
        assert status["nan", name][1].startswith("out is off by inf")
        assert status["gradient", name][1].startswith("dq is off")
        assert status["shy", name] == ("refused", "NotImplementedError: not here")
        assert status["broken", name] == ("failed", "RuntimeError: no luck")
    ours = next(e for e in report["results"] if e["backend"] == "flash_cuda")
    assert ours["ms"] > 0
    assert ours["tflops"] > 0
    assert ours["samples"] == 5
    assert ours["best_peer"] == "peer"
    assert ours["ratio"] > 0
    assert ours["error"] < 1e-5
    assert ours["ceiling_pct"] > 0
    assert [c["when"] for c in report["ceiling"]] == ["start", "end"]
    assert report["backends"]["gone"] == {"status": "absent", "reason": "no module"}


def test_what_determinism_costs_is_measured_in_the_same_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both modes of every backend take turns, whatever the clock does; the reference is one."""
    met: list[list[str]] = []
    references = 0
    plain, compute = bench.runner.interleave, reference.compute

    def spy(timed: list[Timed], *args: Any) -> None:
        met.append([one.name for one in timed])
        plain(timed, *args)

    def count(*args: Any) -> reference.Reference:
        nonlocal references
        references += 1
        return compute(*args)

    monkeypatch.setattr(bench.runner, "interleave", spy)
    monkeypatch.setattr(reference, "compute", count)
    cases = [
        replace(case_of(seqlen=n, passes=["bwd"]), deterministic=on)
        for on in (False, True)
        for n in (16, 32)
    ]
    contestants: list[Backend] = [Plain("flash_cuda", is_peer=False), Plain("peer"), Restless("r")]
    report = run_suites([suite(*cases)], contestants, {}, settings(soak_seconds=0.05), print)
    assert met == [["flash_cuda", "flash_cuda", "peer", "peer", "r"]] * 2
    assert references == 2
    results = {(e["key"], e["backend"]): e for e in report["results"]}
    assert len(results) == len(report["results"]) == 12
    assert results[cases[2].key, "r"]["status"] == "wrong"
    for case in cases:
        for name in ("flash_cuda", "peer"):
            entry = results[case.key, name]
            assert entry["status"] == "ok"
            assert entry["samples"] == 5
            assert len(entry["soak"]["turns_ms"]) == 4
    pairs = derived.overheads(report)
    assert {name for row in pairs.values() for name in row} == {"flash_cuda", "peer"}


def test_cases_come_together_in_their_order() -> None:
    one, two = case_of(seqlen=16), case_of(seqlen=32)
    repeated = [replace(case, deterministic=True) for case in (one, two)]
    assert together([one, two, *repeated]) == [[one, repeated[0]], [two, repeated[1]]]
    assert together([repeated[1], one]) == [[repeated[1]], [one]]


def test_an_interrupted_pair_is_skipped_as_far_as_it_was_not_measured() -> None:
    class Impatient(Plain):
        def refuses(self, case: Case) -> str | None:
            if case.deterministic:
                raise KeyboardInterrupt
            return "not this one"

    cases = [replace(case_of(), deterministic=on) for on in (False, True)]
    report = run_suites([suite(*cases)], [Impatient()], {}, settings(), print)
    assert report["interrupted"]
    assert report["skipped"] == [cases[1].key]


def test_deterministic_means_the_same_bits() -> None:
    case = case_of(deterministic=True)
    report = run_suites([suite(case)], [Restless("a"), Plain("b")], {}, settings(), print)
    status = {e["backend"]: (e["status"], e.get("reason")) for e in report["results"]}
    assert status["a"] == ("wrong", "out differs from run to run")
    assert status["b"][0] == "ok"


def test_soaked_rates_are_kept_apart() -> None:
    case = case_of(passes=["fwd"])
    ours = Plain("flash_cuda", is_peer=False)
    report = run_suites([suite(case)], [ours, Plain("peer")], {}, settings(soak_seconds=0.2), print)
    for entry in report["results"]:
        hot = entry["soak"]
        assert len(hot["turns_ms"]) == 4
        assert hot["ms"] == pytest.approx(statistics.median(hot["turns_ms"]), rel=1e-2)
        between = (max(hot["turns_ms"]) - min(hot["turns_ms"])) / hot["ms"]
        assert hot["spread"] == pytest.approx(between, abs=1e-2)
        assert hot["telemetry"] is None  # a CPU has none
    assert report["results"][0]["soak"]["best_peer"] == "peer"


def test_everyone_is_soaked_first_in_turn_and_only_where_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def fake(one: Timed, _: object, seconds: float, ms: float) -> tuple[float, float, float]:
        order.append(one.name)
        assert seconds == 0.5
        return 1.0, 0.0, 0.0

    monkeypatch.setattr(bench.runner, "soak", fake)
    cases = [case_of(seqlen=n, passes=["fwd", "bwd"]) for n in (16, 24, 32, 48)]
    asked = settings(soak_seconds=1.0, soak_turns=2, soak_filter="b2 (16|32|48) .*fwd$")
    contestants: list[Backend] = [Plain(name) for name in ("a", "b", "c")]
    report = run_suites([suite(*cases)], contestants, {}, asked, print)
    assert "".join(order) == "abcbca" + "cabcba" + "acbbac"
    hot = {(e["key"], e["pass"]) for e in report["results"] if "soak" in e}
    assert hot == {(case.key, "fwd") for case in cases if case is not cases[1]}


def test_ctrl_c_ends_the_run_but_keeps_what_was_measured() -> None:
    class Impatient(Plain):
        def refuses(self, case: Case) -> str | None:
            if case.seqlen_q == 32:
                raise KeyboardInterrupt
            return None

    cases = [case_of(seqlen=n) for n in (16, 32, 48)]
    report = run_suites([suite(*cases)], [Impatient()], {}, settings(), print)
    assert report["interrupted"]
    assert report["skipped"] == [cases[1].key, cases[2].key]
    assert {e["key"] for e in report["results"]} == {cases[0].key}
    assert [c["when"] for c in report["ceiling"]] == ["start", "middle", "end"]


def test_an_interrupted_case_that_has_results_is_not_called_skipped() -> None:
    class Impatient(Plain):
        def refuses(self, case: Case) -> str | None:
            if self.name == "b":
                raise KeyboardInterrupt
            return "not this one"

    cases = [case_of(seqlen=n) for n in (16, 32)]
    contestants = [Impatient("a"), Impatient("b")]
    report = run_suites([suite(*cases)], contestants, {}, settings(), print)
    assert report["interrupted"]
    measured = {e["key"] for e in report["results"]}
    assert set(report["skipped"]) == {c.key for c in cases} - measured


def test_a_suite_runs_its_own_backends() -> None:
    few = Suite("few", "", "cpu", ("b",), (replace(case_of(), suite="few"),))
    report = run_suites([suite(case_of()), few], [Plain("a"), Plain("b")], {}, settings(), print)
    ran = {(e["suite"], e["backend"]) for e in report["results"]}
    assert ran == {("test", "a"), ("test", "b"), ("few", "b")}


def test_the_report_so_far_is_told_after_every_case() -> None:
    told: list[dict[str, Any]] = []
    cases = [case_of(seqlen=n) for n in (16, 32)]
    ours = Plain("flash_cuda", is_peer=False)
    report = run_suites(
        [suite(*cases)], [ours, Plain("peer")], {}, settings(), print, on_report=told.append
    )
    assert [len(part["results"]) for part in told] == [4, 8]
    assert told[1]["results"] == report["results"]
    assert all("ratio" in e for e in told[0]["results"] if not e["is_peer"])
    assert set(told[0]) == set(report)


def test_a_spent_budget_skips_cases_and_says_so() -> None:
    cases = [case_of(seqlen=n) for n in (16, 32, 48)]
    report = run_suites([suite(*cases)], [Plain()], {}, settings(budget_seconds=1e-9), print)
    assert report["results"] == []
    assert report["skipped"] == [case.key for case in cases]


def test_a_lost_device_ends_the_run_but_not_the_report() -> None:
    class Lost(CpuClock):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    runner = Runner(settings(), [Broken("flash_cuda")], Lost(), Silent())
    with pytest.raises(DeviceLost, match="illegal memory access"):
        runner.run_together([case_of()], Budget(0, 1))


def test_a_case_that_breaks_the_harness_costs_only_itself() -> None:
    class Trap(Plain):
        def refuses(self, case: Case) -> str | None:
            if case.seqlen_q == 16:
                raise KeyError("trap")
            return None

    cases = [case_of(seqlen=16), case_of(seqlen=32)]
    report = run_suites([suite(*cases)], [Trap("a")], {}, settings(), print)
    assert report["broken"] == [f"{cases[0].key}: KeyError: 'trap'"]
    assert [e["status"] for e in report["results"]] == ["ok", "ok"]


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    run_suites([suite(case_of(threads=1))], [Plain()], {}, settings(), print)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--filter", "("], "--filter '(' is no regular expression"),
        (["--soak-filter", "*"], "--soak-filter '*' is no regular expression"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--budget-seconds", "-3"], "--budget-seconds must be at least 0, got -3.0"),
        (["--soak", "-1"], "--soak must be at least 0, got -1.0"),
        (["--soak-turns", "0"], "--soak-turns must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.parse_args(arguments)
    assert said in capsys.readouterr().err


def test_the_cpu_suite_in_place_of_others_keeps_the_filter() -> None:
    args = run.parse_args(["--suite", " train ", "--filter", "512"])
    (suite,) = run.choose_suites(args, torch.device("cpu"))
    assert suite.name == "cpu"
    assert suite.cases
    assert all("512" in case.key for case in suite.cases)
