"""Writes the README's performance section from a committed report.

    python -m bench.readme bench/results/H200/2026-11-29.json            rewrites README.md
    python -m bench.readme bench/results/H200/2026-11-29.json --check    fails if it is stale

The section lies between the two markers; the charts go beside the report.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from .derived import cells, host_times, mean_ceiling, overheads
from .plot import case_of, draw_all, load_report

BEGIN = "<!-- bench:begin (written by python -m bench.readme) -->"
END = "<!-- bench:end -->"
ROOT = Path(__file__).resolve().parent.parent


def geometric_mean(values: list[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(report: dict[str, Any]) -> list[str]:
    """A Markdown table: our best rate and the ratios by suite, pass, head dim and mask.

    The last column is there if anything was heat-soaked.
    """
    groups: dict[tuple[str, str, int, str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for (key, name), cell in cells(report).items():
        ours = cell.get("flash_cuda")
        if ours and "ratio" in ours:
            case = case_of(report, key)
            mask = "causal" if case.causal else "full"
            mask += ", deterministic" if case.deterministic else ""
            group = (case.suite, name, case.head_dim, mask)
            groups.setdefault(group, []).append((ours, report["cases"][key]))
    soaked = any("ratio" in e.get("soak", {}) for group in groups.values() for e, _ in group)
    head = "| suite | pass | head dim | mask | shapes | our best | ratio to the best peer | worst |"
    rows = [head + (" heat-soaked |" if soaked else ""), "|---" * (9 if soaked else 8) + "|"]
    for (suite, name, head_dim, mask), entries in groups.items():
        is_decode = entries[0][1]["kind"] == "decode"
        unit, rate = ("TB/s", "tbps") if is_decode else ("TFLOP/s", "tflops")
        best = max(entry[rate] for entry, _ in entries)
        ratios = [entry["ratio"] for entry, _ in entries]
        hot = [e["soak"]["ratio"] for e, _ in entries if "ratio" in e.get("soak", {})]
        best_text = f"{best:.2f}" if is_decode else f"{best:.0f}"
        row = (
            f"| {suite} | {name} | {head_dim} | {mask} | {len(ratios)} | {best_text} {unit} "
            f"| {geometric_mean(ratios):.2f} | {min(ratios):.2f} |"
        )
        if soaked:
            row += f" {geometric_mean(hot):.2f} ({len(hot)}) |" if hot else " |"
        rows.append(row)
    return rows


def determinism_text(report: dict[str, Any]) -> list[str]:
    """What a deterministic backward costs each backend, in one sentence; empty if not measured."""
    extra: dict[str, list[float]] = {}
    for row in overheads(report).values():
        for backend, per_cent in row.items():
            extra.setdefault(backend, []).append(per_cent)
    if not extra:
        return []
    costs = (
        f"{name} {statistics.median(values):+.0f} % ({len(values)})"
        for name, values in extra.items()
    )
    return [
        "",
        "Deterministic gradients, extra time of the backward (median, and of how many shapes; the "
        f"others were refused or did not repeat): {', '.join(costs)}.",
    ]


def host_text(report: dict[str, Any]) -> list[str]:
    """Host time of a call, a line a pass; empty if not measured."""
    return [
        line
        for name, times in host_times(report).items()
        for line in ("", f"Host time of a call, {name} (median): {times}.")
    ]


def section(report: dict[str, Any], source: str, charts: list[str]) -> str:
    """The text between the markers.

    Args:
        report: what to show.
        source: the report's path from the README.
        charts: paths of the charts from the README.
    """
    facts = report["machine"]
    peers = sorted(
        f"{name} {fact['version']}" if not fact["version"].startswith("torch") else name
        for name, fact in report["backends"].items()
        if fact["status"] == "present" and not name.startswith("flash_cuda")
    )
    ceiling = mean_ceiling(report, "matmul_tflops")
    where = facts.get("gpu") or facts["cpu"]
    gpu = f", CUDA {facts['cuda']}, driver {facts['driver']}" if facts.get("gpu") else ""
    lines = [
        f"Measured on one {where}, {facts['date']}, torch {facts['torch']}{gpu}"
        f"; matrix product of the same run {ceiling:.3g} TFLOP/s. Peers in the same process: "
        f"{', '.join(peers) or 'none'}. Full data: [{source}]({source}); again with "
        f"`python -m bench.run --suite {','.join(report['suites'])} --json out.json --plot out/`.",
        "",
        *summary(report),
        *determinism_text(report),
        *host_text(report),
    ]
    if any(entry["status"] == "derived" for entry in report["results"]):
        lines += [
            "",
            "`fa3*` was not run here: its figures are this run's FA4 times the ratio of the two in "
            "[bench/peers_h200.json](bench/peers_h200.json). It counts as a peer.",
        ]
    images = {chart: f"![{Path(chart).stem}]({chart})" for chart in charts}
    main_suite = report["suites"][0]
    seen_at_once = (f"throughput_{main_suite}_", f"ratio_{main_suite}", "decode")
    stems = {chart: Path(chart).stem for chart in charts}
    first = [c for c in charts if stems[c].startswith(seen_at_once) and "soaked" not in stems[c]]
    more = [image for chart, image in images.items() if chart not in first]
    lines += ["", *(images[chart] for chart in first)]
    if more:
        lines += ["", "<details><summary>More charts</summary>", "", *more, "", "</details>"]
    return "\n".join(lines).rstrip()


def replace_section(text: str, body: str) -> str:
    """The README with a new section; ValueError if the markers are not there."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise ValueError(f"the markers {BEGIN} and {END} are not there, in this order")
    return f"{text[: begin + len(BEGIN)]}\n{body}\n{text[end:]}"


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="change nothing, fail if stale")
    args = parser.parse_args(argv)
    report = load_report(args.report)
    folder = args.report.resolve().with_suffix("")
    if not args.check:
        print("\n".join(draw_all(report, folder)))
    root = args.readme.resolve().parent

    def from_readme(path: Path) -> str:
        return path.relative_to(root).as_posix()

    try:
        charts = [from_readme(path) for path in sorted(folder.glob("*.png"))]
        body = section(report, from_readme(args.report.resolve()), charts)
        before = args.readme.read_text()
        after = replace_section(before, body)
    except ValueError as error:
        raise SystemExit(f"{args.readme}: {error}") from None
    if args.check:
        if before != after:
            print(f"{args.readme} is stale: run python -m bench.readme {args.report}")
        return int(before != after)
    args.readme.write_text(after)
    print(f"written: {args.readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
