"""Live progress on stderr, with an estimate of what is left."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO


class Progress:
    """A bar by rich on a terminal, a line every few seconds elsewhere."""

    def __init__(self, stream: TextIO | None = None, period: float = 5.0) -> None:
        """Starts the clock."""
        self._stream = stream or sys.stderr
        self._period, self._begin, self._last = period, time.monotonic(), -1e9
        self._bar: Any = None
        if self._stream.isatty():
            try:
                from rich.console import Console
                from rich.progress import (
                    BarColumn,
                    MofNCompleteColumn,
                    TextColumn,
                    TimeRemainingColumn,
                )
                from rich.progress import Progress as Bar
            except ImportError:
                return
            self._bar = Bar(
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=Console(file=self._stream),
                transient=True,
            )
            self._task = self._bar.add_task("", total=None)
            self._bar.start()

    def update(self, done: int, total: int, text: str) -> None:
        """Says that `done` of `total` cases are behind us and what is being done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=text)
            return
        now = time.monotonic()
        if now - self._last < self._period:
            return
        self._last = now
        left = (now - self._begin) / done * (total - done) if done else None
        estimate = f", about {left:.0f} s left" if left is not None else ""
        elapsed = f"{now - self._begin:.0f} s"
        print(f"[{done}/{total}, {elapsed}{estimate}] {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
