"""What the build says: progress on stdout, and errors as one line without a stack trace."""

from __future__ import annotations

import contextlib
import sys


class BuildError(Exception):
    """Ends the build with its text as the only thing that the user sees."""


class Listener:
    """Whether stdout is swallowed, as pip and uv do, which show it only after a failure."""

    captured = False


def say(text: str) -> None:
    """Prints a line at once; on the user's terminal too where a front end swallows stdout."""
    line = f"flash_cuda: {text}"
    print(line, flush=True)
    if Listener.captured and not sys.stdout.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\r{line}\n")


def fail(error: BuildError) -> SystemExit:
    """The error as an exit: `raise fail(error) from None`."""
    sys.stdout.flush()
    return SystemExit(f"flash_cuda: error: {error}")


def duration(seconds: float) -> str:
    """A length of time for people: `8 s`, `3 min`, `1 h 20 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
