"""Charts of a report, PNG and SVG: `python -m bench.plot out.json --out charts/`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import cost
from .cases import Case, short
from .derived import cells, mean_ceiling, overheads

FORMATS = ("png", "svg")
# Colours that colour-blind readers can tell apart; ours is the strong one.
COLOURS = {
    "flash_cuda": "#d55e00",
    "sdpa_cudnn": "#009e73",
    "sdpa_flash": "#0072b2",
    "sdpa_math": "#999999",
    "fa2": "#56b4e9",
    "fa3": "#cc79a7",
    "fa3*": "#cc79a7",
    "fa4": "#7b3294",
    "flex": "#b8a000",
    "flashinfer": "#444444",
}
OTHERS = ("#8c564b", "#17becf", "#bcbd22", "#e377c2")
NO_MATPLOTLIB = (
    "no charts: matplotlib is not installed (pip install matplotlib); "
    "python -m bench.plot draws them later from the JSON"
)
Figure = Any
Chart = tuple[str, Figure]


def pyplot() -> Any:
    """matplotlib.pyplot without a display; ImportError if absent."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "flash_cuda"  # the same report gives the same file
    return plt


def style(backend: str) -> dict[str, Any]:
    """Line style of a backend, the same in all charts."""
    base = backend.split(":")[0]
    colour = COLOURS.get(backend) or COLOURS.get(base)
    if colour is None:
        colour = OTHERS[sum(map(ord, backend)) % len(OTHERS)]
    ours = base == "flash_cuda"
    dashed = backend == "fa3*" or ":" in backend
    return {
        "color": colour,
        "linewidth": 2.5 if ours else 1.3,
        "marker": "o",
        "markersize": 5 if ours else 3.5,
        "linestyle": "--" if dashed else "-",
        "zorder": 3 if ours else 2,
    }


def case_of(report: dict[str, Any], key: str) -> Case:
    """The case of a key."""
    fields = dict(report["cases"][key])
    for name in ("lengths", "passes"):
        fields[name] = tuple(fields[name])
    return Case(**fields)


def is_plain(case: Case) -> bool:
    """Whether a case is a point of a plain length sweep."""
    return (
        case.kind == "dense"
        and case.seqlen_q == case.seqlen_kv
        and not (case.has_window or case.softcap or case.deterministic or case.name or case.threads)
    )


def subtitle(report: dict[str, Any]) -> str:
    """Card, date, versions."""
    facts = report["machine"]
    where = facts.get("gpu") or facts["cpu"]
    return f"{where}, {facts['date']}, torch {facts['torch']}, flash_cuda {facts['flash_cuda']}"


# ---- the charts -------------------------------------------------------------------------------

# (head dim, query heads a kv head, causal) -> backend -> (length, result)
Panels = dict[tuple[int, int, bool], dict[str, list[tuple[int, dict[str, Any]]]]]


def throughput(report: dict[str, Any]) -> Iterator[Chart]:
    """TFLOP/s by sequence length, a panel for each head dim and mask."""
    table = cells(report)
    for suite in report["suites"]:
        found = {k: v for k, v in table.items() if v and report["cases"][k[0]]["suite"] == suite}
        for name in dict.fromkeys(pass_name for _, pass_name in found):
            panels: Panels = {}
            for (key, pass_name), cell in found.items():
                case = case_of(report, key)
                if pass_name != name or not is_plain(case):
                    continue
                lines = panels.setdefault(
                    (case.head_dim, case.heads // case.kv_heads, case.causal), {}
                )
                for backend, entry in cell.items():
                    lines.setdefault(backend, []).append((case.seqlen_q, entry))
            if not panels:
                continue
            yield f"throughput_{suite}_{name}", draw_throughput(report, panels, suite, name, None)
            hot = soaked_only(panels)
            if hot:
                figure = draw_throughput(report, hot, suite, name, "soak")
                yield f"throughput_{suite}_{name}_soaked", figure


def soaked_only(panels: Panels) -> Panels:
    """The panels with a heat-soaked rate, and of their points those that have one."""
    hot = {
        panel: {backend: [p for p in points if "soak" in p[1]] for backend, points in lines.items()}
        for panel, lines in panels.items()
    }
    return {panel: lines for panel, lines in hot.items() if any(lines.values())}


def draw_throughput(
    report: dict[str, Any], panels: Panels, suite: str, name: str, part: str | None
) -> Figure:
    """One figure of `throughput`; part "soak" takes the heat-soaked rates."""
    plt = pyplot()
    rows = sorted({(d, g) for d, g, _ in panels})
    columns = sorted({c for _, _, c in panels})
    figure, axes = plt.subplots(
        len(rows), len(columns), figsize=(5.2 * len(columns), 3.1 * len(rows) + 0.6), squeeze=False
    )
    ceiling = mean_ceiling(report, "matmul_tflops")
    for (head_dim, group, causal), lines in panels.items():
        axis = axes[rows.index((head_dim, group))][columns.index(causal)]
        for backend, points in lines.items():
            values = sorted((n, e[part] if part else e) for n, e in points if not part or part in e)
            if values:
                xs, ys = zip(*((n, e["tflops"]) for n, e in values), strict=True)
                axis.plot(xs, ys, label=backend, **style(backend))
        if ceiling:
            axis.axhline(ceiling, color="black", linewidth=0.8, linestyle=":")
            axis.text(
                0.01,
                ceiling,
                " matmul",
                transform=axis.get_yaxis_transform(),
                va="bottom",
                fontsize=7,
            )
        lengths = sorted({n for points in lines.values() for n, _ in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [short(n) for n in lengths])
        axis.minorticks_off()
        axis.set_ylim(0, 1.08 * axis.get_ylim()[1])
        grouped = f", {group} query heads a kv head" if group > 1 else ""
        axis.set_title(
            f"head dim {head_dim}, {'causal' if causal else 'full'}{grouped}", fontsize=10
        )
        axis.grid(alpha=0.3)
        axis.set_ylabel("TFLOP/s")
    unused = [
        axes[i][j]
        for i, r in enumerate(rows)
        for j, c in enumerate(columns)
        if (*r, c) not in panels
    ]
    for axis in unused:
        axis.set_visible(False)
    handles = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=6, frameon=False, fontsize=9
    )
    how = "back to back, heat-soaked" if part else "single calls"
    figure.suptitle(f"{suite}: {name}, by sequence length, {how}\n{subtitle(report)}", fontsize=10)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


def ratio_heatmap(report: dict[str, Any]) -> Iterator[Chart]:
    """Our speed over the best peer's: rows are shapes, columns are lengths (or passes)."""
    plt = pyplot()
    for suite in report["suites"]:
        grid: dict[str, dict[str, tuple[float, str]]] = {}
        lengths: dict[str, int] = {}
        entries = [
            e
            for e in report["results"]
            if e["suite"] == suite and "ratio" in e and e["backend"] == "flash_cuda"
        ]
        sweep = bool(entries) and all(is_plain(case_of(report, e["key"])) for e in entries)
        for entry in entries:
            case = case_of(report, entry["key"])
            row, column = entry["label"], entry["pass"]
            if sweep:
                heads = f" {case.heads}/{case.kv_heads}" if case.heads != case.kv_heads else ""
                mask = "causal" if case.causal else "full"
                row = f"{entry['pass']} d{case.head_dim}{heads} {mask}"
                column = short(case.seqlen_q)
                if case.dtype != "bfloat16":
                    row += f" {case.dtype}"
                lengths[column] = case.seqlen_q
            grid.setdefault(row, {})[column] = (entry["ratio"], entry["best_peer"])
        if not grid:
            continue
        names = list(dict.fromkeys(c for row in grid.values() for c in row))
        columns = sorted(names, key=lambda c: lengths.get(c, 0))
        values = [[grid[r].get(c, (math.nan, ""))[0] for c in columns] for r in grid]
        figure, axis = plt.subplots(figsize=(3.5 + 1.15 * len(columns), 1.5 + 0.36 * len(grid)))
        image = axis.imshow(values, cmap="RdYlGn", vmin=0.7, vmax=1.3, aspect="auto")
        axis.set_xticks(range(len(columns)), columns)
        axis.set_yticks(range(len(grid)), list(grid), fontsize=8)
        for y, row in enumerate(grid.values()):
            for x, column in enumerate(columns):
                if column in row:
                    ratio, peer = row[column]
                    axis.text(x, y, f"{ratio:.2f}\n{peer}", ha="center", va="center", fontsize=6)
        figure.colorbar(image, label="best peer's time / ours")
        axis.set_title(
            f"{suite}: flash_cuda over the best peer of each cell\n{subtitle(report)}", fontsize=8
        )
        figure.tight_layout()
        yield f"ratio_{suite}", figure


def decode_bandwidth(report: dict[str, Any]) -> Iterator[Chart]:
    """TB/s of keys and values in decode, beside the copy's."""
    table = {k[0]: v for k, v in cells(report).items() if report["cases"][k[0]]["kind"] == "decode"}
    if not table:
        return
    plt = pyplot()
    backends = list(dict.fromkeys(b for cell in table.values() for b in cell))
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.17 * len(table) * (len(backends) + 1)))
    height, labels = 0.85 / len(backends), []
    for y, (key, cell) in enumerate(table.items()):
        labels.append(case_of(report, key).label)
        for i, backend in enumerate(backends):
            if backend in cell:
                place = y + (i - (len(backends) - 1) / 2) * height
                label = backend if backend not in axis.get_legend_handles_labels()[1] else None
                colour = style(backend)["color"]
                axis.barh(place, cell[backend]["tbps"], height, color=colour, label=label)
    copy = mean_ceiling(report, "copy_tbps")
    if copy:
        axis.axvline(
            copy, color="black", linewidth=0.8, linestyle=":", label="copy, read + written"
        )
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_xlabel("TB/s of K and V")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    axis.grid(alpha=0.3, axis="x")
    axis.set_title(f"decode\n{subtitle(report)}", fontsize=9)
    figure.tight_layout()
    yield "decode_bandwidth", figure


def roofline(report: dict[str, Any]) -> Iterator[Chart]:
    """Rate against arithmetic intensity, under the roof of copy and matrix product."""
    matmul, copy = mean_ceiling(report, "matmul_tflops"), mean_ceiling(report, "copy_tbps")
    points: dict[str, list[tuple[float, float]]] = {}
    for (key, name), cell in cells(report).items():
        if "flash_cuda" not in cell:
            continue
        case = case_of(report, key)
        intensity = cost.flops(case, name) / cost.moved_bytes(case, name)
        group = f"{case.suite} {name}"
        points.setdefault(group, []).append((intensity, cell["flash_cuda"]["tflops"]))
    if not points or not matmul or not copy:
        return
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.5))
    every = [x for group in points.values() for x, _ in group] + [matmul / copy]
    low, high = min(every) / 2, max(every) * 2
    xs = [low * (high / low) ** (i / 100) for i in range(101)]
    axis.plot(
        xs,
        [min(matmul, copy * x) for x in xs],
        color="black",
        linewidth=1,
        label="roof of this run",
    )
    for i, (group, values) in enumerate(points.items()):
        axis.scatter(
            *zip(*values, strict=True), s=22, label=group, color=plt.get_cmap("tab10")(i % 10)
        )
    axis.set(xscale="log", yscale="log", xlabel="FLOP per byte moved", ylabel="TFLOP/s")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    axis.set_title(f"flash_cuda under the roofline\n{subtitle(report)}", fontsize=9)
    figure.tight_layout()
    yield "roofline", figure


def determinism_overhead(report: dict[str, Any]) -> Iterator[Chart]:
    """How much longer the repeatable backward takes."""
    overhead = overheads(report)
    if not overhead:
        return
    plt = pyplot()
    backends = list(dict.fromkeys(b for row in overhead.values() for b in row))
    figure, axis = plt.subplots(figsize=(max(6, 1.1 * len(overhead)), 4.2))
    width = 0.85 / len(backends)
    for i, backend in enumerate(backends):
        places = [x + (i - (len(backends) - 1) / 2) * width for x in range(len(overhead))]
        heights = [row.get(backend, math.nan) for row in overhead.values()]
        axis.bar(places, heights, width, label=backend, color=style(backend)["color"])
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(overhead)), list(overhead), rotation=30, ha="right", fontsize=7)
    axis.set_ylabel("extra time, %")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    axis.grid(alpha=0.3, axis="y")
    axis.set_title(f"what a deterministic backward costs\n{subtitle(report)}", fontsize=9)
    figure.tight_layout()
    yield "determinism_overhead", figure


def memory(report: dict[str, Any]) -> Iterator[Chart]:
    """Peak memory of a call by length, and what the scores alone would take."""
    sweeps: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    for (key, name), cell in cells(report).items():
        case = case_of(report, key)
        if not is_plain(case):
            continue
        shape = (
            case.suite,
            case.batch,
            case.heads,
            case.kv_heads,
            case.head_dim,
            case.causal,
            name,
        )
        lines = sweeps.setdefault(shape, {})
        for backend, entry in cell.items():
            if entry.get("peak_bytes"):
                lines.setdefault(backend, {})[case.seqlen_q] = entry["peak_bytes"]
                scores = cost.score_bytes(case)
                lines.setdefault("scores alone (computed)", {})[case.seqlen_q] = scores
    sweeps = {
        s: lines for s, lines in sweeps.items() if max(map(len, lines.values()), default=0) > 2
    }
    plt = pyplot() if sweeps else None
    for (suite, batch, heads, _, head_dim, causal, name), lines in sweeps.items():
        figure, axis = plt.subplots(figsize=(6, 4.2))
        for backend, points in lines.items():
            look = style(backend)
            if "computed" in backend:
                look = {"color": "black", "linestyle": ":", "linewidth": 1}
            xs, ys = zip(*sorted(points.items()), strict=True)
            axis.plot(xs, [y / 2**20 for y in ys], label=backend, **look)
        lengths = sorted({n for points in lines.values() for n in points})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(lengths, [short(n) for n in lengths])
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set(xlabel="sequence length", ylabel="MiB beyond the inputs")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
        mask = "causal" if causal else "full"
        shape = f"batch {batch}, {heads} heads, head dim {head_dim}, {mask}"
        axis.set_title(f"peak memory of {name}: {shape}\n{subtitle(report)}", fontsize=8)
        figure.tight_layout()
        yield f"memory_{suite}_d{head_dim}_{mask}_{name}", figure


CHARTS: tuple[Callable[[dict[str, Any]], Iterator[Chart]], ...] = (
    throughput,
    ratio_heatmap,
    decode_bandwidth,
    roofline,
    determinism_overhead,
    memory,
)


def draw_all(report: dict[str, Any], folder: Path) -> list[str]:
    """Writes every chart that the report has data for; says what it wrote and what it could not."""
    try:
        plt = pyplot()
    except ImportError:
        return [NO_MATPLOTLIB]
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for chart in CHARTS:
        names = []
        for name, figure in chart(report):
            name = name.replace("+", "_")
            for extension in FORMATS:
                metadata = {"Date": None} if extension == "svg" else None
                figure.savefig(
                    folder / f"{name}.{extension}", dpi=130, bbox_inches="tight", metadata=metadata
                )
            plt.close(figure)
            names.append(name)
        text = ", ".join(f"{folder / name}.png" for name in names)
        lines.append(f"chart {chart.__name__}: {text or 'no data for it in this report'}")
    return lines


def load_report(path: Path) -> dict[str, Any]:
    """A report that run.py wrote."""
    try:
        report = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise SystemExit(f"{path}: {error}") from None
    if report.get("schema") != 1:
        raise SystemExit(f"{path}: not a report of bench.run, or of another version")
    return dict(report)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("charts"))
    parser.add_argument("--html", type=Path, help="also write a page with tables and charts")
    args = parser.parse_args(argv)
    reports = [load_report(path) for path in args.reports]
    for path, report in zip(args.reports, reports, strict=True):
        folder = args.out / path.stem if len(reports) > 1 else args.out
        print("\n".join(draw_all(report, folder)))
    if args.html:
        from . import html

        args.html.write_text(html.page(reports))
        print(f"page: {args.html}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
