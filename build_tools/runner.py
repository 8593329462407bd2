"""Runs compile units on a pool of threads: only what changed, with progress and an estimate."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from .messages import BuildError, duration, say
from .plan import Unit


@dataclass
class Stamp:
    """What is remembered of an object beside it: how it was made, and what that took."""

    identity: str
    started: float  # before the compiler read anything
    seconds: float
    log: str
    size: int = 0


def _stamp_file(unit: Unit) -> Path:
    return unit.object.with_suffix(".json")


def read_stamp(unit: Unit) -> Stamp | None:
    """The stamp of the last successful compilation, if there is one."""
    try:
        return Stamp(**json.loads(_stamp_file(unit).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _identity(unit: Unit) -> str:
    return hashlib.sha256(unit.identity.encode()).hexdigest()


def is_current(unit: Unit) -> bool:
    """Whether the object is newer than all that it was made of, and made by the same command."""
    stamp = read_stamp(unit)
    if stamp is None or stamp.identity != _identity(unit) or not unit.object.exists():
        return False
    try:
        text = unit.depfile.read_text()
        files = [unit.source, *map(Path, text.split(":", 1)[1].replace("\\\n", " ").split())]
        # Against the start, not the object: a file edited during the compilation counts as newer.
        return all(file.stat().st_mtime < stamp.started for file in files)
    except (OSError, IndexError):
        return False


def compile_unit(unit: Unit) -> Stamp:
    """Compiles one unit; raises BuildError with the compiler's words if that fails."""
    unit.object.parent.mkdir(parents=True, exist_ok=True)
    _stamp_file(unit).unlink(missing_ok=True)
    if unit.keep:
        _empty_folder(unit.keep)
    started = time.time()
    done = subprocess.run(unit.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        raise BuildError(f"{unit.name} does not compile\n{_worth_showing(log)}")
    if unit.keep:
        _keep_ptx(unit.keep, unit.object)
    seconds = time.time() - started
    stamp = Stamp(_identity(unit), started, seconds, log, unit.object.stat().st_size)
    _stamp_file(unit).write_text(json.dumps(asdict(stamp)))
    return stamp


def warnings(log: str) -> list[str]:
    """The lines of a log that are a compiler's warnings."""
    return [line.strip() for line in log.splitlines() if re.search(r"\bwarning\b", line)]


def _worth_showing(log: str) -> str:
    """A failed compiler's output without ptxas's reports, at most 60 lines."""
    lines = [line for line in log.splitlines() if not line.startswith(("ptxas info", "    "))]
    lines = lines or log.splitlines()
    return "\n".join(lines[:60] + (["..."] if len(lines) > 60 else []))


def _empty_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()


def _keep_ptx(keep: Path, obj: Path) -> None:
    """Moves the PTX beside the object, as NAME.ptx or NAME.compute_100a.ptx; drops the rest."""
    for old in obj.parent.glob(f"{obj.stem}.*ptx"):
        old.unlink()
    for file in keep.iterdir():
        if file.suffix == ".ptx":
            file.replace(obj.parent / file.name)
        else:
            file.unlink()
    keep.rmdir()


class _Progress:
    """Says after each file how far the build is and how long the rest should take."""

    def __init__(self, units: Sequence[Unit], jobs: int) -> None:
        self.total, self.jobs, self.done = len(units), jobs, 0
        self.left = sum(expected_seconds(unit) for unit in units)
        self.expected, self.taken = 0.0, 0.0

    def finished(self, unit: Unit, expected: float, seconds: float) -> None:
        self.done += 1
        self.left -= expected
        self.expected += expected
        self.taken += seconds
        # Scaled by how the finished files compare with what was expected of them.
        left = self.left / self.jobs * self.taken / self.expected
        rest = f", about {duration(left)} left" if self.done < self.total else ""
        say(f"[{self.done}/{self.total}] {unit.name} {seconds:.1f} s{rest}")


def expected_seconds(unit: Unit) -> float:
    """The unit's last time if it was compiled before, else the plan's guess."""
    stamp = read_stamp(unit)
    return stamp.seconds if stamp else unit.expected_seconds


def expected_wall_seconds(units: Sequence[Unit], jobs: int) -> float:
    """How long compile_all should take: the work shared out, and never less than the longest."""
    seconds = [expected_seconds(unit) for unit in units]
    return max([sum(seconds) / jobs, *seconds])


def compile_all(units: Sequence[Unit], jobs: int) -> None:
    """Compiles the units, `jobs` at a time. After a failure no more start."""
    progress = _Progress(units, jobs)
    expected = {unit.object: expected_seconds(unit) for unit in units}
    waiting = list(units)
    running: dict[Future[Stamp], Unit] = {}
    failure: BuildError | None = None
    with ThreadPoolExecutor(jobs) as pool:
        while running or (waiting and failure is None):
            while waiting and len(running) < jobs and failure is None:
                unit = waiting.pop(0)
                running[pool.submit(compile_unit, unit)] = unit
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit = running.pop(future)
                try:
                    progress.finished(unit, expected[unit.object], future.result().seconds)
                except BuildError as error:
                    failure = failure or error
    if failure:
        raise failure


def link(objects: Sequence[Path], compiler: Sequence[str], flags: Sequence[str], out: Path) -> bool:
    """Links the extension, if something changed since it was; returns whether it did."""
    command = [*compiler, *map(str, objects), *flags]
    stamp = out.with_suffix(".json")
    made_by = hashlib.sha256("\0".join(command).encode()).hexdigest()
    try:
        newest = max(path.stat().st_mtime_ns for path in objects)
        if json.loads(stamp.read_text()) == made_by and out.stat().st_mtime_ns > newest:
            return False
    except (OSError, ValueError):
        pass
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(f".{os.getpid()}.tmp")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise BuildError(f"the extension does not link\n{_worth_showing(done.stderr)}")
    missing = _undefined(partial)
    if missing:
        partial.unlink()
        raise BuildError("declared but defined nowhere: " + "; ".join(missing))
    partial.replace(out)
    stamp.write_text(json.dumps(made_by))
    return True


def _undefined(library: Path) -> list[str]:
    """Our own symbols that a library lacks (Python's are found in the interpreter)."""
    names = subprocess.run(["nm", "-DC", "-u", str(library)], capture_output=True, text=True).stdout
    lines = [line.split(maxsplit=1)[1] for line in names.splitlines()]
    return [name for name in lines if name.startswith("flash_cuda::")]
