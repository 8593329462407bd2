"""Writes csrc/ptx/wgmma_gen.h: one struct per N with the forms of 16-bit wgmma in use.

The operand lists of wgmma are too long to write by hand. Run without arguments to rewrite the
header; ``--check`` exits with 1 if the committed header differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

#: Columns of the accumulators in use.
WIDTHS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
#: A from registers, d not read.
FORMS = ((False, False), (False, True), (True, False))
HEADER = Path(__file__).resolve().parent.parent / "csrc" / "ptx" / "wgmma_gen.h"

PREFIX = """\
// Written by tools/gen_wgmma.py; do not edit.
//
// Wgmma<N>: m64nNk16 of bfloat16 (kBf16) or float16 with float32 accumulators.
//   ss: A and B from shared memory (descriptors)     rs: A from registers
//   d += A B; ss_zero computes d = A B and does not read d.
//   kTransA, kTransB: 1 where that operand is stored with M or N contiguous.
#pragma once

#include <cstdint>

namespace flash_cuda::ptx {

template <int kN>
struct Wgmma;
"""


def operands(first: int, count: int) -> str:
    """The asm operands %first ... as one list."""
    return ", ".join(f"%{i}" for i in range(first, first + count))


def wrap(text: str, indent: str, width: int = 98) -> str:
    """Breaks a long comma-separated list over lines of C++."""
    lines, line = [], indent
    for part in text.split(", "):
        piece = part + ", "
        if len(line) + len(piece) > width:
            lines.append(line.rstrip())
            line = indent
        line += piece
    lines.append(line.rstrip().rstrip(","))
    return "\n".join(lines)


def asm(n: int, dtype: str, from_registers: bool, zero: bool) -> str:
    """One asm statement."""
    regs = n // 2
    at = regs
    if from_registers:
        a = f"{{{operands(at, 4)}}}"
        at += 4
    else:
        a = f"%{at}"
        at += 1
    b = f"%{at}"
    at += 1
    trans = f"%{at}" if from_registers else f"%{at}, %{at + 1}"
    scale = "0" if zero else "1"
    text = [f'"{{\\n.reg .pred p;\\nsetp.ne.b32 p, {scale}, 0;\\n"']
    text.append(f'"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} "')
    names = operands(0, regs).split(", ")
    for i in range(0, regs, 16):
        chunk = ", ".join(names[i : i + 16])
        head = "{" if i == 0 else ""
        tail = "}, " if i + 16 >= regs else ", "
        text.append(f'"{head}{chunk}{tail}"')
    text.append(f'"{a}, {b}, p, 1, 1, {trans};\\n}}\\n"')
    mode = "=f" if zero else "+f"
    outputs = wrap(", ".join(f'"{mode}"(d[{i}])' for i in range(regs)), " " * 12)
    inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])' if from_registers else '"l"(a)'
    flags = '"n"(kTransB)' if from_registers else '"n"(kTransA), "n"(kTransB)'
    body = "\n".join("          " + t for t in text)
    return (
        f"      asm volatile(\n{body}\n          :\n{outputs}\n"
        f'          : {inputs}, "l"(b), {flags});\n'
    )


def function(n: int, from_registers: bool, zero: bool) -> str:
    """One member function, both element types."""
    name = ("rs" if from_registers else "ss") + ("_zero" if zero else "")
    params = "bool kBf16, int kTransB" if from_registers else "bool kBf16, int kTransA, int kTransB"
    a = "const uint32_t (&a)[4]" if from_registers else "uint64_t a"
    out = f"  template <{params}>\n"
    out += f"  static __device__ __forceinline__ void {name}(float (&d)[{n // 2}], {a},\n"
    out += " " * (len(name) + 43) + "uint64_t b) {\n"
    out += "    if constexpr (kBf16) {\n" + asm(n, "bf16", from_registers, zero)
    out += "    } else {\n" + asm(n, "f16", from_registers, zero) + "    }\n  }\n"
    return out


def render() -> str:
    """The whole header."""
    out = PREFIX
    for n in WIDTHS:
        out += f"\ntemplate <>\nstruct Wgmma<{n}> {{\n"
        out += "".join(function(n, rs, zero) for rs, zero in FORMS)
        out += "};\n"
    return out + "\n}  // namespace flash_cuda::ptx\n"


def main() -> int:
    """Writes or checks the header."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    text = render()
    if parser.parse_args().check:
        return 0 if HEADER.read_text() == text else 1
    HEADER.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
