"""Contestants and reports that are made up, for the tests of bench/."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import torch
from torch import Tensor

from bench import cost, derived
from bench.backend import Abilities, Backend, Forward
from bench.cases import Case, Suite, load_suites, make_case
from bench.inputs import Inputs
from bench.runner import Settings

# ---- contestants -----------------------------------------------------------------------------

CPU = torch.device("cpu")


def case_of(**values: object) -> Case:
    base = {
        "seqlen": 96,
        "batch": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "dtype": "float32",
        "passes": ["fwd", "bwd"],
        "grad": True,
    }
    return make_case("test", base | values)


def expand_heads(case: Case, x: Tensor) -> Tensor:
    return x.repeat_interleave(case.heads // case.kv_heads, dim=-2)


def plain_attention(case: Case, x: Inputs) -> Tensor:
    """Dense attention by autograd's own operators, for dense cases."""
    k, v = expand_heads(case, x.k), expand_heads(case, x.v)
    s = torch.einsum("bqhd,bkhd->bhqk", x.q, k) / math.sqrt(case.head_dim)
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    place = torch.arange(case.seqlen_q)[:, None] + case.seqlen_kv - case.seqlen_q
    key = torch.arange(case.seqlen_kv)[None]
    seen = torch.ones(case.seqlen_q, case.seqlen_kv, dtype=torch.bool)
    if case.causal:
        seen &= key <= place
    if case.window_left >= 0:
        seen &= key >= place - case.window_left
    p = s.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


class Plain(Backend):
    """A backend whose result a test may spoil."""

    abilities = Abilities(
        dtypes=frozenset({"float32"}), devices=frozenset({"cpu"}), other_head_dim_v=True
    )

    def __init__(self, name: str = "plain", is_peer: bool = True) -> None:
        self.name, self.is_peer = name, is_peer

    def setup(self, case: Case, x: Inputs) -> Forward:
        return lambda: self.spoil(plain_attention(case, x))

    def spoil(self, out: Tensor) -> Tensor:
        return out


class OneBadRow(Plain):
    def spoil(self, out: Tensor) -> Tensor:
        keep = torch.ones_like(out)
        keep[-1, -1, 0] = 0.5
        return out * keep


class Nan(Plain):
    def spoil(self, out: Tensor) -> Tensor:
        keep = torch.ones_like(out)
        keep[0, 3, 1, 2] = math.nan
        return out * keep


class BadGradient(Plain):
    def spoil(self, out: Tensor) -> Tensor:
        return out.detach() + 1.01 * (out - out.detach())


class Shy(Plain):
    def spoil(self, out: Tensor) -> Tensor:
        raise NotImplementedError("not here\nsecond line")


class Broken(Plain):
    def spoil(self, out: Tensor) -> Tensor:
        raise RuntimeError("no luck")


class Restless(Plain):
    calls = 0

    def spoil(self, out: Tensor) -> Tensor:
        self.calls += 1
        return out * (1 + 1e-6 * self.calls)


SHAPES = [
    {},
    {"causal": True},
    {"causal": True, "window_left": 7},
    {"causal": True, "softcap": 5.0},
    {"seqlen": None, "seqlen_q": 40, "seqlen_kv": 96, "causal": True},
    {"seqlen": None, "seqlen_q": 96, "seqlen_kv": 40, "causal": True},
    {"head_dim_v": 16},
]


def settings(**values: object) -> Settings:
    return Settings(CPU, rounds=5, warmup=1, **values)


def suite(*cases: Case) -> Suite:
    return Suite("test", "", "cpu", (), cases)


# ---- reports ---------------------------------------------------------------------------------

SUITES = load_suites()
RATES = {"fwd": 600.0, "bwd": 500.0, "fwd+bwd": 520.0}
SPEED = {"flash_cuda": 1.1, "sdpa_cudnn": 0.8, "sdpa_flash": 0.45, "fa4": 1.0, "sdpa_math": 0.05}


def entry_of(
    case: Any, name: str, backend: str, noise: random.Random, slower: float
) -> dict[str, Any]:
    """A plausible measurement."""
    if case.kind == "decode":
        ms = cost.moved_bytes(case, name) / 3.5e9 / SPEED[backend]
    else:
        ms = cost.flops(case, name) / 1e9 / (RATES[name] * SPEED[backend])
    ms *= slower * (1.3 if case.deterministic else 1.0)
    samples = [ms * noise.gauss(1, 0.003) for _ in range(15)]
    samples.sort()
    return {
        "suite": case.suite,
        "key": case.key,
        "label": case.label,
        "pass": name,
        "backend": backend,
        "is_peer": backend != "flash_cuda",
        "status": "ok",
        "ms": samples[7],
        "low": samples[3],
        "high": samples[11],
        "spread": (samples[11] - samples[3]) / samples[7],
        "samples": 15,
        "tflops": cost.tflops(case, name, samples[7]),
        "tbps": cost.tbps(case, name, samples[7]),
        "host_us": 17.0,
        "peak_bytes": cost.score_bytes(case) * 3 if backend == "sdpa_math" else 1 << 24,
        "timer": "events",
        "telemetry": {"clock_mhz": 1700.0, "power_w": 650.0, "temperature_c": 60.0},
    }


def report_of(
    names: list[str], seed: int = 0, slower: float = 1.0, soak: bool = False, **ours: float
) -> dict[str, Any]:
    """A report as run.py writes it. `slower` acts on all, `ours` by case label on flash_cuda."""
    noise = random.Random(seed)
    cases = [case for name in names for case in SUITES[name].cases]
    results = []
    for case in cases:
        for name in case.passes:
            for backend in SPEED:
                if backend == "sdpa_math" and case.suite != "memory":
                    continue
                factor = slower
                if backend == "flash_cuda":
                    factor *= ours.get(f"{case.label} {name}", 1.0)
                entry = entry_of(case, name, backend, noise, factor)
                if soak:
                    hot = entry["ms"] * 1.1
                    rates = {"tflops": entry["tflops"] / 1.1, "tbps": entry["tbps"] / 1.1}
                    entry["soak"] = {"ms": hot, "telemetry": None} | rates
                results.append(entry)
    report = {
        "schema": 1,
        "machine": {
            "card": "H200",
            "gpu": "NVIDIA H200",
            "cpu": "some CPU",
            "date": "2026-11-29",
            "time": "12:00:00",
            "torch": "2.11.0",
            "flash_cuda": "0.1.0",
            "driver": "580",
            "cuda": "13.0",
        },
        "settings": {"soak_seconds": 1.0 if soak else 0.0},
        "telemetry_source": "nvidia-smi",
        "suites": names,
        "cases": {case.key: case.as_dict() for case in cases},
        "backends": {
            "flash_cuda": {"status": "present", "version": "0.1.0"},
            "fa4": {"status": "present", "version": "4.0.0b36"},
            "sdpa_cudnn": {"status": "present", "version": "torch 2.11.0"},
            "fa2": {
                "status": "absent",
                "reason": "ModuleNotFoundError: No module named 'flash_attn'",
            },
        },
        "ceiling": [
            {"when": w, "matmul_tflops": t / slower, "copy_tbps": 4.2}
            for w, t in (("start", 779.0), ("middle", 684.0), ("end", 739.0))
        ],
        "seconds": 100.0,
        "skipped": [],
        "broken": [],
        "device_lost": None,
        "results": results,
    }
    derived.complete(report, derive=True)
    return json.loads(json.dumps(report))
