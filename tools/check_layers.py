"""Checks the layers of docs/architecture.md: who may include whom, and who may know what.

    python tools/check_layers.py

prints a line for each breach and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Folder of csrc/ -> the folders that its files may include. "" is csrc/ itself.
INCLUDES = {
    "": {"", "api", "common"},
    "api": {"api", "common"},
    "common": {"common", "ptx"},
    "ptx": {"ptx"},
    "sm80": {"sm80", "common", "ptx"},
    "sm90": {"sm90", "common", "ptx"},
    "sm100": {"sm100", "common", "ptx"},
    "sm120": {"sm120", "sm80", "common", "ptx"},
}
# Plain data and markers: below every other layer.
BOTTOM = {"common/host_device.h", "common/params.h"}
# The files of the binding; every other file compiles without torch and Python.
BINDING = {"torch_binding.cpp", "torch_tensors.h", "module.cpp"}

_INCLUDE = re.compile(r'^[ \t]*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
_ASM = re.compile(r"\basm\b\s*(?:volatile\s*)?\(")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def without_comments(text: str) -> str:
    """The code with comments blanked, so that line numbers stay."""
    return _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def line_of(text: str, position: int) -> int:
    """The line number, from 1, of a position."""
    return text.count("\n", 0, position) + 1


def cpp_breaches(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Breaches in one file of csrc/, as (line, what); `path` is relative to csrc/."""
    code = without_comments(text)
    folder = path.rpartition("/")[0]
    for match in _INCLUDE.finditer(code):
        why = include_breach(path, folder, match[1] == '"', match[2])
        if why:
            yield line_of(code, match.start()), why
    if folder not in ("ptx", "common") and "__CUDA_ARCH__" in code:
        line = line_of(code, code.index("__CUDA_ARCH__"))
        yield line, "__CUDA_ARCH__: a folder is one architecture"
    if folder != "ptx":
        for match in _ASM.finditer(code):
            yield line_of(code, match.start()), "asm belongs into csrc/ptx, one function each"


def include_breach(path: str, folder: str, own: bool, included: str) -> str | None:
    """Why a file may not include this, None if it may."""
    top = included.split("/")[0]
    if top in ("torch", "ATen", "c10", "pybind11") or included == "Python.h":
        return None if path in BINDING else f"{included}: torch and Python are the binding's alone"
    if top in ("cute", "cutlass"):
        return None if folder == "sm100" else f"{included}: CUTLASS headers are sm100's alone"
    if not own or included in BOTTOM or included == "build_info.h":
        return None
    if folder not in INCLUDES:
        return f"csrc/{folder} is no layer: add it to INCLUDES in tools/check_layers.py"
    target = included.rpartition("/")[0]
    if target not in INCLUDES[folder]:
        return f"{included}: {folder or 'csrc'} may include {', '.join(sorted(INCLUDES[folder]))}"
    return None


def _imports(text: str) -> Iterator[tuple[int, str]]:
    """(line, absolute or relative module) of every import; relative ones keep their dots."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def python_breaches(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Breaches in one Python file, as (line, what); `path` is relative to the root."""
    rules: list[tuple[Callable[[str], bool], str]] = []
    if path.startswith("flash_cuda/"):
        others = ("tests", "bench", "emulator", "tools", "build_tools", "examples")
        rules.append((lambda m: m.split(".")[0] in others, "the package stands alone"))
    if path.startswith("flash_cuda/reference/"):
        above = ("interface", "compat", "explain", "masks", "distributed")
        rules.append(
            (
                lambda m: m.lstrip(".").removeprefix("flash_cuda.").split(".")[0] in above,
                "the CPU engine lies below the Python API",
            )
        )
    if path == "tests/oracle.py":
        rules.append(
            (
                lambda m: m.split(".")[0] == "flash_cuda",
                "the oracle shares nothing with what it judges",
            )
        )
    for line, module in _imports(text) if rules else ():
        yield from ((line, f"{module}: {why}") for applies, why in rules if applies(module))


def breaches() -> Iterator[str]:
    """Every breach in the tree, as `file:line: what`."""
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in (".h", ".cuh", ".cu", ".cpp"):
            relative = str(path.relative_to(ROOT / "csrc"))
            for line, what in cpp_breaches(relative, path.read_text()):
                yield f"csrc/{relative}:{line}: {what}"
    for path in [*sorted((ROOT / "flash_cuda").rglob("*.py")), ROOT / "tests/oracle.py"]:
        if path.exists():
            relative = str(path.relative_to(ROOT))
            for line, what in python_breaches(relative, path.read_text()):
                yield f"{relative}:{line}: {what}"


def main() -> int:
    """Prints the breaches."""
    found = list(breaches())
    print("\n".join(found) if found else "layers: no breach")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
