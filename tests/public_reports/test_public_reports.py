"""Faults that others met, as bug-log.md lists them: none of them here.

Cases run in this process; `python tests/public_reports/cases.py --run flash_cuda --device cpu
--isolate` runs each in its own.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import flash_cuda
from tests.public_reports import cases

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
HERE = Path(__file__).parent


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.id)
def test_public_report(case: cases.Case, device: str) -> None:
    """Right, or refused with a clear text where that is right too; never unsupported."""
    if case.heavy and device == "cpu":
        pytest.skip("takes over 4 GB of memory; runs on a GPU, or with cases.py --heavy")
    verdict, details = cases.run_case(case, flash_cuda, device)
    if verdict == "SKIP":
        pytest.skip("; ".join(details))
    assert verdict in ("PASS", "REFUSED"), details


def test_every_case_is_in_the_log() -> None:
    """Each says where it was met."""
    rows = re.findall(r"^\| (B\d+) \|", (HERE / "bug-log.md").read_text(), re.MULTILINE)
    assert {case.id for case in cases.CASES} <= set(rows)


def test_a_planted_fault_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner sees a window that is one key too narrow."""
    right = flash_cuda.flash_attn_func

    def wrong(*args: object, **kwargs: object) -> object:
        left, end = kwargs["window_size"]  # type: ignore[misc]
        return right(*args, **{**kwargs, "window_size": (left - 1, end)})  # type: ignore[arg-type]

    monkeypatch.setattr(flash_cuda, "flash_attn_func", wrong)
    case = next(case for case in cases.CASES if case.id == "B13")
    with torch.no_grad():
        verdict, _ = cases.run_case(case, flash_cuda, "cpu")
    assert verdict == "FAIL"
