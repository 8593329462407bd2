"""Figures that follow from the measured ones: shares of the ceiling, ratios, absent peers."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

PEERS_FILE = Path(__file__).with_name("peers_h200.json")
DERIVED_NAME = "fa3*"


def complete(report: dict[str, Any], derive: bool) -> None:
    """Adds what is computed to a report, in place."""
    if derive:
        report["results"] += derive_fa3(report)
    add_ceiling_shares(report)
    add_ratios(report)


def mean_ceiling(report: dict[str, Any], key: str) -> float | None:
    """Mean of the run's readings of a ceiling: they fall as the card warms."""
    values = [ceiling[key] for ceiling in report["ceiling"]]
    return sum(values) / len(values) if values else None


def add_ceiling_shares(report: dict[str, Any]) -> None:
    """`ceiling_pct`: of the matrix product's rate; in decode, of the copy's."""
    matmul = mean_ceiling(report, "matmul_tflops")
    copy = mean_ceiling(report, "copy_tbps")
    for entry in report["results"]:
        if entry["status"] not in ("ok", "derived"):
            continue
        is_decode = report["cases"][entry["key"]]["kind"] == "decode"
        rate, limit = (entry["tbps"], copy) if is_decode else (entry["tflops"], matmul)
        if limit:
            entry["ceiling_pct"] = 100 * rate / limit


def cells(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Timed results by (case key, pass), then by backend."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for entry in report["results"]:
        if entry["status"] in ("ok", "derived"):
            found.setdefault((entry["key"], entry["pass"]), {})[entry["backend"]] = entry
    return found


def add_ratios(report: dict[str, Any]) -> None:
    """`ratio`: the best peer's time over ours, so more than 1 is faster; `best_peer`: who."""
    for cell in cells(report).values():
        peers = [entry for entry in cell.values() if entry["is_peer"]]
        if not peers:
            continue
        best = min(peers, key=lambda entry: entry["ms"])
        for entry in cell.values():
            if entry["is_peer"]:
                continue
            entry["best_peer"], entry["ratio"] = best["backend"], best["ms"] / entry["ms"]
            soaked = [p for p in peers if "soak" in p]
            if "soak" in entry and soaked:
                hot = min(soaked, key=lambda p: p["soak"]["ms"])
                entry["soak"]["best_peer"] = hot["backend"]
                entry["soak"]["ratio"] = hot["soak"]["ms"] / entry["soak"]["ms"]


def overheads(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Extra time of the deterministic backward in per cent, by case and pass, then backend."""
    table, found = cells(report), dict[str, dict[str, float]]()
    for (key, name), cell in table.items():
        if not report["cases"][key]["deterministic"]:
            continue
        free = table.get((key.replace(" det", ""), name), {})
        for backend, entry in cell.items():
            if backend in free:
                label = f"{entry['label'].replace(' det', '')} {name}"
                ratio = entry["ms"] / free[backend]["ms"]
                found.setdefault(label, {})[backend] = 100 * (ratio - 1)
    return found


def host_times(report: dict[str, Any]) -> dict[str, str]:
    """Host time of a call by pass, medians over the cases: "flash_cuda 22 us, sdpa_flash 17 us"."""
    found: dict[str, dict[str, list[float]]] = {}
    for entry in report["results"]:
        if entry["status"] == "ok" and "host_us" in entry:
            by_backend = found.setdefault(entry["pass"], {})
            by_backend.setdefault(entry["backend"], []).append(entry["host_us"])
    return {
        name: ", ".join(f"{b} {statistics.median(us):.0f} us" for b, us in times.items())
        for name, times in found.items()
    }


def load_peers() -> dict[str, Any]:
    """The table of peers measured side by side on an H200."""
    return dict(json.loads(PEERS_FILE.read_text()))


def peer_cell(table: dict[str, Any], case: dict[str, Any], name: str) -> dict[str, float] | None:
    """The table's cell for a case, if it is one of the table's shapes."""
    same = (
        case["kind"] == "dense"
        and case["dtype"] == "bfloat16"
        and case["seqlen_q"] == case["seqlen_kv"]
        and case["heads"] == case["kv_heads"]
        and case["heads"] * case["head_dim"] == table["width"]
        and case["head_dim"] == case["head_dim_v"]
        and case["batch"] * case["seqlen_q"] == table["tokens"]
        and case["window_left"] < 0
        and case["window_right"] < 0
        and not case["softcap"]
        and not case["deterministic"]
        and case["grad"]
    )
    key = f"{case['head_dim']} {int(case['causal'])} {case['seqlen_q']}"
    return table["cells"].get(key, {}).get(name) if same else None


def derive_fa3(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Where FlashAttention-3 is absent: this run's FA4 times the table's ratio of the two.

    Such results have the status "derived" and count as a peer. Only for the card of the table.
    """
    if any(e["backend"] == "fa3" and e["status"] == "ok" for e in report["results"]):
        return []
    table = load_peers()
    if table["card"] not in str(report["machine"].get("gpu", "")):
        return []
    found = []
    for entry in report["results"]:
        if entry["backend"] != "fa4" or entry["status"] != "ok":
            continue
        cell = peer_cell(table, report["cases"][entry["key"]], entry["pass"])
        if not cell:
            continue
        factor = cell["fa3"] / cell["fa4"]
        copied = ("suite", "key", "label", "pass", "timer", "spread", "samples")
        stand_in = {key: entry[key] for key in copied}
        stand_in |= {
            "backend": DERIVED_NAME,
            "is_peer": True,
            "status": "derived",
            "reason": f"this run's fa4 x {factor:.3f}, the ratio of {table['date']}",
            "ms": entry["ms"] / factor,
            "tflops": entry["tflops"] * factor,
            "tbps": entry["tbps"] * factor,
        }
        if "soak" in entry:
            hot = entry["soak"]
            stand_in["soak"] = {
                "ms": hot["ms"] / factor,
                "tflops": hot["tflops"] * factor,
                "tbps": hot["tbps"] * factor,
            }
        found.append(stand_in)
    return found
