"""ldmatrix, stmatrix, mma.sync, wgmma, tcgen05."""

from __future__ import annotations

import re

from .function import FunctionTranslator as F
from .function import Instruction as I
from .function import instruction
from .ptx import TranslationError

OPERAND_TYPES = {"f16": "kF16", "bf16": "kBF16", "e4m3": "kE4M3", "e5m2": "kE5M2", "tf32": "kTF32"}
OPERAND_BITS = {"f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8, "tf32": 32}


def _count(i: I) -> int:
    return int(next(p for p in i.parts if re.fullmatch(r"x\d+", p))[1:])


@instruction("ldmatrix stmatrix", "sync aligned m8n8 x1 x2 x4 trans shared shared::cta")
def ldmatrix(f: F, i: I) -> str:
    if i.type != "b16":
        raise TranslationError("element type")
    head = f"T.{i.parts[0]}({i.at},{_count(i)},{int(i.has('trans'))}"
    if i.parts[0] == "ldmatrix":
        return f"{head},{f.pointers(f.vector(i.ops[0]))},{f.shared_address(i.ops[1])});"
    return f"{head},{f.shared_address(i.ops[0])},{f.pointers(f.vector(i.ops[1]))});"


@instruction("movmatrix", "sync aligned m8n8 trans")
def movmatrix(f: F, i: I) -> str:
    return f"T.movmatrix({i.at},{f.pointers([i.ops[0]])},{f.value(i.ops[1], 'u32')});"


@instruction("mma")
def mma(f: F, i: I) -> str:
    m = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.kind::f8f6f4)?"
        r"\.(f32|f16)\.(\w+)\.(\w+)\.(f32|f16)",
        i.opcode,
    )
    if not m or m.group(3) not in OPERAND_TYPES or m.group(4) not in OPERAND_TYPES:
        raise TranslationError("mma shape or type")
    k, d_type, a_type, b_type, c_type = m.groups()
    if d_type != c_type or OPERAND_BITS[a_type] != OPERAND_BITS[b_type]:
        raise TranslationError("mma types")
    d, a, b, c = (f.vector(o) for o in i.ops)
    a_regs = 16 * int(k) * OPERAND_BITS[a_type] // (32 * 32)
    if len(a) != a_regs or len(b) != a_regs // 2 or len(d) != (4 if d_type == "f32" else 2):
        raise TranslationError("mma registers")
    return (
        f"T.mma({i.at},{a_regs},Element::{OPERAND_TYPES[a_type]},"
        f"Element::{OPERAND_TYPES[b_type]},{int(d_type == 'f16')},{f.pointers(d)},"
        f"{f.values(a, 'b32')},{f.values(b, 'b32')},{f.values(c, 'b32')});"
    )


@instruction("wgmma")
def wgmma(f: F, i: I) -> str:
    kind = i.parts[1]
    if kind in ("fence", "commit_group"):
        return f"T.wgmma_{kind.split('_')[0]}({i.at});"
    if kind == "wait_group":
        return f"T.wgmma_wait({i.at},{f.value(i.ops[0], 'u32')});"
    m = re.fullmatch(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|f16)\.(\w+)\.(\w+)", i.opcode
    )
    if not m or m.group(4) not in OPERAND_TYPES or m.group(5) not in OPERAND_TYPES:
        raise TranslationError("wgmma shape or type")
    n, k, d_type, a_type, b_type = m.groups()
    if int(k) * OPERAND_BITS[a_type] != 256:
        raise TranslationError("wgmma depth")
    in_registers = i.ops[1].startswith("{")
    a = (
        f"{f.pointers(f.vector(i.ops[1]))},0ull"
        if in_registers
        else f"nullptr,{f.value(i.ops[1], 'u64')}"
    )
    transpose = [f.value(o, "u32") for o in i.ops[6:]]
    a_mn = transpose.pop(0) if len(transpose) == 2 else "0"
    b_mn = transpose.pop(0) if transpose else "0"
    scales = f"{f.value(i.ops[3], 'pred')},{f.value(i.ops[4], 's32')},{f.value(i.ops[5], 's32')}"
    return (
        f"T.wgmma({i.at},{n},Element::{OPERAND_TYPES[a_type]},Element::{OPERAND_TYPES[b_type]},"
        f"{f.pointers(f.vector(i.ops[0]))},{a},{f.value(i.ops[2], 'u64')},{scales},"
        f"{a_mn},{b_mn},{int(d_type == 'f16')});"
    )


SHAPES = {"32x32b": 0, "16x64b": 1, "16x128b": 2, "16x256b": 3}
TCGEN05 = frozenset(
    [
        "alloc",
        "dealloc",
        "relinquish_alloc_permit",
        "ld",
        "st",
        "wait::ld",
        "wait::st",
        "fence::before_thread_sync",
        "fence::after_thread_sync",
        "commit",
        "mma",
        "cp",
        "sync",
        "aligned",
        "cta_group::1",
        "cta_group::2",
        "shared::cta",
        "shared::cluster",
        "mbarrier::arrive::one",
        "multicast::cluster",
        "kind::f16",
        "kind::f8f6f4",
        "128x256b",
        "128x128b",
        "b32",
        "b64",
    ]
)


@instruction("tcgen05")
def tcgen05(f: F, i: I) -> str:
    for p in i.parts[1:]:
        if p not in TCGEN05 and p not in SHAPES and not re.fullmatch(r"x\d+", p):
            raise TranslationError(f"unknown qualifier .{p}")
    kind = i.parts[1]
    group = 2 if i.has("cta_group::2") else 1
    if kind == "alloc":
        return (
            f"T.tmem_alloc({i.at},{group},{f.shared_address(i.ops[0])},{f.value(i.ops[1], 'u32')});"
        )
    if kind == "dealloc":
        return (
            f"T.tmem_dealloc({i.at},{group},{f.value(i.ops[0], 'u32')},{f.value(i.ops[1], 'u32')});"
        )
    if kind == "relinquish_alloc_permit":
        return f"T.tmem_relinquish({i.at},{group});"
    if kind in ("ld", "st"):
        return _tmem_access(f, i, kind)
    if kind.startswith("wait"):
        return f"T.tmem_wait({i.at},{int(kind.endswith('st'))});"
    if kind.startswith("fence"):
        return f"T.tcgen05_fence({i.at},{int('after' in kind)});"
    if kind == "commit":
        multicast = i.has("multicast::cluster")
        mask = f.value(i.ops[1], "u16") if multicast else "0"
        return (
            f"T.tcgen05_commit({i.at},{group},{f.shared_address(i.ops[0])},{int(multicast)},"
            f"{mask});"
        )
    if kind == "cp":
        return (
            f"T.tcgen05_cp({i.at},{group},{0 if i.has('128x256b') else 1},"
            f"{f.address(i.ops[0], 32)},{f.value(i.ops[1], 'u64')});"
        )
    if kind == "mma":
        return _tcgen05_mma(f, i, group)
    raise TranslationError(kind)


def _tmem_access(f: F, i: I, kind: str) -> str:
    shape = SHAPES[i.one_of(*SHAPES) or ""]
    registers, address = (i.ops[0], i.ops[1]) if kind == "ld" else (i.ops[1], i.ops[0])
    names = f.vector(registers)
    head = f"{i.at},{shape},{_count(i)},{len(names)}"
    where = f.address(address, 32)
    if kind == "ld":
        return f"T.tmem_load({head},{f.pointers(names)},{where});"
    return f"T.tmem_store({head},{f.values(names, 'b32')},{where});"


def _tcgen05_mma(f: F, i: I, group: int) -> str:
    in_tmem = i.ops[1].startswith("[")
    a = f.address(i.ops[1], 32) if in_tmem else f.value(i.ops[1], "u64")
    rest = i.ops[4:]
    disabled: list[str] = []
    if rest and rest[0].startswith("{"):
        disabled = f.vector(rest.pop(0))
    if len(rest) != 1 or not i.has("kind::f16", "kind::f8f6f4"):
        raise TranslationError("tcgen05.mma kind")
    mask = f.values(disabled, "b32") if disabled else "nullptr"
    return (
        f"T.tcgen05_mma({i.at},{group},{int(i.has('kind::f8f6f4'))},{int(in_tmem)},"
        f"{f.address(i.ops[0], 32)},{a},{f.value(i.ops[2], 'u64')},{f.value(i.ops[3], 'u32')},"
        f"{mask},{len(disabled)},{f.value(rest[0], 'pred')});"
    )
