"""The worst of each size that docs/architecture.md aims for, and what ptxas says of the kernels.

    python tools/build_report.py [--top 5]

reads csrc/ and build/report.json, which the build writes. It reports; it fails nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from build_tools.ptxas import demangle

ROOT = Path(__file__).resolve().parents[1]

_NOT_A_FUNCTION = re.compile(
    r"\b(?:namespace|struct|class|enum|union|extern)\b|=\s*$|\b(?:if|for|while|switch|do|else)\b"
)
_TEMPLATE = re.compile(
    r"\btemplate\s*<([^{};]*?)>\s*(?:__global__|struct|class|void|static|inline|"
    r"__device__|FLASH_CUDA)"
)


@dataclass(frozen=True)
class Finding:
    """One number with the place that it was found at."""

    value: float
    where: str


def source_files() -> list[Path]:
    """Our C++ and CUDA sources, without generated ones."""
    found = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cuh", ".cu", ".cpp")]
    return sorted(p for p in found if not p.stem.endswith("_gen"))


def strip(text: str) -> str:
    """Code without comments, strings and preprocessor lines, on the same lines."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    pattern = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^\s*#(?:\\\n|[^\n])*"
    return re.sub(pattern, blank, text, flags=re.S | re.M)


def without_template(header: str) -> str:
    """A declaration without the `template <...>` before it."""
    header = header.strip()
    while header.startswith("template"):
        depth = 0
        for position, character in enumerate(header):
            depth += (character == "<") - (character == ">")
            if character == ">" and depth == 0:
                header = header[position + 1 :].strip()
                break
        else:
            break
    return header


def functions(text: str) -> Iterator[tuple[str, int, int, int]]:
    """(name, line, length in lines, deepest nesting) of the outermost function bodies."""
    code = strip(text)
    stack: list[tuple[bool, int, str]] = []  # is a function, position of {, header
    header_start = 0
    deepest = 0
    for match in re.finditer(r"[{};]", code):
        position, kind = match.start(), match[0]
        if kind == "{":
            header = without_template(code[header_start:position])
            inside = any(entry[0] for entry in stack)
            is_function = (
                not inside and "(" in header and not _NOT_A_FUNCTION.search(header.split("(")[0])
            )
            if is_function:
                deepest = 0
            stack.append((is_function, position, header))
            if inside:
                first = next(i for i, entry in enumerate(stack) if entry[0])
                deepest = max(deepest, len(stack) - 1 - first)
        elif kind == "}" and stack:
            is_function, start, header = stack.pop()
            if is_function:
                name = re.findall(r"\b(?!__)([\w~][\w:~]*|operator\S+)\s*\(", header)
                length = code.count("\n", start, position) + 1
                yield (name[0] if name else "?", code.count("\n", 0, start) + 1, length, deepest)
        header_start = position + 1


def template_parameters(text: str) -> Iterator[tuple[int, int]]:
    """(line, number of parameters) of the templates of classes and functions."""
    code = strip(text)
    for match in _TEMPLATE.finditer(code):
        depth, count = 0, 1
        for character in match[1]:
            depth += character in "<("
            depth -= character in ">)"
            count += character == "," and depth == 0
        yield code.count("\n", 0, match.start()) + 1, count


def source_findings() -> dict[str, list[Finding]]:
    """Sizes of the sources by what is measured."""
    found: dict[str, list[Finding]] = {
        "lines of a file (500)": [],
        "lines of a function (80)": [],
        "nesting in a function (4)": [],
        "template parameters (4)": [],
        "columns (100)": [],
    }
    lines, lengths, nesting, parameters, columns = found.values()
    for path in source_files():
        text, name = path.read_text(), str(path.relative_to(ROOT))
        lines.append(Finding(text.count("\n"), name))
        widest = max(
            enumerate(text.splitlines(), 1), key=lambda item: len(item[1]), default=(0, "")
        )
        columns.append(Finding(len(widest[1]), f"{name}:{widest[0]}"))
        for function, line, length, depth in functions(text):
            lengths.append(Finding(length, f"{name}:{line} {function}"))
            nesting.append(Finding(depth, f"{name}:{line} {function}"))
        for line, count in template_parameters(text):
            parameters.append(Finding(count, f"{name}:{line}"))
    return found


def build_findings(report: list[dict[str, Any]]) -> dict[str, list[Finding]]:
    """Times, sizes, registers and spills of the last build of each file."""
    kernels = [(entry["file"], kernel) for entry in report for kernel in entry["kernels"]]
    names = demangle([kernel["name"] for _, kernel in kernels])
    labels = [
        f"{kernel['code']} {file}: {short(name)}"
        for (file, kernel), name in zip(kernels, names, strict=True)
    ]

    def of_kernels(key: str) -> list[Finding]:
        values = (kernel[key] for _, kernel in kernels)
        return [Finding(value, label) for value, label in zip(values, labels, strict=True)]

    return {
        "seconds to compile a file (150)": [Finding(e["seconds"], e["file"]) for e in report],
        "kB of an object": [Finding(e["bytes"] // 1000, e["file"]) for e in report],
        "registers": of_kernels("registers"),
        "bytes spilled": [f for f in of_kernels("spill_stores") if f.value],
    }


def short(name: str) -> str:
    """A kernel's name without namespaces and return type, cut to fit a line."""
    name = re.sub(r"\b\w+::", "", name).removeprefix("void ")
    return name if len(name) <= 90 else f"{name[:87]}..."


def show(title: str, findings: Iterable[Finding], top: int) -> None:
    """Prints the largest of them."""
    worst = sorted(findings, key=lambda finding: -finding.value)[:top]
    print(f"\n{title}")
    for finding in worst:
        print(f"{finding.value:10g}  {finding.where}")
    if not worst:
        print("      none")


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--top", type=int, default=5, help="how many of each")
    top = parser.parse_args().top
    for title, findings in source_findings().items():
        show(title, findings, top)
    path = ROOT / "build/report.json"
    if not path.exists():
        print("\nNothing was built yet, so there are no times: make build")
        return
    report = json.loads(path.read_text())
    for title, findings in build_findings(report).items():
        show(title, findings, top)
    total = sum(entry["seconds"] for entry in report)
    print(f"\n{total:.0f} s of compiler time in all (1000), {len(report)} files")


if __name__ == "__main__":
    main()
