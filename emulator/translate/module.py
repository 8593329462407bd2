"""Translation of a PTX module into C++ files: one for each kernel, and an index.

The kernel files carry no line numbers, so that a changed comment does not change them: a site is
the number of an instruction in its function, and the ``.sites`` file says where that was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from . import arithmetic, copies, matrix, memory, warp  # registers the handlers
from .function import (
    FLOATS,
    STORAGE_TYPES,
    VALUE_TYPES,
    FunctionTranslator,
    c_name,
    function_name,
    global_name,
)
from .ptx import SIZES, PtxFunction, PtxModule, TranslationError, Variable, parse_module
from .sites import SiteTable

__all__ = ["TranslatedModule", "arithmetic", "copies", "matrix", "memory", "translate", "warp"]

FIRST_SHARED = 1024  # as on sm_90 and later, the first KiB of the window belongs to the system


@dataclass
class TranslatedModule:
    """`kernels` maps a file stem to C++; `index` is C++; `sites` is text."""

    kernels: dict[str, str]
    index: str
    sites: str


def _callees(f: PtxFunction, translated: dict[str, FunctionTranslator]) -> list[str]:
    out: list[str] = []
    pending = [f.name]
    while pending:
        for name in sorted(translated[pending.pop()].calls):
            if name not in out:
                out.append(name)
                pending.append(name)
    return out


def _shared_layout(module: PtxModule, functions: list[PtxFunction]) -> tuple[list[str], int]:
    """Offsets of the shared variables that these functions mention, and of dynamic memory."""
    mentioned: set[str] = set()
    for f in functions:
        for s in f.body:
            mentioned.update(re.findall(r"[A-Za-z_$][\w$]*", s.text))
    variables = [v for v in module.shared.values() if v.name in mentioned]
    variables += [v for f in functions for v in f.shared]
    offset, lines = FIRST_SHARED, []
    for v in variables:
        if v.external:
            continue
        offset = (offset + v.align - 1) // v.align * v.align
        lines.append(f"constexpr uint32_t s_{c_name(v.name)} = {offset};")
        offset += v.size
    external = [v for v in variables if v.external]
    align = max([16, *(v.align for v in external)])
    dynamic = (offset + align - 1) // align * align
    lines += [f"constexpr uint32_t s_{c_name(v.name)} = {dynamic};" for v in external]
    return lines, dynamic


def _global_definition(prefix: str, v: Variable) -> str:
    name, align = global_name(prefix, v.name), max(v.align, 1)
    count = max(1, v.size // SIZES[v.type])
    if not v.init:
        return f"alignas({align}) uint8_t {name}[{max(1, v.size)}];"
    element = STORAGE_TYPES[SIZES[v.type]] if v.type in ("f32", "f64") else VALUE_TYPES[v.type]
    values = v.init.strip().strip("{}") if v.init.startswith("{") else v.init
    # 0f3F800000 and 0d3FF0000000000000 are bit patterns.
    values = re.sub(r"\b0[fFdD]([0-9a-fA-F]+)", r"0x\1", values)
    if re.search(r"[G-Wg-wyzYZ_$]", re.sub(r"0[xX][0-9a-fA-F]+", "", values)):
        raise TranslationError(f"symbolic initialiser of {v.name}")
    items = ",".join(f"({element}){x.strip()}" for x in values.split(","))
    return f"alignas({align}) {element} {name}[{count}] = {{{items}}};"


def _kernel_file(
    module: PtxModule,
    f: PtxFunction,
    prefix: str,
    translated: dict[str, FunctionTranslator],
    code: dict[str, str],
) -> tuple[str, int]:
    names = [*_callees(f, translated), f.name]
    functions = [module.functions[n] for n in names]
    shared, dynamic = _shared_layout(module, functions)
    used = sorted(set().union(*(translated[n].globals_used for n in names)))
    out = ['#include "thread.h"', "namespace px {", *shared]
    for g in used:
        v = module.globals[g]
        element = "uint8_t"
        if v.init:
            element = STORAGE_TYPES[SIZES[v.type]] if v.type in FLOATS else VALUE_TYPES[v.type]
        out.append(f"extern {element} {global_name(prefix, g)}[];")
    for n in names[:-1]:
        out.append(
            f"extern FunctionInfo const info_{c_name(prefix)}_{function_name(module.functions[n])};"
        )
        # Calls name the info without the prefix.
        out.append(
            f"#define info_{function_name(module.functions[n])} "
            f"info_{c_name(prefix)}_{function_name(module.functions[n])}"
        )
        out.append(translated[n].prototype() + ";")
    out += [code[n] for n in names]
    out.append("}  // namespace px")
    text = "\n".join(out) + "\n"
    # Two modules may hold the same template instance: names get the module's prefix.
    text = text.replace(
        f"void {function_name(f)}(Thread& T)",
        f"void {c_name(prefix)}_{function_name(f)}(Thread& T)",
    )
    text += f"PX_SEPARATE_KERNEL({c_name(prefix)}_{function_name(f)})\n"
    return text, dynamic


def _quoted(s: str) -> str:
    return '"' + s.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _index(module: PtxModule, prefix: str, ptx: Path, sites: Path, dynamic: dict[str, int]) -> str:
    p = c_name(prefix)
    out = ['#include "thread.h"', "namespace px {"]
    out += [_global_definition(prefix, v) for v in module.globals.values()]
    for f in module.functions.values():
        name = f"{p}_{function_name(f)}"
        out.append(f"extern FunctionInfo const info_{name};")
        out.append(
            f"FunctionInfo const info_{name} = "
            f"{{{_quoted(f.name)}, {_quoted(str(ptx))}, {_quoted(str(sites))}}};"
        )
        if f.entry:
            out.append(f"void {name}(Thread&);")
            rows = ",".join(f"{{{q.offset},{q.size}}}" for q in f.params) or "{0,0}"
            out.append(f"static ParamInfo const params_{name}[] = {{{rows}}};")
    entries = [f for f in module.functions.values() if f.entry]
    out.append("static KernelInfo const kernels[] = {")
    for k, f in enumerate(entries):
        name = f"{p}_{function_name(f)}"
        cluster = ",".join(str(c) for c in f.cluster)
        out.append(
            f'  {{&info_{name}, PX_CODE({name}), "{prefix}.{k}", '
            f"{dynamic[f.name]}u, {f.param_bytes}u, "
            f"{f.max_threads}u, {{{cluster}}}, {len(f.params)}u, params_{name}}},"
        )
    out.append("  {}};")
    out.append("static VariableInfo const variables[] = {")
    for v in module.globals.values():
        out.append(f"  {{{_quoted(v.name)}, {global_name(prefix, v.name)}, {v.size}u}},")
    out.append("  {}};")
    out.append(
        f"static RegisterModule const registered({{kernels, {len(entries)}u, variables, "
        f"{len(module.globals)}u}});"
    )
    out.append("}  // namespace px")
    return "\n".join(out) + "\n"


def _sites_text(tables: dict[str, SiteTable]) -> str:
    frames: dict[str, int] = {}
    rows: list[str] = []
    for name, table in tables.items():
        rows.append(f"F {name}")
        rows += [f"{line} {frames.setdefault(text, len(frames))}" for line, text in table.rows]
    return "\n".join([*(f"S {text}" for text in frames), *rows]) + "\n"


def translate(
    text: str, prefix: str, ptx: Path, sites: Path, root: Path | None = None
) -> TranslatedModule:
    """Translates PTX text.

    Args:
        text: the PTX.
        prefix: name of the module, unique in the library.
        ptx: path of the PTX, for reports.
        sites: where `TranslatedModule.sites` will be written.
        root: source paths below it are reported relative to it.

    Raises:
        TranslationError: names the function, line and instruction that is not known.
    """
    module = parse_module(text)
    translated: dict[str, FunctionTranslator] = {}
    code: dict[str, str] = {}
    tables: dict[str, SiteTable] = {}
    for f in module.functions.values():
        tables[f.name] = SiteTable(module.files, root)
        translated[f.name] = FunctionTranslator(module, f, prefix, tables[f.name])
        code[f.name] = translated[f.name].translate()
    kernels: dict[str, str] = {}
    dynamic: dict[str, int] = {}
    for k, f in enumerate(x for x in module.functions.values() if x.entry):
        kernels[f"{prefix}.{k}"], dynamic[f.name] = _kernel_file(
            module, f, prefix, translated, code
        )
    return TranslatedModule(
        kernels, _index(module, prefix, ptx, sites, dynamic), _sites_text(tables)
    )
