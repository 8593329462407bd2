"""Errors of the emulator's Python side."""


class EmulatorBuildError(RuntimeError):
    """An emulated library cannot be built; the text says what is missing or wrong."""
