"""Arithmetic, logic, conversions, moves and branches: code that touches one thread only."""

from __future__ import annotations

from .function import (
    FLOATS,
    HANDLERS,
    PACKED,
    STORAGE_TYPES,
    VALUE_TYPES,
    function_name,
    instruction,
)
from .function import FunctionTranslator as F
from .function import Instruction as I
from .ptx import SIZES, TranslationError

ROUNDING = {"rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
MODES = "rn rz rm rp ftz sat"


def _unsigned(type_: str) -> str:
    return "uint64_t" if SIZES[type_] == 8 else "uint32_t"


def _saturate(i: I, e: str) -> str:
    return f"sat01({e})" if i.has("sat") else e


def _float_result(f: F, i: I, plain: str, rounded: str, values: list[str]) -> str:
    mode = i.one_of(*ROUNDING)
    e = f"{rounded}({ROUNDING[mode]},{','.join(values)})" if mode else plain
    return f.put(i.ops[0], _saturate(i, e), i.type)


def _packed(f: F, i: I, op: str) -> str:
    """Halves and f32x2: the functions v_* of numbers.h."""
    if i.has("sat", "rp") or (i.type != "f32x2" and i.has("rz", "rm")):
        raise TranslationError("rounding of a packed type")
    values = [f.value(o, i.type) for o in i.ops[1:]]
    if mode := i.one_of(*ROUNDING):
        lanes = []
        for part in ("lo2", "hi2"):
            lanes.append(
                f"rounded_{op}({ROUNDING[mode]},{','.join(f'{part}({v})' for v in values)})"
            )
        return f.put(i.ops[0], f"p2({lanes[0]},{lanes[1]})", i.type)
    relu = "_relu" if i.has("relu") else ""
    return f.put(i.ops[0], f"v_{op}{relu}_{i.type}({','.join(values)})", i.type)


def _carry(f: F, i: I, sign: str) -> list[str]:
    """add.cc, addc, sub.cc, subc on 32 or 64 bits; the carry is a local variable."""
    wide = "unsigned __int128" if SIZES[i.type] == 8 else "uint64_t"
    a, c = (f"({wide})({_unsigned(i.type)})({f.value(o, i.type)})" for o in i.ops[1:3])
    carry_in = f"{sign}({wide})T_carry" if i.parts[0] in ("addc", "subc") else ""
    out = [f"{wide} t_={a}{sign}{c}{carry_in};", f.put(i.ops[0], "t_", i.type.replace("s", "u"))]
    if i.has("cc"):
        out.append(f"T_carry=uint32_t(t_>>{SIZES[i.type] * 8})&1u;")
    return out


@instruction("add sub addc subc", MODES + " cc")
def add(f: F, i: I) -> str | list[str]:
    op = i.parts[0][:3]
    sign = {"add": "+", "sub": "-"}[op]
    if i.has("cc") or i.parts[0].endswith("c"):
        return _carry(f, i, sign)
    if i.type in PACKED:
        return _packed(f, i, op)
    a, c = f.value(i.ops[1], i.type), f.value(i.ops[2], i.type)
    if i.type in FLOATS:
        return _float_result(f, i, f"({a}{sign}{c})", f"rounded_{op}", [a, c])
    if i.has("sat"):
        return f.put(
            i.ops[0], f"isat<{VALUE_TYPES[i.type]}>((int64_t){a}{sign}(int64_t){c})", i.type
        )
    u = _unsigned(i.type)
    return f.put(i.ops[0], f"({VALUE_TYPES[i.type]})(({u}){a}{sign}({u}){c})", i.type)


@instruction("mul", MODES + " lo hi wide")
def mul(f: F, i: I) -> str:
    if i.type in PACKED:
        return _packed(f, i, "mul")
    a, c = f.value(i.ops[1], i.type), f.value(i.ops[2], i.type)
    if i.type in FLOATS:
        return _float_result(f, i, f"({a}*{c})", "rounded_mul", [a, c])
    t = VALUE_TYPES[i.type]
    if i.has("lo"):
        u = _unsigned(i.type)
        return f.put(i.ops[0], f"({t})(({u}){a}*({u}){c})", i.type)
    if i.has("wide"):
        w = VALUE_TYPES[WIDER[i.type]]
        return f.put(i.ops[0], f"(({w}){a}*({w}){c})", WIDER[i.type])
    if i.has("hi") and SIZES[i.type] >= 4:
        return f.put(i.ops[0], f"mulhi(({t}){a},({t}){c})", i.type)
    raise TranslationError("mul")


@instruction("mad", MODES + " lo hi wide")
def mad(f: F, i: I) -> str | list[str]:
    if i.type in FLOATS:
        return fma(f, i)
    a, c = f.value(i.ops[1], i.type), f.value(i.ops[2], i.type)
    t = VALUE_TYPES[i.type]
    if i.has("sat"):
        raise TranslationError("mad.sat")
    if i.has("lo"):
        u = _unsigned(i.type)
        return f.put(i.ops[0], f"({t})(({u}){a}*({u}){c}+({u}){f.value(i.ops[3], i.type)})", i.type)
    if i.has("wide"):
        wt = WIDER[i.type]
        w = VALUE_TYPES[wt]
        return f.put(i.ops[0], f"(({w}){a}*({w}){c}+({w}){f.value(i.ops[3], wt)})", wt)
    if i.has("hi") and SIZES[i.type] >= 4:
        return f.put(i.ops[0], f"(mulhi(({t}){a},({t}){c})+{f.value(i.ops[3], i.type)})", i.type)
    raise TranslationError("mad")


@instruction("fma", MODES + " relu")
def fma(f: F, i: I) -> str:
    if i.type in PACKED:
        return _packed(f, i, "fma")
    if i.has("relu"):
        raise TranslationError("fma.relu")
    values = [f.value(o, i.type) for o in i.ops[1:]]
    builtin = "__builtin_fmaf" if i.type == "f32" else "__builtin_fma"
    return _float_result(f, i, f"{builtin}({','.join(values)})", "rounded_fma", values)


@instruction("div", "rn rz rm rp ftz full approx")
def div(f: F, i: I) -> str:
    a, c = f.value(i.ops[1], i.type), f.value(i.ops[2], i.type)
    if i.type in FLOATS:
        return _float_result(f, i, f"({a}/{c})", "rounded_div", [a, c])
    return f.put(i.ops[0], f"idiv<{VALUE_TYPES[i.type]}>({a},{c})", i.type)


@instruction("rem", "")
def rem(f: F, i: I) -> str:
    a, c = f.value(i.ops[1], i.type), f.value(i.ops[2], i.type)
    return f.put(i.ops[0], f"irem<{VALUE_TYPES[i.type]}>({a},{c})", i.type)


@instruction("min max", "ftz NaN relu")
def min_max(f: F, i: I) -> str:
    op = i.parts[0]
    nan = "_nan" if i.has("NaN") else ""
    values = [f.value(o, i.type) for o in i.ops[1:]]
    if i.has("relu"):
        raise TranslationError("relu")
    if i.type in PACKED:
        if nan:
            raise TranslationError("NaN of a packed type")
        return f.put(i.ops[0], f"v_{op}_{i.type}({','.join(values)})", i.type)
    if i.type in FLOATS:
        e = values[0]
        for v in values[1:]:
            e = f"f{op}{nan}({e},{v})"
        return f.put(i.ops[0], e, i.type)
    return f.put(i.ops[0], f"i{op}<{VALUE_TYPES[i.type]}>({','.join(values)})", i.type)


@instruction("abs", "ftz")
def abs_(f: F, i: I) -> str:
    if i.type in PACKED:
        bits = f"b{SIZES[i.type] * 8}"
        mask = {2: "0x7fff", 4: "0x7fff7fffu", 8: "0x7fffffff7fffffffull"}[SIZES[i.type]]
        return f.put(i.ops[0], f"({f.value(i.ops[1], bits)}&{mask})", bits)
    return f.put(i.ops[0], f"xabs({f.value(i.ops[1], i.type)})", i.type)


@instruction("neg", "ftz")
def neg(f: F, i: I) -> str:
    if i.type in PACKED:
        bits = f"b{SIZES[i.type] * 8}"
        mask = {2: "0x8000", 4: "0x80008000u", 8: "0x8000000080000000ull"}[SIZES[i.type]]
        return f.put(i.ops[0], f"({f.value(i.ops[1], bits)}^{mask})", bits)
    v = f.value(i.ops[1], i.type)
    return f.put(
        i.ops[0], f"(-{v})" if i.type in FLOATS else f"({VALUE_TYPES[i.type]})(0-{v})", i.type
    )


@instruction("ex2 lg2 rcp sqrt rsqrt tanh sin cos", "approx ftz rn")
def unary(f: F, i: I) -> str:
    v = f.value(i.ops[1], i.type)
    fn = f"v_{i.parts[0]}_{i.type}" if i.type in PACKED else f"m_{i.parts[0]}"
    return f.put(i.ops[0], f"{fn}({v})", i.type)


@instruction("copysign", "")
def copysign(f: F, i: I) -> str:
    fn = "__builtin_copysignf" if i.type == "f32" else "__builtin_copysign"
    return f.put(i.ops[0], f"{fn}({f.value(i.ops[2], i.type)},{f.value(i.ops[1], i.type)})", i.type)


@instruction("testp", "finite infinite notanumber number")
def testp(f: F, i: I) -> str:
    fn = {
        "finite": "std::isfinite",
        "infinite": "std::isinf",
        "notanumber": "std::isnan",
        "number": "!std::isnan",
    }[i.parts[1]]
    return f.put(i.ops[0], f"{fn}({f.value(i.ops[1], i.type)})", "pred")


@instruction("and or xor", "")
def logic(f: F, i: I) -> str:
    sign = {"and": "&", "or": "|", "xor": "^"}[i.parts[0]]
    if i.type == "pred":
        sign = {"&": "&&", "|": "||", "^": "!="}[sign]
    return f.put(
        i.ops[0], f"({f.value(i.ops[1], i.type)}{sign}{f.value(i.ops[2], i.type)})", i.type
    )


@instruction("not", "")
def not_(f: F, i: I) -> str:
    return f.put(
        i.ops[0], f"({'!' if i.type == 'pred' else '~'}{f.value(i.ops[1], i.type)})", i.type
    )


@instruction("shl shr", "")
def shift(f: F, i: I) -> str:
    args = f"{f.value(i.ops[1], i.type)},{f.value(i.ops[2], 'u32')}"
    e = f"x{i.parts[0]}<{VALUE_TYPES[i.type]}>({args})"
    return f.put(i.ops[0], e, i.type)


@instruction("shf", "l r wrap clamp")
def funnel(f: F, i: I) -> str:
    args = ",".join(f.value(o, "u32") for o in i.ops[1:])
    return f.put(i.ops[0], f"shf_{i.parts[1]}_{i.parts[2]}({args})", "b32")


@instruction("lop3", "")
def lop3(f: F, i: I) -> str:
    return f.put(i.ops[0], f"lop3({','.join(f.value(o, 'u32') for o in i.ops[1:])})", "b32")


@instruction("prmt", "")
def prmt(f: F, i: I) -> str:
    return f.put(i.ops[0], f"prmt({','.join(f.value(o, 'u32') for o in i.ops[1:])})", "b32")


@instruction("bfe", "")
def bfe(f: F, i: I) -> str:
    args = ",".join([f.value(i.ops[1], i.type)] + [f.value(o, "u32") for o in i.ops[2:]])
    return f.put(i.ops[0], f"bfe<{VALUE_TYPES[i.type]}>({args})", i.type)


@instruction("bfi", "")
def bfi(f: F, i: I) -> str:
    t = i.type.replace("b", "u")
    args = [f.value(o, t) for o in i.ops[1:3]] + [f.value(o, "u32") for o in i.ops[3:]]
    return f.put(i.ops[0], f"bfi<{VALUE_TYPES[t]}>({','.join(args)})", t)


@instruction("popc clz brev bfind", "shiftamt")
def bits(f: F, i: I) -> str:
    v, n = f.value(i.ops[1], i.type.replace("s", "u")), SIZES[i.type] * 8
    if i.parts[0] == "popc":
        return f.put(i.ops[0], f"__builtin_popcountll((uint64_t){v})", "u32")
    if i.parts[0] == "clz":
        return f.put(i.ops[0], f"clz{n}({v})", "u32")
    if i.type == "s32" or n != 32:
        raise TranslationError("type")
    if i.parts[0] == "brev":
        return f.put(i.ops[0], f"brev({v})", i.type)
    if i.has("shiftamt"):  # left shift that brings the top bit to bit 31; -1 for 0
        return f.put(i.ops[0], f"(uint32_t)({v}?(int)clz32({v}):-1)", "u32")
    return f.put(i.ops[0], f"(uint32_t)(31-(int)clz32({v}))", "u32")


COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
UNORDERED = {"equ": "==", "neu": "!=", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}


@instruction("setp", "ftz and or xor " + " ".join([*COMPARE, *UNORDERED, "nan", "num"]))
def setp(f: F, i: I) -> list[str]:
    compare = i.parts[1]
    a, c = f.value(i.ops[1], i.type), f.value(i.ops[2], i.type)
    floating = i.type in (*FLOATS, "f16", "bf16")
    if i.type in ("f16", "bf16"):
        a, c = f"cvt_{i.type}({a})", f"cvt_{i.type}({c})"
    if i.type in ("f16x2", "bf16x2"):
        raise TranslationError("setp of a packed type")
    unordered = f"(std::isnan({a})||std::isnan({c}))"
    if compare == "ne" and floating:
        e = f"({a}<{c}||{a}>{c})"
    elif compare in COMPARE:
        e = f"({a}{COMPARE[compare]}{c})"
    elif compare in UNORDERED:
        e = f"({unordered}||{a}{UNORDERED[compare]}{c})"
    else:
        e = unordered if compare == "nan" else f"!{unordered}"
    dst = [d.strip() for d in i.ops[0].split("|")]
    if len(i.ops) == 4:
        op = {"and": "&&", "or": "||", "xor": "!="}[i.parts[2]]
        other = f.value(i.ops[3], "pred")
        out = ["bool t_=" + e + ";", f"bool o_={other};", f.put(dst[0], f"(t_{op}o_)", "pred")]
        return out + ([f.put(dst[1], f"(!t_{op}o_)", "pred")] if len(dst) == 2 else [])
    if len(dst) == 1:
        return [f.put(dst[0], e, "pred")]
    return [f"bool t_={e};", f.put(dst[0], "t_", "pred"), f.put(dst[1], "!t_", "pred")]


@instruction("selp", "")
def selp(f: F, i: I) -> str:
    a, c = f.value(i.ops[1], i.type), f.value(i.ops[2], i.type)
    return f.put(i.ops[0], f"({f.value(i.ops[3], 'pred')}?{a}:{c})", i.type)


@instruction("slct", "ftz")
def slct(f: F, i: I) -> str:
    t = i.parts[-2]
    a, c = f.value(i.ops[1], t), f.value(i.ops[2], t)
    return f.put(i.ops[0], f"(({f.value(i.ops[3], i.type)}>=0)?{a}:{c})", t)


@instruction("mov", "")
def mov(f: F, i: I) -> str | list[str]:
    dst, src = i.ops
    size = SIZES.get(i.type, 1)
    bits_type = f"b{size * 8}"
    if dst.startswith("{"):
        names = f.vector(dst)
        width = size // len(names)
        part = f"u{width * 8}"
        out = [f"{STORAGE_TYPES[size]} t_={f.value(src, bits_type)};"]
        return out + [
            f.put(x, f"({VALUE_TYPES[part]})(t_>>{8 * width * k})", part)
            for k, x in enumerate(names)
            if x != "_"
        ]
    if src.startswith("{"):
        names = f.vector(src)
        width = size // len(names)
        e = "|".join(
            f"(({STORAGE_TYPES[size]})({f.value(x, f'u{width * 8}')})<<{8 * width * k})"
            for k, x in enumerate(names)
        )
        return f.put(dst, e, bits_type)
    t = bits_type if i.type in FLOATS else i.type
    return f.put(dst, f.value(src, t), t)


@instruction("cvta", "to global shared local const param shared::cta shared::cluster")
def cvta(f: F, i: I) -> str:
    v = f.value(i.ops[1], "u64")
    if any(p.startswith("shared") for p in i.parts):
        return f.put(i.ops[0], f"T.{'to' if i.has('to') else 'from'}_shared({v})", "u64")
    return f.put(i.ops[0], v, "u64")


@instruction("isspacep", "global shared local const shared::cta shared::cluster")
def isspacep(f: F, i: I) -> str:
    return f.put(i.ops[0], f"T.is_{i.parts[1].split('::')[0]}({f.value(i.ops[1], 'u64')})", "pred")


FLOAT_TYPES = ("f16", "bf16", "f32", "f64")
TO_INTEGER = ("rni", "rzi", "rmi", "rpi")


def _cvt_packed(f: F, i: I) -> str | None:
    d, s = i.parts[-2], i.parts[-1]
    if s == "f32" and d in ("bf16x2", "f16x2", "e4m3x2", "e5m2x2"):
        if i.has("rs"):
            raise TranslationError("stochastic rounding")
        mode = "rz" if i.has("rz") else "rn"
        relu = "_relu" if i.has("relu") else ""
        dst = "b16" if d in ("e4m3x2", "e5m2x2") else "b32"
        a, c = f.value(i.ops[1], "f32"), f.value(i.ops[2], "f32")
        return f.put(i.ops[0], f"cvt2_{d}_{mode}{relu}({a},{c})", dst)
    if s in ("e4m3x2", "e5m2x2"):
        if d != "f16x2" or i.has("relu"):
            raise TranslationError("conversion")
        return f.put(i.ops[0], f"cvt2_f16x2_{s}({f.value(i.ops[1], 'b16')})", "b32")
    return None


@instruction("cvt", "rn rz rm rp rna rni rzi rmi rpi ftz sat satfinite relu rs e4m3x2 e5m2x2")
def cvt(f: F, i: I) -> str:
    packed = _cvt_packed(f, i)
    if packed:
        return packed
    d, s = i.parts[-2], i.parts[-1]
    if i.has("relu"):
        raise TranslationError("relu")
    v = f.value(i.ops[1], s)
    if s in ("f16", "bf16"):
        v = f"cvt_{s}({v})"
    if d == "tf32":
        return f.put(i.ops[0], f"to_tf32({v})", "b32")
    mode = i.one_of(*TO_INTEGER)
    if d in FLOAT_TYPES and s in FLOAT_TYPES:
        v = f"rnd_{mode}({v})" if mode else v
        v = _saturate(i, f"(float)({v})") if i.has("sat") else v
        if d == "f64":
            return f.put(i.ops[0], f"(double)({v})", d)
        if d == "f32":
            if s == "f64" and i.has("rz", "rm", "rp"):
                raise TranslationError("rounding")
            return f.put(i.ops[0], f"(float)({v})", d)
        if i.has("rm", "rp") or s == "f64":
            raise TranslationError("rounding")
        return f.put(i.ops[0], f"to_{d}_{'rz' if i.has('rz') else 'rn'}((float)({v}))", "b16")
    if d in FLOAT_TYPES:
        if i.has("rz", "rm", "rp"):
            k = ROUNDING[i.one_of(*ROUNDING) or "rz"]
            if d != "f32" or SIZES[s] > 4:
                raise TranslationError("rounding")
            return f.put(i.ops[0], f"(float)rounded_double_to_float({k},(double)({v}))", d)
        if d in ("f16", "bf16"):
            return f.put(i.ops[0], f"to_{d}_rn((float)({v}))", "b16")
        return f.put(i.ops[0], f"({VALUE_TYPES[d]})({v})", d)
    if s in FLOAT_TYPES:
        if not mode:
            raise TranslationError("rounding")
        return f.put(i.ops[0], f"f2i<{VALUE_TYPES[d]}>(rnd_{mode}({v}))", d)
    if i.has("sat"):
        return f.put(i.ops[0], f"isat<{VALUE_TYPES[d]}>({v})", d)
    return f.put(i.ops[0], f"({VALUE_TYPES[d]})({v})", d)


# ---- control


@instruction("bra", "uni")
def bra(f: F, i: I) -> str:
    return f.goto(i.ops[0], i.at)


@instruction("brx", "idx uni")
def brx(f: F, i: I) -> str:
    cases = " ".join(f"case {k}: {f.goto(t, i.at)}" for k, t in enumerate(f.targets(i.ops[1])))
    return f'switch ({f.value(i.ops[0], "u32")}) {{ {cases} default: T.fail({i.at},"brx.idx"); }}'


@instruction("ret", "uni")
def ret(f: F, i: I) -> str:
    return "return;"


@instruction("exit", "")
def exit_(f: F, i: I) -> str:
    return "T.exit_thread();"


@instruction("trap brkpt", "")
def trap(f: F, i: I) -> str:
    return f'T.fail({i.at},"{i.parts[0]}");'


@instruction("call", "uni")
def call(f: F, i: I) -> str:
    ops = list(i.ops)
    returns = f.vector("{" + ops.pop(0)[1:-1] + "}") if ops[0].startswith("(") else []
    name = ops[0]
    args = f.vector("{" + ops[1][1:-1] + "}") if len(ops) > 1 and ops[1].startswith("(") else []
    pointers = []
    for x in returns + args:
        s = f.symbol(x)
        if not s:
            raise TranslationError(f"call argument {x}")
        pointers.append(s.replace("(uint64_t)", "", 1))
    if name in ("vprintf", "__assertfail"):
        return f"device_{name.strip('_')}(T,{i.at},{','.join(pointers)});"
    callee = f.module.functions.get(name)
    if callee is None:
        raise TranslationError(f"call of {name} (indirect or undefined)")
    f.calls.add(name)
    inner = "".join(f",{p}" for p in pointers)
    return (
        f"{{ auto* f_=T.function; T.function=&info_{function_name(callee)}; "
        f"{function_name(callee)}(T{inner}); T.function=f_; }}"
    )


__all__ = ["HANDLERS"]
