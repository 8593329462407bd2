"""Tests of the emulator itself; they run without a GPU and without the package's kernels."""
