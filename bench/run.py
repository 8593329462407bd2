"""Benchmarks: `python -m bench.run --suite train --json out.json --plot out/`.

Every result is checked against a float32 reference before it is timed, backends take turns on the
same tensors, and a matrix product and a copy measured in the same run are the ceiling. Without a
GPU the suite `cpu` runs. `--list` shows the suites and the backends.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import re
import signal
import site
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import table
from .backend import Backend
from .backends import all_backends
from .cases import PASSES, Suite, load_suites
from .progress import Progress
from .runner import Settings, run_suites
from .warm import warm_up

RESULTS = Path(__file__).with_name("results")
EXIT_WRONG, EXIT_DEVICE_LOST, EXIT_INTERRUPTED = 1, 3, 130
EXIT_CODES = f"""exit codes:
  0 all went well; 2 the command line is wrong
  {EXIT_WRONG} flash_cuda was wrong or failed, or a setting cannot be served
  {EXIT_DEVICE_LOST} the device was lost; {EXIT_INTERRUPTED} interrupted (with a report)"""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.run",
        description=__doc__,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", default="smoke", help="name, or several with commas (default: smoke)")
    add("--backends", help="names with commas, or `all` (default: those of each suite)")
    add("--without", default="", help="backends to leave out, with commas")
    add("--filter", default="", metavar="REGEX", help="only cases whose key matches")
    add("--passes", help="only these, of fwd, bwd, fwd+bwd, with commas")
    add("--json", type=Path, metavar="FILE", help="write the report here, after every case")
    add("--plot", type=Path, metavar="DIR", help="write charts here, PNG and SVG")
    add("--html", type=Path, metavar="FILE", help="write a page with tables and charts here")
    add("--save", action="store_true", help="write bench/results/<card>/<date>.json")
    add(
        "--soak", type=float, default=0.0, metavar="SECONDS", help="also back to back, so long each"
    )
    add("--soak-turns", type=int, default=4, help="that the time is cut into (default: 4)")
    add(
        "--soak-filter",
        default="",
        metavar="REGEX",
        help="soak only cases whose key, a space and the pass (`... causal fwd`) match",
    )
    add("--rounds", type=int, help="samples of each (default 15, on a CPU 7)")
    add(
        "--budget-seconds",
        type=float,
        help="of measuring: fewer rounds, then fewer cases; 0: no limit (default: 0, CPU 60)",
    )
    add("--timer", choices=["events", "graph"], help="instead of the suite's")
    add("--site", action="append", default=[], metavar="DIR", help="folder with more packages")
    add("--device", choices=["cuda", "cpu"], help="default: cuda if there")
    add("--no-warm", action="store_true", help="no compiling of peers in parallel beforehand")
    add("--no-derived", action="store_true", help="no stand-in for an absent FlashAttention-3")
    add("--seed", type=int, default=0)
    add(
        "--stall",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="say where it stands when nothing moves for so long (default: 300)",
    )
    add("--list", action="store_true", help="show suites and backends, run nothing")
    args = parser.parse_args(argv)
    for name, least in (
        ("rounds", 1),
        ("budget_seconds", 0),
        ("soak", 0),
        ("soak_turns", 1),
        ("stall", 1),
    ):
        value = getattr(args, name)
        if value is not None and not value >= least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    for name in ("filter", "soak_filter"):
        try:
            re.compile(getattr(args, name))
        except re.error as error:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} {getattr(args, name)!r} is no regular expression: {error}")
    return args


def add_sites(folders: list[str]) -> None:
    """Makes packages of other folders importable; their .pth files are read too."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise SystemExit(f"--site {folder}: no such folder")
        site.addsitedir(folder)


def select_cases(suite: Suite, pattern: str, passes: str | None = None) -> Suite:
    """The cases whose key ("train: b4 4k h32 d64 full") matches, with the passes wanted."""
    cases = [case for case in suite.cases if re.search(pattern, case.key)]
    if passes:
        wanted = passes.split(",")
        unknown = set(wanted) - set(PASSES)
        if unknown:
            raise SystemExit(f"--passes {passes}: unknown {sorted(unknown)}; there are {PASSES}")
        # A suite with gradients can time any pass.
        kept = [
            (case, tuple(p for p in PASSES if p in wanted and (p == "fwd" or case.needs_backward)))
            for case in cases
        ]
        cases = [replace(case, passes=names) for case, names in kept if names]
    return replace(suite, cases=tuple(cases))


def choose_suites(args: argparse.Namespace, device: torch.device) -> list[Suite]:
    """The suites asked for; on a machine without a GPU the cpu suite instead."""
    known = load_suites()
    names = [name.strip() for name in args.suite.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"--suite {args.suite}: unknown {unknown}; there are {', '.join(known)}")
    suites = [known[name] for name in names]
    if device.type == "cpu":
        for suite in suites:
            if suite.device == "cuda":
                size = f"{len(suite.cases)} cases"
                print(f"needs a CUDA GPU: suite {suite.name} ({size}: {suite.description})")
        suites = [s for s in suites if s.device == "cpu"]
        if not suites:
            print("no CUDA GPU is visible: running the suite cpu instead\n")
            suites = [known["cpu"]]
    else:
        for suite in suites:
            if suite.device == "cpu":
                print(
                    f"left out: suite {suite.name}, alone or with --device cpu it runs on the CPU"
                )
        suites = [s for s in suites if s.device == "cuda"]
    chosen = [select_cases(suite, args.filter, args.passes) for suite in suites]
    if not any(suite.cases for suite in chosen):
        raise SystemExit(f"--filter {args.filter!r} leaves no case")
    return chosen


def choose_backends(
    names: str | None, suites: list[Suite], device: torch.device, without: Sequence[str] = ()
) -> tuple[list[Backend], dict[str, str]]:
    """Those that are present, and name and reason of those that are not."""
    known = all_backends()
    if names == "all":
        wanted = list(known)
    elif names:
        wanted = names.split(",")
    else:
        wanted = list(dict.fromkeys(name for suite in suites for name in suite.backends))
    unknown = [name for name in (*wanted, *filter(None, without)) if name not in known]
    wanted = [name for name in wanted if name not in without]
    if unknown:
        raise SystemExit(f"--backends: unknown {unknown}; there are {', '.join(known)}")
    absent = {name: known[name].missing(device) for name in wanted}
    reasons = {name: reason for name, reason in absent.items() if reason}
    return [known[name] for name in wanted if name not in reasons], reasons


def show_list(device: torch.device) -> None:
    """Suites and backends."""
    print("suites:")
    for suite in load_suites().values():
        print(
            f"  {suite.name:14} {len(suite.cases):3} cases on {suite.device}: {suite.description}"
        )
    print("backends:")
    for name, backend in all_backends().items():
        reason = backend.missing(device)
        print(f"  {name:18} {'absent: ' + reason if reason else backend.version()}")


def to_json(report: dict[str, Any]) -> str:
    """JSON with a line for each result, so that committed reports stay readable."""
    rest = json.dumps(report | {"results": []}, indent=1)
    lines = ",\n".join("  " + json.dumps(entry) for entry in report["results"])
    return rest.replace('"results": []', f'"results": [\n{lines}\n ]') + "\n"


def write_json(report: dict[str, Any], path: Path) -> None:
    """Writes a report; one that is there already stays whole until the new one is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(to_json(report))
    draft.replace(path)


def write_outputs(report: dict[str, Any], args: argparse.Namespace) -> None:
    """JSON, charts, page."""
    targets = [args.json] if args.json else []
    if args.save:
        facts = report["machine"]
        targets.append(RESULTS / facts["card"] / f"{facts['date']}.json")
    for path in targets:
        write_json(report, path)
        print(f"report: {path}")
    if args.plot or args.html:
        from . import html, plot

        if args.plot:
            for line in plot.draw_all(report, args.plot):
                print(line)
        if args.html:
            args.html.parent.mkdir(parents=True, exist_ok=True)
            args.html.write_text(html.page([report]))
            print(f"page: {args.html}")


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A time limit from outside ends the run as Ctrl-C does: with a report."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1: flash_cuda or the harness failed, 3: device lost, 130: interrupted."""
    args = parse_args(argv)
    add_sites(args.site)
    has_gpu = torch.cuda.is_available() and args.suite != "cpu"
    device = torch.device(args.device or ("cuda" if has_gpu else "cpu"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("--device cuda: no CUDA GPU is visible to torch")
        device = torch.device("cuda", torch.cuda.current_device())
    if args.list:
        show_list(device)
        return 0
    on_cpu = device.type == "cpu"
    suites = choose_suites(args, device)
    backends, absent = choose_backends(args.backends, suites, device, args.without.split(","))
    for name, reason in absent.items():
        print(f"absent: {name}: {reason}")
    if not backends:
        raise SystemExit("no backend is left")
    if args.backends:
        suites = [replace(suite, backends=tuple(b.name for b in backends)) for suite in suites]
    if not on_cpu and not args.no_warm:
        names = [backend.name for backend in backends]
        warm_up([s.name for s in suites], names, args.filter, args.site, print)
    settings = Settings(
        device,
        rounds=args.rounds or (7 if on_cpu else 15),
        warmup=1 if on_cpu else 3,
        fewest_rounds=3 if on_cpu else 5,
        budget_seconds=(60.0 if on_cpu else 0.0)
        if args.budget_seconds is None
        else args.budget_seconds,
        soak_seconds=args.soak,
        soak_turns=args.soak_turns,
        soak_filter=args.soak_filter,
        timer=args.timer,
        seed=args.seed,
        derive=not args.no_derived,
    )
    progress = Progress()

    def on_case(done: int, total: int, text: str) -> None:
        # A kernel that hangs cannot be interrupted from here, but it can be named.
        faulthandler.dump_traceback_later(args.stall, file=sys.__stderr__)
        progress.update(done, total, text)

    def on_report(report: dict[str, Any]) -> None:
        if args.json:
            write_json(report, args.json)

    try:
        with sigterm_as_interrupt():
            report = run_suites(suites, backends, absent, settings, on_case, on_report)
    finally:
        faulthandler.cancel_dump_traceback_later()
        progress.close()
    table.show(report)
    write_outputs(report, args)
    if report["device_lost"]:
        return EXIT_DEVICE_LOST
    if report["interrupted"]:
        return EXIT_INTERRUPTED
    faults = [
        e
        for e in report["results"]
        if e["backend"].startswith("flash_cuda") and e["status"] in ("wrong", "failed")
    ]
    return EXIT_WRONG if faults or report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
