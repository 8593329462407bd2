"""Warp collectives, barriers, clusters, mbarriers, and what concerns the schedule."""

from __future__ import annotations

from .function import FunctionTranslator as F
from .function import Instruction as I
from .function import instruction
from .ptx import TranslationError

SHFL_MODES = {"idx": 0, "up": 1, "down": 2, "bfly": 3}
REDUX_OPERATIONS = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5}
STATE = "shared shared::cta shared::cluster cta cluster b64"


@instruction("shfl", "sync idx up down bfly")
def shfl(f: F, i: I) -> list[str]:
    dst = [d.strip() for d in i.ops[0].split("|")]
    args = ",".join(f.value(o, "u32") for o in i.ops[1:5])
    out = [
        f"bool p_; uint32_t v_=T.shfl({i.at},{SHFL_MODES[i.parts[2]]},{args},p_);",
        f.put(dst[0], "v_", "b32"),
    ]
    return out + ([f.put(dst[1], "p_", "pred")] if len(dst) == 2 else [])


@instruction("vote", "sync ballot any all uni")
def vote(f: F, i: I) -> str:
    fn = i.parts[2]
    e = f"T.vote_{fn}({i.at},{f.value(i.ops[1], 'pred')},{f.value(i.ops[2], 'u32')})"
    return f.put(i.ops[0], e, "u32" if fn == "ballot" else "pred")


@instruction("match", "sync any all")
def match(f: F, i: I) -> str | list[str]:
    dst = [d.strip() for d in i.ops[0].split("|")]
    args = f"{i.at},(uint64_t){f.value(i.ops[1], i.type)},{f.value(i.ops[2], 'u32')}"
    if i.has("any"):
        return f.put(dst[0], f"T.match_any({args})", "b32")
    out = [f"bool p_; uint32_t v_=T.match_all({args},p_);", f.put(dst[0], "v_", "b32")]
    return out + ([f.put(dst[1], "p_", "pred")] if len(dst) == 2 else [])


@instruction("redux", "sync add min max and or xor")
def redux(f: F, i: I) -> str:
    op = REDUX_OPERATIONS[i.one_of(*REDUX_OPERATIONS) or ""]
    if i.type == "f32":
        raise TranslationError("redux.f32")
    e = (
        f"T.redux({i.at},{op},(uint32_t){f.value(i.ops[1], i.type)},{int(i.type == 's32')},"
        f"{f.value(i.ops[2], 'u32')})"
    )
    return f.put(i.ops[0], f"(uint32_t){e}", "b32")


@instruction("activemask", "")
def activemask(f: F, i: I) -> str:
    return f.put(i.ops[0], f"T.activemask({i.at})", "u32")


@instruction("elect", "sync")
def elect(f: F, i: I) -> list[str]:
    dst = [d.strip() for d in i.ops[0].split("|")]
    out = [f"uint32_t l_; bool p_=T.elect({i.at},{f.value(i.ops[1], 'u32')},l_);"]
    if dst[0] != "_":
        out.append(f.put(dst[0], "l_", "u32"))
    return [*out, f.put(dst[1], "p_", "pred")]


@instruction(
    "bar barrier",
    "warp sync arrive red aligned cta cluster wait and or popc release acquire relaxed",
)
def bar(f: F, i: I) -> str:
    if i.has("cluster"):
        if i.has("arrive"):
            return f"T.cluster_arrive({i.at},{int(not i.has('relaxed'))});"
        return f"T.cluster_wait({i.at},1);"
    if i.has("warp"):
        return f"T.bar_warp({i.at},{f.value(i.ops[0], 'u32')});"
    if i.has("red"):
        fn = i.one_of("and", "or", "popc")
        count = f.value(i.ops[2], "u32") if len(i.ops) == 4 else "0u"
        e = (
            f"T.bar_red_{fn}({i.at},{f.value(i.ops[1], 'u32')},{count},"
            f"{f.value(i.ops[-1], 'pred')})"
        )
        return f.put(i.ops[0], e, i.type)
    count = f.value(i.ops[1], "u32") if len(i.ops) > 1 else "0u"
    fn = "arrive" if i.has("arrive") else "sync"
    return f"T.bar_{fn}({i.at},{f.value(i.ops[0], 'u32')},{count});"


@instruction("mapa", "shared::cluster")
def mapa(f: F, i: I) -> str:
    wide = i.type == "u64" and not i.has("shared::cluster")
    rank = f.value(i.ops[2], "u32")
    if wide:
        return f.put(i.ops[0], f"T.mapa64({f.value(i.ops[1], 'u64')},{rank})", "u64")
    return f.put(i.ops[0], f"T.mapa({f.value(i.ops[1], 'u32')},{rank})", "u32")


@instruction("getctarank", "shared::cluster")
def getctarank(f: F, i: I) -> str:
    if i.has("shared::cluster"):
        return f.put(i.ops[0], f"({f.value(i.ops[1], 'u32')}>>24)", "u32")
    return f.put(i.ops[0], f"(uint32_t)(T.to_shared({f.value(i.ops[1], 'u64')})>>24)", "u32")


def _arrive(f: F, i: I) -> str:
    dst = "_" if i.ops[0].startswith("[") else i.ops[0]
    ops = i.ops if dst == "_" and i.ops[0].startswith("[") else i.ops[1:]
    order = "kRelaxed" if i.has("relaxed") else "kRelease"
    count, tx = "1u", "0u"
    if i.has("expect_tx"):
        tx = f.value(ops[1], "u32")
    elif len(ops) > 1:
        count = f.value(ops[1], "u32")
    drop = int(i.parts[1] == "arrive_drop")
    e = f"T.mbarrier_arrive({i.at},{f.shared_address(ops[0])},{count},{tx},{drop},{order})"
    return f.put(dst, e, "b64")


@instruction(
    "mbarrier",
    f"init inval arrive arrive_drop expect_tx complete_tx try_wait test_wait "
    f"pending_count parity acquire release relaxed {STATE}",
)
def mbarrier(f: F, i: I) -> str:
    kind = i.parts[1]
    if kind == "pending_count":
        return f.put(i.ops[0], f"T.mbarrier_pending({f.value(i.ops[1], 'b64')})", "u32")
    if kind in ("arrive", "arrive_drop"):
        return _arrive(f, i)
    if kind in ("try_wait", "test_wait"):
        if i.has("parity"):
            parity = f"({f.value(i.ops[2], 'u32')}&1u)"
        else:
            parity = f"T.mbarrier_parity({f.value(i.ops[2], 'u64')})"
        order = "kRelaxed" if i.has("relaxed") else "kAcquire"
        e = (
            f"T.mbarrier_wait({i.at},{f.shared_address(i.ops[1])},{parity},"
            f"{int(kind == 'try_wait')},{order})"
        )
        return f.put(i.ops[0], e, "pred")
    address = f.shared_address(i.ops[0])
    if kind == "inval":
        return f"T.mbarrier_inval({i.at},{address});"
    return f"T.mbarrier_{kind}({i.at},{address},{f.value(i.ops[1], 'u32')});"


@instruction("nanosleep", "")
def nanosleep(f: F, i: I) -> str:
    return f"T.yield({i.at});"


@instruction("pmevent", "mask")
def nothing(f: F, i: I) -> str:
    return ";"


@instruction("griddepcontrol", "launch_dependents wait")
def griddepcontrol(f: F, i: I) -> str:
    return f"T.griddep_{i.one_of('launch_dependents', 'wait')}({i.at});"


@instruction("setmaxnreg", "inc dec sync aligned")
def setmaxnreg(f: F, i: I) -> str:
    return f"T.setmaxnreg({i.at},{int(i.has('inc'))},{f.value(i.ops[0], 'u32')});"


@instruction(
    "clusterlaunchcontrol",
    "try_cancel async shared::cta mbarrier::complete_tx::bytes "
    "multicast::cluster::all query_cancel is_canceled v4 "
    "get_first_ctaid get_first_ctaid::x get_first_ctaid::y "
    "get_first_ctaid::z",
)
def clusterlaunchcontrol(f: F, i: I) -> str | list[str]:
    if i.has("try_cancel"):
        return (
            f"T.clc_try_cancel({i.at},{f.shared_address(i.ops[0])},"
            f"{f.shared_address(i.ops[1])},{int(i.has('multicast::cluster::all'))});"
        )
    answer = f.value(i.ops[1], "b128")
    if i.has("is_canceled"):
        return f.put(i.ops[0], f"(({answer}>>96)!=0)", "pred")
    names = f.vector(i.ops[0])
    which = i.one_of("get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z")
    first = "xyz".index(which[-1]) if which else 0
    return [
        f.put(x, f"(uint32_t)({answer}>>{32 * (first + k)})", "b32")
        for k, x in enumerate(names)
        if x != "_"
    ]
