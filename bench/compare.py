"""What got slower between two reports: `python -m bench.compare before.json after.json`.

Clocks differ from run to run, so times are first divided by the drift of the peers that both runs
have (their code did not change), or of the matrix product where there are none. Decode has a drift
of its own, of its peers or of the copy: the memory's clock is another. A cell counts as
slower if it lost more than --limit and more than the noise of both medians. Exit code 1 if any is,
or if a case that worked fails now.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .derived import mean_ceiling
from .plot import load_report
from .table import plain

Key = tuple[str, str, str]  # case key, pass, backend
MIN_PEER_CELLS = 4
SIGMAS = 4.0


@dataclass(frozen=True)
class Change:
    """One cell in both reports."""

    key: Key
    before_ms: float
    after_ms: float
    loss: float  # 0.05: 5 % slower, after the drift
    noise: float  # losses within it mean nothing

    @property
    def verdict(self) -> str:
        """slower, faster or same, beyond the noise."""
        if self.loss > self.noise:
            return "slower"
        return "faster" if self.loss < -self.noise else "same"


def timed(report: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """Measured results, not derived ones."""
    return {
        (e["key"], e["pass"], e["backend"]): e for e in report["results"] if e["status"] == "ok"
    }


def median_error(entry: dict[str, Any]) -> float:
    """Relative standard error of a median, from the quartiles."""
    return 0.93 * float(entry["spread"]) / math.sqrt(max(1, entry["samples"]))


def is_decode(report: dict[str, Any], key: Key) -> bool:
    """Whether a cell is bound by memory."""
    return bool(report["cases"][key[0]]["kind"] == "decode")


def drift(before: dict[str, Any], after: dict[str, Any], decode: bool) -> tuple[float, str]:
    """How much slower the machine itself was in the second run, and by what that is judged.

    Args:
        before: a report.
        after: a later one.
        decode: of decode, else of everything else.
    """
    old, new = timed(before), timed(after)
    ratios = [
        new[k]["ms"] / old[k]["ms"]
        for k in old
        if k in new and old[k]["is_peer"] and is_decode(before, k) == decode
    ]
    if len(ratios) >= MIN_PEER_CELLS:
        return statistics.median(ratios), f"{len(ratios)} cells of peers"
    ceiling, name = ("copy_tbps", "the copy") if decode else ("matmul_tflops", "the matrix product")
    rates = [mean_ceiling(report, ceiling) for report in (before, after)]
    if rates[0] and rates[1]:
        return rates[0] / rates[1], name
    return 1.0, "nothing"


def fault_of(report: dict[str, Any], key: Key) -> str | None:
    """Why a cell gave no time; None if it was not asked for, which is no fault."""
    for entry in report["results"]:
        if (entry["key"], entry["pass"], entry["backend"]) == key:
            return f"{entry['status']}: {entry.get('reason', '')}"
    if report["device_lost"] and key[0] in report["cases"]:
        return "the device was lost"
    return None


def compare(
    before: dict[str, Any],
    after: dict[str, Any],
    limit: float,
    absolute: bool,
    soaked: bool = False,
) -> tuple[list[Change], list[str]]:
    """Changes of our cells, and cells that worked before and do not now.

    Args:
        before: a report.
        after: a later one.
        limit: smallest loss that counts, 0.03 is 3 %.
        absolute: do not divide by the drift.
        soaked: compare the heat-soaked times.
    """
    factors = [1.0 if absolute else drift(before, after, decode)[0] for decode in (False, True)]
    old, new = timed(before), timed(after)
    changes, broken = [], []
    for key, entry in old.items():
        if entry["is_peer"]:
            continue
        if key not in new:
            fault = fault_of(after, key)
            if fault:
                broken.append(f"{' | '.join(key)}: {fault}")
            continue
        pair = (entry, new[key])
        if soaked and not all("soak" in e for e in pair):
            continue
        times = [e["soak"]["ms"] if soaked else e["ms"] for e in pair]
        noise = SIGMAS * math.hypot(*(median_error(e) for e in pair))
        if soaked:  # of few turns: their whole distance
            noise = math.hypot(*(e["soak"].get("spread", 0.0) for e in pair))
        noise = max(limit, noise)
        loss = times[1] / times[0] / factors[is_decode(before, key)] - 1
        changes.append(Change(key, times[0], times[1], loss, noise))
    return changes, broken


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--limit", type=float, default=3.0, help="per cent (default: 3)")
    parser.add_argument("--absolute", action="store_true", help="no correction for the clock")
    parser.add_argument("--soaked", action="store_true", help="compare the heat-soaked times")
    parser.add_argument("--all", action="store_true", help="also show what stayed the same")
    args = parser.parse_args(argv)
    before, after = load_report(args.before), load_report(args.after)
    cards = [report["machine"]["card"] for report in (before, after)]
    if cards[0] != cards[1]:
        raise SystemExit(f"different cards, {cards[0]} and {cards[1]}: nothing to compare")
    for decode in sorted({is_decode(before, key) for key in timed(before)}):
        factor, basis = drift(before, after, decode)
        what = "of decode" if decode else "of the machine"
        print(f"drift {what}: {100 * (factor - 1):+.1f} % in time, by {basis}")
    changes, broken = compare(before, after, args.limit / 100, args.absolute, args.soaked)
    shown = [c for c in changes if args.all or c.verdict != "same"]
    if shown:
        header = ["case", "pass", "backend", "before ms", "after ms", "change", "noise", ""]
        rows = [
            [
                *c.key,
                f"{c.before_ms:.4f}",
                f"{c.after_ms:.4f}",
                f"{100 * c.loss:+.1f}%",
                f"{100 * c.noise:.1f}%",
                c.verdict,
            ]
            for c in sorted(shown, key=lambda c: -c.loss)
        ]
        print(plain(header, rows))
    for text in broken:
        print(f"broken: {text}")
    counts = {v: sum(c.verdict == v for c in changes) for v in ("slower", "same", "faster")}
    print(", ".join(f"{n} {v}" for v, n in counts.items()) + f", {len(broken)} broken")
    if not changes and not broken:
        print("the reports have no cell of ours in common")
        return 1
    return 1 if counts["slower"] or broken else 0


if __name__ == "__main__":
    sys.exit(main())
