"""Do a run's peers run as fast as they are known to? `python -m bench.agree out.json`.

The peers of a report are held against `bench/peers_h200.json`, measured on the same kind of card by
another program. Both runs have a clock of their own, so rates are first divided by the median ratio
of all cells, decode apart. The table's card was warmer in its later cells, so single cells may lie
outside of the limit; the run agrees if nine cells in ten, and the median of every peer, lie within.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .derived import load_peers, peer_cell
from .plot import load_report
from .table import plain

SHARE_WITHIN = 0.9


@dataclass(frozen=True)
class Pair:
    """One rate in the report and in the table."""

    label: str
    name: str  # of the pass
    backend: str
    here: float
    there: float
    unit: str

    @property
    def ratio(self) -> float:
        """More than 1: faster here."""
        return self.here / self.there


def decode_cell(table: dict[str, Any], case: dict[str, Any]) -> dict[str, float]:
    """The table's cell for a decode case; empty if it is none of its shapes."""
    plain_cache = (
        case["kind"] == "decode"
        and case["seqlen_q"] == 1
        and case["head_dim"] == case["head_dim_v"] == 128
        and case["dtype"] == "bfloat16"
        and not (case["page_size"] or case["lengths"] or case["softcap"])
        and case["window_left"] < 0
    )
    key = f"{case['batch']} {case['seqlen_kv']} {case['heads']}/{case['kv_heads']}"
    return table["decode_tbps"].get(key, {}) if plain_cache else {}


def pairs(report: dict[str, Any], table: dict[str, Any]) -> list[Pair]:
    """The cells that the report and the table share."""
    found = []
    for entry in report["results"]:
        if entry["status"] != "ok" or not entry["is_peer"]:
            continue
        case = report["cases"][entry["key"]]
        cell, unit = decode_cell(table, case), "tbps"
        if not cell:
            cell, unit = peer_cell(table, case, entry["pass"]) or {}, "tflops"
        if entry["backend"] in cell:
            there = cell[entry["backend"]]
            found.append(
                Pair(entry["label"], entry["pass"], entry["backend"], entry[unit], there, unit)
            )
    return found


def drifts(found: list[Pair]) -> dict[str, float]:
    """Median ratio by unit."""
    units = dict.fromkeys(pair.unit for pair in found)
    return {u: statistics.median(p.ratio for p in found if p.unit == u) for u in units}


def judge(found: list[Pair], limit: float) -> tuple[list[Pair], list[str]]:
    """Cells outside of the limit, and what follows for the run; empty: it agrees."""
    drift = drifts(found)
    outside = [pair for pair in found if abs(pair.ratio / drift[pair.unit] - 1) > limit]
    faults = []
    if len(outside) > (1 - SHARE_WITHIN) * len(found):
        faults.append(f"{len(outside)} of {len(found)} cells lie outside of {100 * limit:.0f} %")
    for backend in dict.fromkeys(pair.backend for pair in found):
        mine = [p.ratio / drift[p.unit] for p in found if p.backend == backend]
        middle = statistics.median(mine)
        if abs(middle - 1) > limit:
            faults.append(f"{backend} is off by {100 * (middle - 1):+.0f} % in the median")
    return outside, faults


def main(argv: list[str] | None = None) -> int:
    """Exit code 1 if the run does not agree with the table, or shares no cell with it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.agree",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--limit", type=float, default=10.0, help="per cent (default: 10)")
    args = parser.parse_args(argv)
    report, table = load_report(args.report), load_peers()
    if table["card"] not in str(report["machine"].get("gpu", "")):
        raise SystemExit(f"the table is of an {table['card']}, the report is not")
    found = pairs(report, table)
    if not found:
        print("the report has no cell of the table")
        return 1
    drift = drifts(found)
    outside, faults = judge(found, args.limit / 100)
    header = ["backend", "", "cells", "here / table", "lowest", "highest"]
    rows = []
    for backend in dict.fromkeys(pair.backend for pair in found):
        ratios = [pair.ratio for pair in found if pair.backend == backend]
        figures = (statistics.median(ratios), min(ratios), max(ratios))
        rows.append([backend, "", str(len(ratios)), *(f"{x:.3f}" for x in figures)])
    print(plain(header, rows))
    for unit, factor in drift.items():
        count = sum(pair.unit == unit for pair in found)
        what = "decode" if unit == "tbps" else "the machine"
        print(f"drift of {what}: {factor:.3f}, the median of {count} cells")
    for pair in outside:
        print(
            f"outside: {pair.backend} {pair.name} {pair.label}: {pair.here:.4g}, in the table "
            f"{pair.there:.4g}, after the drift {100 * (pair.ratio / drift[pair.unit] - 1):+.0f} %"
        )
    for fault in faults:
        print(f"disagrees: {fault}")
    if not faults:
        inside = len(found) - len(outside)
        print(f"agrees: {inside} of {len(found)} cells within {args.limit:g} %")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
