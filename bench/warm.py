"""Compiles the kernels of peers that compile at the first call, in several processes at once.

    python -m bench.warm --suite train --worker 0 --workers 6     (one worker; run.py starts them)

Each worker calls the backend once for its share of the cases; the compiled kernels land in the
peer's cache on disk, where the benchmark finds them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .cases import Case, load_suites

COMPILED = ("fa4",)
TIMEOUT_SECONDS = 240


def distinct(cases: list[Case]) -> list[Case]:
    """One case for each set of properties that peers compile for."""
    found: dict[tuple[Any, ...], Case] = {}
    for case in cases:
        found.setdefault(signature(case), case)
    return list(found.values())


def signature(case: Case) -> tuple[Any, ...]:
    """What a compiled kernel depends on, as far as an outsider can tell."""
    return (
        case.kind,
        case.dtype,
        case.head_dim,
        case.head_dim_v,
        case.heads // case.kv_heads,
        case.causal,
        case.window_left >= 0,
        case.window_right >= 0,
        case.softcap,
        case.deterministic,
        case.page_size,
        case.needs_backward,
        min(case.seqlen_q, 256),
        case.seqlen_kv >= 512,
    )


def warm_up(
    suites: list[str],
    backends: list[str],
    pattern: str,
    sites: list[str],
    tell: Callable[[str], None],
) -> None:
    """Starts the workers and waits; failures are told and cost nothing but time later."""
    wanted = [name for name in backends if name in COMPILED]
    if not wanted:
        return
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    command = [sys.executable, "-m", "bench.warm", "--suite", ",".join(suites)]
    command += ["--filter", pattern, "--workers", str(workers)]
    command += [argument for site in sites for argument in ("--site", site)]
    tell(f"compiling {', '.join(wanted)} in {workers} processes")
    root = Path(__file__).resolve().parent.parent
    running = [
        subprocess.Popen(
            [*command, "--worker", str(i)],
            cwd=root,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(workers)
    ]
    for process in running:
        try:
            errors = process.communicate(timeout=TIMEOUT_SECONDS)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            errors = f"more than {TIMEOUT_SECONDS} s"
        if process.wait():
            last = errors.strip().split("\n")[-1] if errors.strip() else "no message"
            tell(f"a compiling process failed, its kernels compile later: {last}")


def main(argv: list[str] | None = None) -> int:
    """One worker."""
    from .backend import first_line
    from .backends import all_backends
    from .calls import run_once
    from .inputs import make_inputs
    from .run import add_sites, select_cases

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suite", required=True)
    parser.add_argument("--filter", default="")
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--site", action="append", default=[])
    args = parser.parse_args(argv)
    add_sites(args.site)
    device = torch.device("cuda")
    suites = load_suites()
    cases = [
        case
        for name in args.suite.split(",")
        if set(COMPILED) & set(suites[name].backends)
        for case in select_cases(suites[name], args.filter).cases
    ]
    backends = [b for name, b in all_backends().items() if name in COMPILED]
    backends = [b for b in backends if not b.missing(device)]
    failures = 0
    for case in distinct(cases)[args.worker :: args.workers]:
        # The batch is no property of a kernel: the smallest keeps the memory of many workers low.
        small = replace(case, batch=1, lengths=case.lengths[:1]) if case.kind != "varlen" else case
        for backend in backends:
            if backend.refuses(case):
                continue
            try:
                with backend.scope(small):
                    run_once(small, backend, make_inputs(small, device, 0))
                torch.cuda.synchronize()
            except Exception as error:  # the benchmark itself will report it
                failures += 1
                print(f"{backend.name}: {case.label}: {first_line(error)}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
