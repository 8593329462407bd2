"""Reading of PTX text: modules, functions, statements, and where each came from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SIZES = {
    "b8": 1, "u8": 1, "s8": 1,
    "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8,
    "b128": 16,
}  # fmt: skip


class TranslationError(Exception):
    """PTX that the translator does not know; never skipped."""


@dataclass
class Variable:
    """A module-level or function-level variable in .global, .const or .shared."""

    name: str
    type: str
    size: int
    align: int
    init: str | None = None
    external: bool = False


@dataclass
class Parameter:
    name: str
    offset: int
    size: int
    align: int


@dataclass
class Statement:
    """`kind` is one of "{", "}", "label", "code"."""

    kind: str
    text: str
    line: int


@dataclass
class PtxFunction:
    name: str
    entry: bool
    returns: list[Parameter]
    params: list[Parameter]
    param_bytes: int
    body: list[Statement]
    max_threads: int = 0
    cluster: tuple[int, int, int] = (0, 0, 0)
    shared: list[Variable] = field(default_factory=list)


@dataclass
class PtxModule:
    globals: dict[str, Variable] = field(default_factory=dict)
    shared: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, PtxFunction] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)


def split_operands(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    out: list[str] = []
    depth, current = 0, ""
    for c in text:
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += c
    if current.strip():
        out.append(current.strip())
    return out


def _clean(text: str) -> str:
    """Removes comments and debug sections and ends line directives with ';'; keeps the lines."""

    def blank(m: re.Match[str]) -> str:
        return "\n" * m.group(0).count("\n")

    text = re.sub(r"/\*.*?\*/", blank, text, flags=re.S)
    # A .file directive holds a quoted path, which may contain "//".
    text = re.sub(r'//[^\n"]*$', "", text, flags=re.M)
    text = re.sub(r"^[ \t]*\.section\s+\S+\s*\{.*?^[ \t]*\}", blank, text, flags=re.S | re.M)
    return re.sub(
        r"^([ \t]*\.(?:loc|file|version|target|address_size)\b[^;\n]*)$", r"\1;", text, flags=re.M
    )


def _parameters(text: str | None) -> tuple[list[Parameter], int]:
    out: list[Parameter] = []
    offset = 0
    for p in split_operands(text or ""):
        m = re.match(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
            r"(?:\.ptr\s+(?:\.(?!align)\w+\s+)?(?:\.align\s+\d+\s+)?)?([\w$]+)(\[(\d+)\])?",
            p,
        )
        if not m:
            raise TranslationError(f"parameter {p!r}")
        size = SIZES[m.group(2)] * int(m.group(5) or 1)
        align = int(m.group(1) or SIZES[m.group(2)])
        offset = (offset + align - 1) // align * align
        out.append(Parameter(m.group(3), offset, size, align))
        offset += size
    return out, offset


VARIABLE = re.compile(
    r"((?:\.\w+\s+)*)\.(global|const|shared)\s+(?:\.attribute\S*\s+)?(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([\w$]+)\s*(\[(\d*)\])?\s*(?:=\s*(.*))?$",
    re.S,
)


def parse_variable(text: str) -> tuple[str, Variable] | None:
    """The space and the variable that a declaration declares."""
    m = VARIABLE.match(text)
    if not m:
        return None
    linkage, space, align, type_, name, array, count, init = m.groups()
    if type_ not in SIZES:
        return None
    size = SIZES[type_] * (int(count) if count else (0 if array else 1))
    external = ".extern" in linkage or (array is not None and not count)
    return space, Variable(name, type_, size, int(align or SIZES[type_]), init, external)


LABEL = re.compile(r"([\w$]+):(?!:)")
SPACE = re.compile(r"\s*")
BRACE = re.compile(r"[{}]")


def _statements(body: str, line: int) -> Iterator[Statement]:
    i = 0
    while True:
        start = SPACE.match(body, i).end()  # type: ignore[union-attr]
        line += body.count("\n", i, start)
        if start == len(body):
            return
        label = LABEL.match(body, start)
        if body[start] in "{};":
            i = start + 1
            if body[start] != ";":
                yield Statement(body[start], body[start], line)
        elif label:
            i = label.end()
            yield Statement("label", label.group(1), line)
        else:
            end = body.find(";", start)
            if end < 0:
                return
            yield Statement("code", body[start:end].rstrip(), line)
            line += body.count("\n", start, end)
            i = end + 1


def _function(head: str, body: str, line: int) -> PtxFunction:
    m = re.search(r"\.(entry|func)\s*(?:\((.*?)\))?\s*([\w$]+)\s*(?:\((.*?)\))?", head, re.S)
    if not m:
        raise TranslationError(f"line {line}: function {head[:80]!r}")
    returns, _ = _parameters(m.group(2))
    params, size = _parameters(m.group(4))
    f = PtxFunction(m.group(3), m.group(1) == "entry", returns, params, size, [])
    if t := re.search(r"\.(?:maxntid|reqntid)\s+([\d, ]+)", head):
        f.max_threads = 1
        for n in t.group(1).split(","):
            f.max_threads *= int(n)
    if t := re.search(r"\.reqnctapercluster\s+([\d, ]+)", head):
        sizes = [int(n) for n in t.group(1).split(",")] + [1, 1]
        f.cluster = (sizes[0], sizes[1], sizes[2])
    f.body = list(_statements(body, line))
    for s in f.body:
        if s.kind == "code" and s.text.startswith(".shared"):
            parsed = parse_variable(s.text)
            if not parsed:
                raise TranslationError(f"line {s.line}: {s.text[:80]!r}")
            f.shared.append(parsed[1])
    return f


def _top_level(module: PtxModule, text: str, line: int) -> None:
    if m := re.match(r'\.file\s+(\d+)\s+"([^"]*)"', text):
        module.files[int(m.group(1))] = m.group(2)
        return
    if not text or re.match(r"\.(version|target|address_size|loc|pragma|alias)\b", text):
        return
    if re.search(r"\.(entry|func)\b", text):
        return  # a declaration; calls are resolved by name
    parsed = parse_variable(text)
    if not parsed:
        raise TranslationError(f"line {line}: {text[:80]!r}")
    space, v = parsed
    (module.shared if space == "shared" else module.globals)[v.name] = v


def parse_module(text: str) -> PtxModule:
    """Parses a whole PTX file.

    Raises:
        TranslationError: for a top-level construct that is not known.
    """
    module = PtxModule()
    s = _clean(text)
    i, line, buffer, start = 0, 1, "", 1
    while i < len(s):
        if not buffer:
            end = SPACE.match(s, i).end()  # type: ignore[union-attr]
            line += s.count("\n", i, end)
            i, start = end, line
            if i == len(s):
                break
        c = s[i]
        if c == "\n":
            line += 1
        if c == ";":
            _top_level(module, buffer.strip(), start)
            buffer = ""
        elif c == "{" and re.search(r"\.(entry|func)\b", buffer):
            j, depth = i, 0
            for m in BRACE.finditer(s, i):
                depth += 1 if m.group(0) == "{" else -1
                if depth == 0:
                    j = m.start()
                    break
            f = _function(buffer.strip(), s[i + 1 : j], line)
            module.functions[f.name] = f
            line += s.count("\n", i, j)
            buffer, i = "", j
        else:
            buffer += c
        i += 1
    return module
