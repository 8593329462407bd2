"""Loads, stores, atomics, fences."""

from __future__ import annotations

from .function import VALUE_TYPES, instruction
from .function import FunctionTranslator as F
from .function import Instruction as I
from .ptx import SIZES, TranslationError

SPACES = ("global", "shared", "local", "param", "const")
CACHE = (
    "ca cg cs cv wb wt lu nc L1::evict_normal L1::evict_unchanged L1::evict_first "
    "L1::evict_last L1::no_allocate L2::evict_last L2::evict_first L2::evict_normal "
    "L2::cache_hint L2::64B L2::128B L2::256B unified"
)
STRONG = "weak relaxed acquire release acq_rel volatile mmio"
SCOPES = "cta cluster gpu sys"
NAMES = "global shared shared::cta shared::cluster local param param::entry param::func const"
SCOPE_VALUE = {
    "cta": "kScopeCta",
    "cluster": "kScopeCluster",
    "gpu": "kScopeGpu",
    "sys": "kScopeGpu",
}


def space_of(i: I) -> str:
    for p in i.parts[1:]:
        if (s := p.split("::")[0]) in SPACES:
            return s
    return "generic"


def order_of(i: I, default: str = "kWeak") -> str:
    for name, value in (
        ("acq_rel", "kAcqRel"),
        ("acquire", "kAcquire"),
        ("release", "kRelease"),
        ("relaxed", "kRelaxed"),
        ("volatile", "kRelaxed"),
        ("mmio", "kRelaxed"),
    ):
        if i.has(name):
            return value
    return default


def scope_of(i: I) -> str:
    if i.has("volatile", "mmio"):
        return "kScopeGpu"
    return SCOPE_VALUE[i.one_of(*SCOPE_VALUE) or "gpu"]


def bits_of(type_: str) -> str:
    return {"f32": "b32", "f64": "b64"}.get(type_, type_)


def pointer(f: F, i: I, op: str, n: int, kind: str) -> str:
    """`kind` is load or store; local, param and const accesses need no check."""
    space = space_of(i)
    order = order_of(i)
    if space in ("local", "param", "const"):
        return f"auto a_=(uint8_t*){f.address(op)};"
    shared = space == "shared"
    address = f.shared_address(op) if shared else f.address(op)
    if order != "kWeak":
        args = f"{i.at},{int(shared)},{address},{n},{order},{scope_of(i)}"
        return f"auto a_=T.{kind}_strong({args});"
    return f"auto a_=T.{kind}_{'shared' if shared else 'global'}({i.at},{address},{n});"


@instruction("ld ldu", f"{NAMES} {CACHE} {STRONG} {SCOPES} v2 v4 v8")
def load(f: F, i: I) -> list[str]:
    names, width = f.vector(i.ops[0]), SIZES[i.type]
    t = bits_of(i.type)
    c_type = VALUE_TYPES[t]
    out = [pointer(f, i, i.ops[1], width * len(names), "load")]
    if len(names) == 1:
        return [*out, f.put(names[0], f"rd<{c_type}>(a_)", t)]
    out += [f"{c_type} v{k}_=rd<{c_type}>(a_+{width * k});" for k in range(len(names))]
    return out + [f.put(x, f"v{k}_", t) for k, x in enumerate(names) if x != "_"]


@instruction("st", f"{NAMES} {CACHE} {STRONG} {SCOPES} v2 v4 v8 async mbarrier::complete_tx::bytes")
def store(f: F, i: I) -> list[str]:
    names, width = f.vector(i.ops[1]), SIZES[i.type]
    t = bits_of(i.type)
    if i.has("async"):
        return [
            f"T.store_async({i.at},{f.shared_address(i.ops[0])},"
            f"{f.values(names, 'u64') if width == 8 else _widened(f, names)},"
            f"{len(names)},{width},{f.shared_address(i.ops[2])});"
        ]
    out = [pointer(f, i, i.ops[0], width * len(names), "store")]
    return out + [
        f"wr<{VALUE_TYPES[t]}>(a_+{width * k},{f.value(x, t)});" for k, x in enumerate(names)
    ]


def _widened(f: F, names: list[str]) -> str:
    inner = ",".join(f"(uint64_t){f.value(x, 'b32')}" for x in names)
    return f"std::initializer_list<uint64_t>{{{inner}}}.begin()"


OPERATIONS = "add min max and or xor exch cas inc dec"


@instruction(
    "atom red",
    f"{NAMES} {CACHE} {STRONG} {SCOPES} {OPERATIONS} v2 v4 v8 noftz async "
    "mbarrier::complete_tx::bytes",
)
def atomic(f: F, i: I) -> list[str]:
    op = i.one_of(*OPERATIONS.split())
    if op is None:
        raise TranslationError("operation")
    dst, ops = (i.ops[0], i.ops[1:]) if i.parts[0] == "atom" else (None, i.ops)
    if i.has("async"):
        element = {"u32": "kU32", "s32": "kS32", "u64": "kU64", "b32": "kU32"}[i.type]
        return [
            f"T.reduce_async({i.at},Reduction::k{op.capitalize()},Element::{element},"
            f"{f.shared_address(ops[0])},(uint64_t){f.value(ops[1], i.type)},"
            f"{f.shared_address(ops[2])});"
        ]
    values = f.vector(ops[1])
    shared = space_of(i) == "shared"
    address = f.shared_address(ops[0]) if shared else f.address(ops[0])
    n = SIZES[i.type] * len(values)
    out = [
        f"auto a_=T.atomic({i.at},{int(shared)},{address},{n},{order_of(i, 'kRelaxed')},"
        f"{scope_of(i)});"
    ]
    packed = i.type in ("f16x2", "bf16x2", "f16", "bf16")
    wanted = f.vector(dst) if dst and dst != "_" else []
    if wanted and (packed or len(values) > 1):
        raise TranslationError("result of a packed or vector atomic")
    fn = f"at_{op}_{i.type}" if packed else f"at_{op}<{VALUE_TYPES[i.type]}>"
    if len(values) > 1 or packed:
        return out + [
            f"{fn}(a_+{SIZES[i.type] * k},{f.value(x, i.type)});" for k, x in enumerate(values)
        ]
    e = f"{fn}(a_,{','.join(f.value(x, i.type) for x in ops[1:])})"
    return [*out, f.put(wanted[0], e, i.type) if wanted else e + ";"]


@instruction("prefetch prefetchu", f"{NAMES} L1 L2 L2::evict_last L2::evict_normal tensormap")
def prefetch(f: F, i: I) -> str:
    return ";"


@instruction("applypriority discard", f"{NAMES} L2 L2::evict_normal")
def hint(f: F, i: I) -> str:
    return ";"


@instruction(
    "createpolicy",
    "fractional range L2::evict_last L2::evict_first L2::evict_normal L2::evict_unchanged cvt L2",
)
def createpolicy(f: F, i: I) -> str:
    return f.put(i.ops[0], "0ull", "u64")


@instruction("membar", "cta gl sys")
def membar(f: F, i: I) -> str:
    return f"T.fence({i.at},{'kScopeCta' if i.has('cta') else 'kScopeGpu'});"


@instruction(
    "fence",
    f"sc acq_rel acquire release {SCOPES} proxy async async.global alias "
    "async.shared::cta async.shared::cluster mbarrier_init async::generic global "
    "shared::cta shared::cluster sync_restrict::shared::cta "
    "sync_restrict::shared::cluster",
)
def fence(f: F, i: I) -> str:
    if i.has("mbarrier_init"):
        return f"T.fence_mbarrier_init({i.at});"
    if i.has("proxy"):
        if i.has("alias"):
            return ";"
        return f"T.fence_proxy_async({i.at});"
    return f"T.fence({i.at},{scope_of(i)});"
