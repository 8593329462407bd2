"""What is measured: `Case`, one shape with its options, and the suites of suites.toml."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SUITES_FILE = Path(__file__).with_name("suites.toml")
KINDS = ("dense", "varlen", "decode")
PASSES = ("fwd", "bwd", "fwd+bwd")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Case:
    """One attention shape with its options. Lengths are in tokens, window ends inclusive."""

    suite: str
    batch: int
    seqlen_q: int  # varlen: of the longest sequence
    seqlen_kv: int  # decode: rows that the cache has room for
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    name: str = ""  # "Llama 3 8B"
    kind: str = "dense"
    dtype: str = "bfloat16"
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    deterministic: bool = False
    lengths: tuple[int, ...] = ()  # varlen: the sequences; decode: filled rows, empty: all
    page_size: int = 0  # decode: rows of a page, 0: a dense cache
    passes: tuple[str, ...] = ("fwd",)
    grad: bool = False  # forward as in training: what backward needs is written too
    timer: str = "events"
    threads: int = 0  # CPU only; 0: torch's own choice

    def __post_init__(self) -> None:
        """Refuses what no backend could mean."""
        sequences, heads = len(self.lengths), (self.heads, self.kv_heads)
        checks = {
            f"kind must be one of {KINDS}, got {self.kind!r}": self.kind in KINDS,
            f"passes must be among {PASSES}, got {self.passes}": set(self.passes) <= set(PASSES),
            f"unknown dtype {self.dtype!r}, not in {list(DTYPE_BYTES)}": self.dtype in DTYPE_BYTES,
            f"heads must be a multiple of kv_heads, got {heads}": heads[0] % heads[1] == 0,
            f"timer must be events or graph, got {self.timer!r}": self.timer in ("events", "graph"),
            f"varlen needs a length a sequence, got {sequences} for batch {self.batch}": (
                self.kind != "varlen" or sequences == self.batch
            ),
            f"cache lengths must be 1 to {self.seqlen_kv}, got {self.lengths}": (
                self.kind != "decode" or all(0 < n <= self.seqlen_kv for n in self.lengths)
            ),
            "decode is forward only": self.kind != "decode" or self.passes == ("fwd",),
        }
        for text, holds in checks.items():
            if not holds:
                raise ValueError(f"suite {self.suite!r}: {text}")

    @property
    def needs_backward(self) -> bool:
        """Whether any pass computes gradients."""
        return any("bwd" in name for name in self.passes)

    @property
    def has_window(self) -> bool:
        """Whether a window other than causal limits the keys."""
        return self.window_left >= 0 or (self.window_right >= 0 and not self.causal)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(queries, keys) of every sequence of the batch."""
        if self.kind == "varlen":
            return [(n, n) for n in self.lengths]
        if self.kind == "decode":
            return [(self.seqlen_q, n) for n in self.lengths or (self.seqlen_kv,) * self.batch]
        return [(self.seqlen_q, self.seqlen_kv)] * self.batch

    @property
    def label(self) -> str:
        """A short text for tables, without the suite."""
        length = short(self.seqlen_q)
        if self.seqlen_q != self.seqlen_kv:
            length += f"x{short(self.seqlen_kv)}"
        parts = [self.name, f"b{self.batch}", length, f"h{self.heads}"]
        if self.kv_heads != self.heads:
            parts[-1] += f"/{self.kv_heads}"
        parts.append(f"d{self.head_dim}")
        if self.head_dim_v != self.head_dim:
            parts[-1] += f"/{self.head_dim_v}"
        parts.append("causal" if self.causal else "full")
        if self.has_window:
            parts.append(f"w{self.window_left},{0 if self.causal else self.window_right}")
        options = {
            f"cap{self.softcap:g}": self.softcap,
            "det": self.deterministic,
            "packed": self.kind == "varlen",
            "uneven": self.kind == "decode" and self.lengths,
            f"page{self.page_size}": self.page_size,
            self.dtype: self.dtype != "bfloat16",
            f"{self.threads} thread{'s' if self.threads > 1 else ''}": self.threads,
        }
        return " ".join([p for p in parts if p] + [text for text, on in options.items() if on])

    @property
    def key(self) -> str:
        """Names the case across runs: equal keys are the same work."""
        lengths = f" n{sum(self.lengths)}" if self.lengths else ""
        return f"{self.suite}: {self.label}{lengths}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def short(n: int) -> str:
    """4096 -> 4k."""
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


@dataclass(frozen=True)
class Suite:
    """A named list of cases."""

    name: str
    description: str
    device: str  # "cuda" or "cpu"
    backends: tuple[str, ...]
    cases: tuple[Case, ...]


def load_toml(path: Path) -> dict[str, Any]:
    """Reads TOML. Python 3.10 has no reader of its own, but pip carries one."""
    for module in ("tomllib", "tomli", "pip._vendor.tomli"):
        try:
            loads = importlib.import_module(module).loads
        except ImportError:
            continue
        return dict(loads(path.read_text()))
    raise SystemExit("Python 3.10 needs a TOML reader here: pip install tomli")


# Keys of a grid that stand for several fields of Case.
SHORTHANDS = {"seqlen", "tokens", "width", "group"}
CASE_FIELDS = {f.name for f in fields(Case)} - {"suite"}


def expand(suite: str, grid: dict[str, Any]) -> Iterator[Case]:
    """The cases of one grid: every combination of the values that are lists."""
    unknown = set(grid) - CASE_FIELDS - SHORTHANDS
    if unknown:
        raise ValueError(f"suite {suite!r}: unknown keys {sorted(unknown)}")
    axes: dict[str, list[Any]] = {}
    for key, value in grid.items():
        is_axis = isinstance(value, list) and key != "passes"
        if key == "lengths" and value and not isinstance(value[0], list):
            is_axis = False  # one list of lengths is one value
        axes[key] = value if is_axis else [value]
    for values in itertools.product(*axes.values()):
        yield make_case(suite, dict(zip(axes, values, strict=True)))


def make_case(suite: str, values: dict[str, Any]) -> Case:
    """Fills in what a grid leaves to be derived."""
    v = dict(values)
    for key in ("lengths", "passes"):
        if key in v:
            v[key] = tuple(v[key])
    seqlen, tokens = v.pop("seqlen", None), v.pop("tokens", None)
    width, group = v.pop("width", None), v.pop("group", None)
    if v.get("kind") == "varlen":
        v.setdefault("batch", len(v["lengths"]))
        seqlen = max(v["lengths"])
    if seqlen is not None:
        v.setdefault("seqlen_q", seqlen)
        v.setdefault("seqlen_kv", seqlen)
    if tokens is not None:
        v.setdefault("batch", max(1, tokens // v["seqlen_q"]))
    if width is not None:
        v.setdefault("heads", width // v["head_dim"])
    v.setdefault("kv_heads", v["heads"] // (group or 1))
    v.setdefault("head_dim_v", v["head_dim"])
    try:
        return Case(suite=suite, **v)
    except TypeError as error:
        raise ValueError(f"suite {suite!r}: {error}") from None


def load_suites(path: Path = SUITES_FILE) -> dict[str, Suite]:
    """Every suite of the file, by name."""
    suites = {}
    for name, table in load_toml(path).items():
        table = dict(table)
        grids = table.pop("grid")
        description = table.pop("description")
        device = table.pop("device", "cuda")
        backends = tuple(table.pop("backends"))
        cases = [case for grid in grids for case in expand(name, table | grid)]
        keys = [case.key for case in cases]
        doubled = {key for key in keys if keys.count(key) > 1}
        if doubled:
            raise ValueError(f"suite {name!r}: cases that cannot be told apart: {sorted(doubled)}")
        suites[name] = Suite(name, description, device, backends, tuple(cases))
    return suites
