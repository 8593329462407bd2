"""cp.async, cp.async.bulk, tensor copies."""

from __future__ import annotations

import re

from .function import FunctionTranslator as F
from .function import Instruction as I
from .function import instruction
from .ptx import TranslationError, split_operands

ELEMENTS = {
    "b8": "kB8",
    "f16": "kF16",
    "bf16": "kBF16",
    "f32": "kF32",
    "f64": "kF64",
    "s32": "kS32",
    "u32": "kU32",
    "b32": "kU32",
    "u64": "kU64",
    "s64": "kS64",
    "b64": "kU64",
}
REDUCTIONS = ("add", "min", "max", "and", "or", "xor")
BULK_QUALIFIERS = frozenset(
    [
        "async",
        "bulk",
        "reduce",
        "tensor",
        "prefetch",
        "commit_group",
        "wait_group",
        "read",
        "global",
        "shared::cta",
        "shared::cluster",
        "bulk_group",
        "mbarrier::complete_tx::bytes",
        "multicast::cluster",
        "L2::cache_hint",
        "tile",
        "1d",
        "2d",
        "3d",
        "4d",
        "5d",
        "cta_group::1",
        "cta_group::2",
        "noftz",
        "L2",
    ]
)


@instruction("cp")
def copy(f: F, i: I) -> str:
    if i.has("bulk"):
        for p in i.parts[1:]:
            if p not in BULK_QUALIFIERS and p not in ELEMENTS and p not in REDUCTIONS:
                raise TranslationError(f"unknown qualifier .{p}")
        return _bulk(f, i)
    kind = i.parts[2]
    if kind == "commit_group":
        return f"T.cp_async_commit({i.at});"
    if kind == "wait_group":
        return f"T.cp_async_wait({i.at},{f.value(i.ops[0], 'u32')});"
    if kind == "wait_all":
        return f"T.cp_async_commit({i.at}); T.cp_async_wait({i.at},0);"
    if kind == "mbarrier":
        return f"T.cp_async_mbarrier({i.at},{f.shared_address(i.ops[0])},{int(i.has('noinc'))});"
    if kind not in ("ca", "cg"):
        raise TranslationError("cp.async")
    size = f.value(i.ops[2], "u32")
    source_size = size
    hint = i.has("L2::cache_hint")
    if len(i.ops) > 3 + hint:
        r = f.register(i.ops[3].lstrip("!"))
        if r and r[1] == "pred":
            source_size = f"({f.value(i.ops[3], 'pred')}?0u:{size})"
        else:
            source_size = f.value(i.ops[3], "u32")
    return (
        f"T.cp_async({i.at},{f.shared_address(i.ops[0])},{f.address(i.ops[1])},{size},"
        f"{source_size});"
    )


def _reduction(i: I) -> tuple[str, str]:
    if not i.has("reduce"):
        return "Reduction::kNone", "Element::kB8"
    op = i.one_of(*REDUCTIONS)
    if op is None:
        raise TranslationError("reduction")
    return f"Reduction::k{op.capitalize()}", f"Element::{ELEMENTS.get(i.type, 'kB8')}"


def _bulk(f: F, i: I) -> str:
    if i.has("commit_group"):
        return f"T.bulk_commit({i.at});"
    if i.has("wait_group"):
        return f"T.bulk_wait({i.at},{f.value(i.ops[0], 'u32')},{int(i.has('read'))});"
    if i.has("prefetch"):
        return ";"
    if i.has("tensor"):
        return _tensor(f, i)
    reduction, element = _reduction(i)
    size = f.value(i.ops[2], "u32")
    spaces = [p for p in i.parts if p in ("global", "shared::cta", "shared::cluster")]
    if spaces[0] == "global":
        return (
            f"T.bulk_store({i.at},{f.address(i.ops[0])},{f.shared_address(i.ops[1])},{size},"
            f"{reduction},{element});"
        )
    dst, barrier = f.shared_address(i.ops[0]), f.shared_address(i.ops[3])
    if spaces[1] == "shared::cta":
        return (
            f"T.bulk_peer({i.at},{dst},{f.shared_address(i.ops[1])},{size},{barrier},"
            f"{reduction},{element});"
        )
    multicast = i.has("multicast::cluster")
    mask = f.value(i.ops[4], "u16") if multicast else "0"
    return (
        f"T.bulk_load({i.at},{dst},{f.address(i.ops[1])},{size},{barrier},{int(multicast)},{mask});"
    )


def _tensor(f: F, i: I) -> str:
    rank = int(next(p for p in i.parts if re.fullmatch(r"\dd", p))[0])
    load = next(p for p in i.parts if p in ("global", "shared::cta", "shared::cluster")) != "global"
    m = re.fullmatch(r"\[\s*([^,]+),\s*\{(.*)\}\s*\]", i.ops[1 if load else 0], re.S)
    if not m:
        raise TranslationError("tensor coordinates")
    tensor = f.value(m.group(1), "u64")
    coordinates = f.values(split_operands(m.group(2)), "s32")
    if not load:
        reduction, _ = _reduction(i)
        return (
            f"T.tma_store({i.at},{rank},{f.shared_address(i.ops[1])},{tensor},{coordinates},"
            f"{reduction});"
        )
    multicast = i.has("multicast::cluster")
    mask = f.value(i.ops[3], "u16") if multicast else "0"
    group = 2 if i.has("cta_group::2") else 1
    return (
        f"T.tma_load({i.at},{rank},{f.shared_address(i.ops[0])},{tensor},{coordinates},"
        f"{f.shared_address(i.ops[2])},{int(multicast)},{mask},{group});"
    )
