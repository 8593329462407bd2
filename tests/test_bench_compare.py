"""What is read off two reports, or one and the table of peers: the regression gate, agreement."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench import agree, compare, derived
from tests.bench_fakes import report_of

# ---- the regression gate ---------------------------------------------------------------------


def gate(tmp_path: Path, before: dict[str, Any], after: dict[str, Any], *more: str) -> int:
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, report in zip(paths, (before, after), strict=True):
        path.write_text(json.dumps(report))
    return compare.main([*map(str, paths), *more])


def test_gate_passes_noise_and_a_slower_clock(tmp_path: Path) -> None:
    before = report_of(["train"], seed=1)
    assert gate(tmp_path, before, report_of(["train"], seed=2)) == 0
    slower = report_of(["train"], seed=2, slower=1.1)
    assert gate(tmp_path, before, slower) == 0
    assert gate(tmp_path, before, slower, "--absolute") == 1
    for report in (before, slower):  # without peers the matrix product tells the drift
        report["results"] = [e for e in report["results"] if not e["is_peer"]]
    assert gate(tmp_path, before, slower) == 0


def test_gate_gives_decode_a_drift_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slower core clock is none of the memory's."""
    before, after = (report_of(["smoke", "decode"], seed=seed) for seed in (1, 2))
    for entry in after["results"]:
        if after["cases"][entry["key"]]["kind"] != "decode":
            entry["ms"] *= 1.1
    assert gate(tmp_path, before, after) == 0
    out = capsys.readouterr().out
    machine, decode = (
        float(out.split(f"drift of {what}: ")[1].split(" ")[0])
        for what in ("the machine", "decode")
    )
    assert (machine, decode) == pytest.approx((10.0, 0.0), abs=0.5)
    ours = next(
        e for e in after["results"] if e["suite"] == "decode" and e["backend"] == "flash_cuda"
    )
    ours["ms"] *= 1.1
    assert gate(tmp_path, before, after) == 1


def test_gate_finds_one_slower_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label = "b4 4k h32 d64 full"
    after = report_of(["train"], seed=2, slower=0.95, **{f"{label} bwd": 1.06})
    assert gate(tmp_path, report_of(["train"], seed=1), after) == 1
    shown = [line for line in capsys.readouterr().out.split("\n") if line.endswith("slower")]
    assert len(shown) == 1
    assert label in shown[0]
    assert "bwd" in shown[0]
    assert gate(tmp_path, report_of(["train"], seed=1), after, "--limit", "8") == 0


def test_gate_allows_what_is_within_a_wide_spread(tmp_path: Path) -> None:
    before, after = report_of(["smoke"], seed=1), report_of(["smoke"], seed=2)
    entry = next(e for e in after["results"] if e["backend"] == "flash_cuda")
    entry["ms"] *= 1.06
    assert gate(tmp_path, before, after) == 1
    entry["spread"] = 0.1
    assert gate(tmp_path, before, after) == 0


def test_gate_finds_what_broke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = report_of(["smoke"], seed=1), report_of(["smoke"], seed=2)
    entry = next(e for e in after["results"] if e["backend"] == "flash_cuda")
    entry |= {"status": "wrong", "reason": "out is off"}
    assert gate(tmp_path, before, after) == 1
    assert "broken: smoke: b4 4k h32 d64 full | fwd | flash_cuda: wrong: out is off" in (
        capsys.readouterr().out
    )


def test_gate_compares_runs_of_different_size_but_not_of_different_cards(tmp_path: Path) -> None:
    before, after = report_of(["smoke", "train"], seed=1), report_of(["smoke"], seed=2)
    assert gate(tmp_path, before, after) == 0
    after["machine"]["card"] = "B200"
    with pytest.raises(SystemExit, match="different cards"):
        gate(tmp_path, before, after)
    assert gate(tmp_path, report_of(["decode"]), report_of(["smoke"])) == 1


# ---- agreement with the table of peers ---------------------------------------------------------


def report_of_the_table(noise: float, clock: float = 1.0, **off: float) -> dict[str, Any]:
    """A run whose peers have the rates of the table, times `clock` and a backend's own factor."""
    report, known = report_of(["train", "decode"]), derived.load_peers()
    random_numbers = random.Random(3)
    for entry in report["results"]:
        case = report["cases"][entry["key"]]
        cell = derived.peer_cell(known, case, entry["pass"]) or agree.decode_cell(known, case)
        if entry["backend"] in cell:
            rate = cell[entry["backend"]] * clock * off.get(entry["backend"], 1.0)
            unit = "tbps" if case["kind"] == "decode" else "tflops"
            entry[unit] = rate * random_numbers.gauss(1, noise)
    return report


@pytest.mark.parametrize(
    ("report", "code", "text"),
    [
        ({"noise": 0.03, "clock": 1.08}, 0, "agrees: "),
        ({"noise": 0.03, "sdpa_flash": 1.3}, 1, "disagrees: sdpa_flash is off by +2"),
        ({"noise": 0.15}, 1, "cells lie outside of 10 %"),
    ],
    ids=["same", "one peer differs", "noisy"],
)
def test_agreement_with_the_table(
    report: dict[str, float],
    code: int,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps(report_of_the_table(**report)))
    assert agree.main([str(path)]) == code
    out = capsys.readouterr().out
    assert text in out
    # cuDNN and FlashAttention-2 in 36 shapes, both passes, and four of decode; FlashAttention-4.
    assert f"the median of {3 * 72} cells" in out
    assert f"the median of {2 * 4} cells" in out


def test_agreement_needs_the_card_and_the_shapes(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report = report_of(["window"])
    path.write_text(json.dumps(report))
    assert agree.main([str(path)]) == 1
    report["machine"]["gpu"] = "NVIDIA B200"
    path.write_text(json.dumps(report))
    with pytest.raises(SystemExit, match="H200"):
        agree.main([str(path)])


def test_gate_of_soaked_times_knows_how_far_the_turns_lie_apart(tmp_path: Path) -> None:
    before, after = (report_of(["smoke"], seed=seed, soak=True) for seed in (1, 2))
    hot = next(e for e in after["results"] if e["backend"] == "flash_cuda")["soak"]
    hot["ms"] *= 1.06
    assert gate(tmp_path, before, after, "--soaked") == 1
    assert gate(tmp_path, before, after) == 0
    hot["spread"] = 0.1
    assert gate(tmp_path, before, after, "--soaked") == 0
