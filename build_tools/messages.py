"""What the build says: progress on stdout, and errors as one line without a stack trace."""

from __future__ import annotations

import sys


class BuildError(Exception):
    """Ends the build with its text as the only thing that the user sees."""


def say(text: str) -> None:
    """Prints a line at once, also where stdout is a pipe (as under pip)."""
    print(f"flash_cuda: {text}" if text else "", flush=True)


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
