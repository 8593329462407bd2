"""Translation of one PTX function: scopes, registers, operands, and the table of instructions.

An instruction handler is a function decorated with ``@instruction(name, qualifiers)``. It gets the
``FunctionTranslator`` and the ``Instruction`` and returns C++ statements. Qualifiers that are not
listed (types are always allowed) are a translation error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .ptx import SIZES, PtxFunction, PtxModule, TranslationError, split_operands
from .sites import SiteTable

# C++ type in which values of a PTX type are computed, and stored.
VALUE_TYPES = {
    "b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t",
    "b16": "uint16_t", "u16": "uint16_t", "s16": "int16_t", "f16": "uint16_t", "bf16": "uint16_t",
    "b32": "uint32_t", "u32": "uint32_t", "s32": "int32_t", "f32": "float", "f16x2": "uint32_t",
    "bf16x2": "uint32_t", "tf32": "uint32_t",
    "b64": "uint64_t", "u64": "uint64_t", "s64": "int64_t", "f64": "double", "f32x2": "uint64_t",
    "b128": "unsigned __int128", "pred": "bool",
}  # fmt: skip
STORAGE_TYPES = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t", 16: "unsigned __int128"}
FLOATS = ("f32", "f64")
PACKED = ("f16", "bf16", "f16x2", "bf16x2", "f32x2")

SPECIAL_REGISTERS = {
    "%laneid": "T.lane", "%warpid": "T.warp_id", "%nwarpid": "T.num_warps",
    "%smid": "T.sm_id", "%nsmid": "T.num_sms", "%gridid": "0ull", "WARP_SZ": "32u",
    "%clock": "T.clock(0)", "%clock64": "(uint64_t)T.clock(0)",
    "%globaltimer": "(uint64_t)T.clock(0)",
    "%cluster_ctarank": "T.rank", "%cluster_nctarank": "T.cluster_size",
    "%is_explicit_cluster": "(T.cluster_size>1)",
    "%dynamic_smem_size": "T.dynamic_smem", "%total_smem_size": "T.total_smem",
    "%lanemask_lt": "((1u<<T.lane)-1u)", "%lanemask_le": "((2u<<T.lane)-1u)",
    "%lanemask_eq": "(1u<<T.lane)", "%lanemask_ge": "(~((1u<<T.lane)-1u))",
    "%lanemask_gt": "(~((2u<<T.lane)-1u))",
}  # fmt: skip
for _i, _c in enumerate("xyz"):
    for _n in (
        "tid",
        "ntid",
        "ctaid",
        "nctaid",
        "clusterid",
        "nclusterid",
        "cluster_ctaid",
        "cluster_nctaid",
    ):
        SPECIAL_REGISTERS[f"%{_n}.{_c}"] = f"T.{_n}[{_i}]"


def c_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


@dataclass
class Instruction:
    opcode: str
    parts: list[str]
    ops: list[str]
    at: int  # number of the instruction in the site table

    @property
    def type(self) -> str:
        return self.parts[-1]

    def has(self, *names: str) -> bool:
        return any(n in self.parts for n in names)

    def one_of(self, *names: str) -> str | None:
        return next((p for p in self.parts if p in names), None)


Handler = Callable[["FunctionTranslator", Instruction], "str | list[str]"]
HANDLERS: dict[str, tuple[Handler, frozenset[str] | None]] = {}


def instruction(names: str, qualifiers: str | None = None) -> Callable[[Handler], Handler]:
    """Registers a handler; `qualifiers` None means that the handler checks them itself."""

    def register(handler: Handler) -> Handler:
        allowed = None if qualifiers is None else frozenset(qualifiers.split())
        for name in names.split():
            HANDLERS[name] = (handler, allowed)
        return handler

    return register


class FunctionTranslator:
    """Turns one PTX function into one C++ function."""

    def __init__(self, module: PtxModule, f: PtxFunction, prefix: str, sites: SiteTable) -> None:
        self.module, self.f, self.prefix, self.sites = module, f, prefix, sites
        self.calls: set[str] = set()
        self.globals_used: set[str] = set()
        self._scopes: list[dict[str, Any]] = [
            {"registers": {}, "ranges": {}, "locals": {}, "id": 0}
        ]
        self._labels: dict[int, set[str]] = {}
        self._targets: dict[str, list[str]] = {}  # of brx.idx
        self._emitted: set[str] = set()
        self._declarations: list[str] = []
        self._code: list[str] = []
        self._line = 0
        if f.entry:
            self._params = {p.name: f"(T.params+{p.offset})" for p in f.params}
        else:
            self._params = {p.name: f"q_{c_name(p.name)}" for p in f.returns + f.params}

    # ---- the whole function
    def translate(self) -> str:
        self._find_labels()
        scope_id = 0
        for s in self.f.body:
            if s.kind == "{":
                scope_id += 1
                self._scopes.append({"registers": {}, "ranges": {}, "locals": {}, "id": scope_id})
            elif s.kind == "}":
                self._scopes.pop()
            elif s.kind == "label":
                if s.text not in self._targets:
                    self._emitted.add(self.label(s.text))
                    self._code.append(f"{self.label(s.text)}:;")
            else:
                try:
                    self._statement(s.text, s.line)
                except (TranslationError, KeyError, IndexError, AttributeError) as e:
                    raise TranslationError(
                        f"{self.f.name[:80]}, line {s.line}: {s.text!r}: {e!s}"
                    ) from e
        body = [f"  {line}" for line in self._declarations + self._code]
        carry = "  [[maybe_unused]] uint32_t T_carry = 0;"
        return "\n".join([self.prototype() + " {", carry, *body, "}"])

    def prototype(self) -> str:
        name = function_name(self.f)
        if self.f.entry:
            return f"void {name}(Thread& T)"
        args = [f"uint8_t* q_{c_name(p.name)}" for p in self.f.returns + self.f.params]
        return f"static void {name}({', '.join(['Thread& T', *args])})"

    def _find_labels(self) -> None:
        scope_id, stack = 0, [0]
        self._labels = {0: set()}
        last = ""
        for s in self.f.body:
            if s.kind == "{":
                scope_id += 1
                stack.append(scope_id)
                self._labels[scope_id] = set()
            elif s.kind == "}":
                stack.pop()
            elif s.kind == "label":
                self._labels[stack[-1]].add(s.text)
                last = s.text
            elif m := re.match(r"\.branchtargets\s+(.*)$", s.text, re.S):
                self._targets[last] = split_operands(m.group(1))

    def label(self, name: str) -> str:
        for s in reversed(self._scopes):
            if name in self._labels[s["id"]]:
                return f"L{s['id']}_{c_name(name)}"
        raise TranslationError(f"label {name}")

    def goto(self, name: str, at: int) -> str:
        """A jump; backward ones let the scheduler notice endless loops."""
        label = self.label(name)
        return f"{{ T.tick({at}); goto {label}; }}" if label in self._emitted else f"goto {label};"

    def targets(self, name: str) -> list[str]:
        return self._targets[name]

    # ---- statements
    def _statement(self, text: str, line: int) -> None:
        self._line = line
        if text.startswith("."):
            self._directive(text)
            return
        guard = None
        if m := re.match(r"@(!?)\s*([%\w$]+)\s+(.*)$", text, re.S):
            register = self.register(m.group(2))
            if not register:
                raise TranslationError(f"guard {m.group(2)}")
            guard = m.group(1) + register[0]
            text = m.group(3)
        m = re.match(r"([a-z_][\w.:]*)\s*(.*)$", text, re.S)
        if not m:
            raise TranslationError("statement")
        code = self._instruction(m.group(1), m.group(2).strip())
        lines = [code] if isinstance(code, str) else code
        joined = " ".join(lines)
        if guard:
            self._code.append(f"if ({guard}) {{ {joined} }}")
        else:
            self._code.append(joined if len(lines) == 1 else "{ " + joined + " }")

    def _instruction(self, opcode: str, rest: str) -> str | list[str]:
        parts = opcode.split(".")
        # "shared::cta" stays one part: split at single dots only.
        if parts[0] not in HANDLERS:
            raise TranslationError(f"unknown instruction {opcode}")
        handler, allowed = HANDLERS[parts[0]]
        if allowed is not None:
            for p in parts[1:]:
                if p not in allowed and p not in SIZES and p != "pred":
                    raise TranslationError(f"unknown qualifier .{p} of {opcode}")
        at = self.sites.add(self._line)
        return handler(self, Instruction(opcode, parts, split_operands(rest), at))

    def _directive(self, text: str) -> None:
        scope = self._scopes[-1]
        if re.match(r"\.loc\s", text):
            self.sites.location(text)
        elif m := re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text, re.S):
            suffix = f"_s{scope['id']}" if scope["id"] else ""
            for r in split_operands(m.group(2)):
                if k := re.match(r"(%?[\w$]+)<(\d+)>", r):
                    name = "r_" + c_name(k.group(1)) + suffix + "_"
                    scope["ranges"][k.group(1)] = (name, m.group(1), int(k.group(2)))
                else:
                    scope["registers"][r] = self._declare(
                        "r_" + c_name(r) + suffix + "_", m.group(1)
                    )
        elif m := re.match(
            r"\.(local|param)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(\[(\d+)\])?$", text
        ):
            size = SIZES[m.group(3)] * int(m.group(6) or 1)
            name = f"d_{c_name(m.group(4))}_{scope['id']}"
            self._declarations.append(f"alignas(16) uint8_t {name}[{max(size, 1)}] = {{0}};")
            scope["locals"][m.group(4)] = name
        elif not re.match(r"\.(pragma|file|callprototype|branchtargets|shared)\b", text):
            raise TranslationError("directive")

    def _declare(self, name: str, type_: str) -> tuple[str, str]:
        c_type = "bool" if type_ == "pred" else STORAGE_TYPES[SIZES[type_]]
        self._declarations.append(f"{c_type} {name} = 0;")
        return name, type_

    # ---- operands
    def register(self, name: str) -> tuple[str, str] | None:
        """C++ name and PTX type of a register."""
        for s in reversed(self._scopes):
            if name in s["registers"]:
                known: tuple[str, str] = s["registers"][name]
                return known
        m = re.fullmatch(r"(%?[A-Za-z_$]+)(\d+)", name)
        if not m:
            return None
        for s in reversed(self._scopes):
            entry = s["ranges"].get(m.group(1))
            if entry and int(m.group(2)) < entry[2]:
                declared = self._declare(entry[0] + m.group(2), entry[1])
                s["registers"][name] = declared
                return declared
        return None

    def symbol(self, name: str) -> str | None:
        """Address of a variable or parameter, as an integer expression."""
        for s in reversed(self._scopes):
            if name in s["locals"]:
                return f"(uint64_t){s['locals'][name]}"
        if name in self._params:
            return f"(uint64_t){self._params[name]}"
        if name in self.module.globals:
            self.globals_used.add(name)
            return f"(uint64_t){global_name(self.prefix, name)}"
        if name in self.module.shared or any(v.name == name for v in self.f.shared):
            return f"(T.smem_tag|s_{c_name(name)})"
        return None

    def value(self, op: str, type_: str) -> str:
        """An operand as a C++ expression of the value type of `type_`."""
        op = op.strip()
        negated = op.startswith("!")
        if negated:
            op = op[1:]
        e = self._plain_value(op, type_)
        if negated:
            return f"(!{e})" if type_ == "pred" else f"(~{e})"
        return e

    def _plain_value(self, op: str, type_: str) -> str:
        c_type = VALUE_TYPES[type_]
        if r := self.register(op):
            name, held = r
            if type_ == "pred":
                return name
            if type_ == "f32":
                return f"f({name})"
            if type_ == "f64":
                return f"dd({name})"
            if held != "pred" and c_type == STORAGE_TYPES[SIZES[held]]:
                return name
            return f"({c_type})({name})"
        if op in SPECIAL_REGISTERS:
            return f"({c_type})({SPECIAL_REGISTERS[op]})"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", op):
            return f"f(0x{op[2:]}u)" if type_ == "f32" else f"({c_type})0x{op[2:]}u"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", op):
            return f"dd(0x{op[2:]}ull)" if type_ == "f64" else f"({c_type})0x{op[2:]}ull"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", op):
            number = int(op.rstrip("U"), 0)
            if type_ == "pred":
                return "true" if number else "false"
            if type_ in FLOATS:
                raise TranslationError(f"integer immediate {op} for {type_}")
            return f"({c_type})({number}{'ll' if number < 2**63 else 'ull'})"
        if s := self.symbol(op):
            return f"({c_type})({s})"
        raise TranslationError(f"operand {op!r} as {type_}")

    def put(self, dst: str, expression: str, type_: str) -> str:
        """Assignment to a register of an expression of value type `type_`."""
        if dst == "_":
            return f"(void)({expression});"
        r = self.register(dst)
        if not r:
            raise TranslationError(f"destination {dst!r}")
        name, held = r
        if type_ == "pred" or held == "pred":
            return f"{name} = {expression};"
        if type_ == "f32":
            return f"{name} = b({expression});"
        if type_ == "f64":
            return f"{name} = bd({expression});"
        return f"{name} = ({STORAGE_TYPES[SIZES[held]]})({expression});"

    @staticmethod
    def vector(op: str) -> list[str]:
        op = op.strip()
        return split_operands(op[1:-1]) if op.startswith("{") else [op]

    @staticmethod
    def _split_address(op: str) -> tuple[str, int]:
        m = re.fullmatch(r"\[\s*([^\]+]+?)\s*(?:\+\s*(-?\w+))?\s*\]", op)
        if not m:
            raise TranslationError(f"address {op!r}")
        return m.group(1), int(m.group(2) or "0", 0)

    def address(self, op: str, bits: int = 64) -> str:
        base, offset = self._split_address(op)
        e = self.value(base, "u64" if bits == 64 else "u32")
        return f"({e}+({offset}))" if offset else e

    def shared_address(self, op: str) -> str:
        """A 32-bit shared address, whatever the width of the register."""
        base, offset = self._split_address(op)
        r = self.register(base)
        wide = r is not None and SIZES[r[1]] == 8
        return f"(uint32_t)({self.value(base, 'u64' if wide else 'u32')}+({offset}))"

    def pointers(self, registers: list[str]) -> str:
        """Array of addresses of registers, for results that are written later."""
        out = []
        for name in registers:
            r = self.register(name) if name != "_" else ("", "")
            if not r:
                raise TranslationError(f"register {name!r}")
            out.append(f"(void*)&{r[0]}" if r[0] else "nullptr")
        return "std::initializer_list<void*>{" + ",".join(out) + "}.begin()"

    def values(self, ops: list[str], type_: str) -> str:
        c_type = VALUE_TYPES[type_]
        inner = ",".join(self.value(x, type_) for x in ops)
        return f"std::initializer_list<{c_type}>{{{inner}}}.begin()"


def function_name(f: PtxFunction) -> str:
    return ("kernel_" if f.entry else "device_") + c_name(f.name)


def global_name(prefix: str, name: str) -> str:
    return f"g_{c_name(prefix)}_{c_name(name)}"
