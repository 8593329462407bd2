"""Results as text: with rich on a terminal, plain everywhere else."""

from __future__ import annotations

import sys
from typing import Any

from .derived import cells, host_times, mean_ceiling

SYMBOLS = {"wrong": "WRONG", "failed": "failed", "refused": "-", "absent": ""}


def rows_of(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a row for each case and pass, a column for each backend.

    TFLOP/s, in decode TB/s of keys and values; our column is followed by the ratio to the best
    peer, the share of the ceiling and the spread.
    """
    table = cells(report)
    status = {(e["key"], e["pass"], e["backend"]): e["status"] for e in report["results"]}
    seen = list(dict.fromkeys(e["backend"] for e in report["results"]))
    ours = [n for n in seen if n.startswith("flash_cuda")]
    columns = ours + [n for n in seen if n not in ours]
    header = ["case", "pass", *columns]
    if ours:
        header += ["ratio", "best peer", "ceiling", "spread", "host us", "MiB"]
    rows = []
    order = dict.fromkeys((e["key"], e["pass"]) for e in report["results"])
    for key, name in order:
        case, cell = report["cases"][key], table.get((key, name), {})
        label = next(e["label"] for e in report["results"] if e["key"] == key)
        row = [label, name]
        for column in columns:
            entry = cell.get(column)
            if entry:
                row.append(rate_text(case, entry))
            else:
                row.append(SYMBOLS.get(status.get((key, name, column), "absent"), "?"))
        if ours:
            row += our_columns([cell[n] for n in ours if n in cell])
        rows.append(row)
    kept = [i for i in range(len(header)) if i < 2 or any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def rate_text(case: dict[str, Any], entry: dict[str, Any]) -> str:
    """The rate in the unit of the case, and the heat-soaked one after a slash."""
    unit = "tbps" if case["kind"] == "decode" else "tflops"
    rates = [entry[unit]] + ([entry["soak"][unit]] if "soak" in entry else [])
    if unit == "tflops" and max(rates) < 1:
        return "/".join(f"{1000 * rate:.3g}G" for rate in rates)
    digits = 2 if unit == "tbps" or max(rates) < 10 else 0
    return "/".join(f"{rate:.{digits}f}" for rate in rates)


def our_columns(ours: list[dict[str, Any]]) -> list[str]:
    """Of the fastest of our paths: ratio, to whom, ceiling share, spread, host time, memory."""
    if not ours:
        return [""] * 6
    best = min(ours, key=lambda entry: entry["ms"])
    ratio = f"{best['ratio']:.2f}" if "ratio" in best else ""
    if "ratio" in best.get("soak", {}):
        ratio += f"/{best['soak']['ratio']:.2f}"
    share = f"{best['ceiling_pct']:.0f}%" if "ceiling_pct" in best else ""
    return [
        ratio,
        best.get("best_peer", ""),
        share,
        f"{100 * best['spread']:.1f}%",
        f"{best['host_us']:.0f}" if "host_us" in best else "",
        f"{best['peak_bytes'] / 2**20:.0f}" if best.get("peak_bytes") else "",
    ]


def widths(header: list[str], rows: list[list[str]]) -> list[int]:
    """Columns of text that each column needs."""
    return [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]


def plain(header: list[str], rows: list[list[str]]) -> str:
    """A table of fixed columns; the first two are text."""
    sizes = widths(header, rows)

    def line(row: list[str]) -> str:
        fields = [
            text.ljust(width) if i < 2 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, sizes, strict=True))
        ]
        return "  ".join(fields).rstrip()

    return "\n".join([line(header), "  ".join("-" * size for size in sizes), *map(line, rows)])


def notes_of(report: dict[str, Any]) -> list[str]:
    """What the table does not say: machine, ceilings, absent peers, faults."""
    facts = report["machine"]
    gpu = facts.get("gpu")
    where = f"{gpu}, driver {facts['driver']}, CUDA {facts['cuda']}" if gpu else facts["cpu"]
    notes = [f"{where}, torch {facts['torch']}, {facts['date']} {facts['time']}"]
    if report["ceiling"]:
        matmul = " ".join(f"{c['when']} {c['matmul_tflops']:.4g}" for c in report["ceiling"])
        copy = mean_ceiling(report, "copy_tbps")
        notes.append(f"ceiling: matmul {matmul} TFLOP/s, copy {copy:.3g} TB/s")
    units = "TFLOP/s (G: GFLOP/s), decode TB/s of K and V"
    if report["settings"]["soak_seconds"]:
        units += "; single calls / heat-soaked"
    notes.append(
        f"{units}; ratio: our speed over the best peer's; MiB: peak beyond inputs; "
        f"{report['seconds']} s in all"
    )
    notes += [f"host time of a call, {n}: {times}" for n, times in host_times(report).items()]
    telemetry = [e["telemetry"] for e in report["results"] if e.get("telemetry")]
    if telemetry:
        spans = {
            k: (min(t[k] for t in telemetry), max(t[k] for t in telemetry)) for k in telemetry[0]
        }
        clock, power, heat = spans["clock_mhz"], spans["power_w"], spans["temperature_c"]
        notes.append(
            f"SM clock {clock[0]:.0f}-{clock[1]:.0f} MHz, power {power[0]:.0f}-{power[1]:.0f} W, "
            f"{heat[0]:.0f}-{heat[1]:.0f} C ({report['telemetry_source']})"
        )
    for name, fact in report["backends"].items():
        if fact["status"] == "absent":
            notes.append(f"absent: {name}: {fact['reason']}")
    said = set()
    for entry in report["results"]:
        fault = (entry["backend"], entry["status"], entry.get("reason"))
        if entry["status"] in ("wrong", "failed") and fault not in said:
            said.add(fault)
            notes.append(
                f"{entry['status']}: {entry['backend']}: {entry['label']}: {entry['reason']}"
            )
        if entry["status"] == "derived" and "derived" not in said:
            said.add("derived")
            notes.append(f"derived: {entry['backend']}: not run here; {entry['reason']} (by cell)")
    if report["skipped"]:
        why = "interrupted" if report.get("interrupted") else "the time was up"
        notes.append(f"skipped, {why}: {', '.join(report['skipped'])}")
    notes += [f"BROKEN: {text}" for text in report["broken"]]
    if report["device_lost"]:
        notes.append(f"DEVICE LOST {report['device_lost']}; nothing was measured after that")
    return notes


def show(report: dict[str, Any]) -> None:
    """Prints the table and the notes."""
    header, rows = rows_of(report)
    if not (sys.stdout.isatty() and show_rich(header, rows)):
        print(plain(header, rows))
    print("\n".join(notes_of(report)))


def show_rich(header: list[str], rows: list[list[str]]) -> bool:
    """Prints the table by rich; False if rich is absent or the terminal too narrow for it."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table(header_style="bold")
    for i, text in enumerate(header):
        table.add_column(text, justify="left" if i < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    frame = 3 * len(header) + 1
    if sum(widths(header, rows)) + frame > console.width:
        return False
    console.print(table)
    return True
