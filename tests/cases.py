"""What a call to attention can look like, as data, and the grids that the tests share.

An `AttentionCase` says how many query rows and keys each sequence has and which features are on;
`build` makes the tensors from it, the same on every device. Whatever a call must not look at
(rows past a length, gaps between packed sequences, padding on the left, unused pages) is NaN, and
unused entries of a page table are out of range.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def json_of(case: Any) -> str:
    """The fields of a case that differ from their defaults."""
    default = type(case)()
    return json.dumps({k: v for k, v in asdict(case).items() if v != getattr(default, k)})


@dataclass(frozen=True)
class AttentionCase:
    """One call.

    Attributes:
        rows: query rows of each sequence that count.
        keys: keys of each sequence that count.
        layout: dense, packed (cu_seqlens for q and k), cache (rows of a longer cache), paged, or
            packed_paged (packed queries, paged keys).
        slack: rows beyond those that count, for each sequence and, if packed, at the end.
        cache_rows: the sequences of a cache are found through cache_batch_idx.
        leftpad: keys start behind some padding.
        alibi: "", "head" or "batch" (a slope for each head, or each sequence and head).
        bias: "" or four letters of "bhqk" with "1" for a dimension that is repeated.
        spread: factor of q, to make the softmax peaked.
        strides: contiguous, sliced (views into longer tensors), head_major (heads before rows),
            or shared_heads (all heads of k and v are one, stride 0).
        wanted: bits of the gradients to ask for; None for all that exist.
        tiles: tiles of the CPU engine, small so that short sequences straddle them.
    """

    dtype: str = "bfloat16"
    rows: tuple[int, ...] = (64,)
    keys: tuple[int, ...] = (64,)
    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 0
    layout: str = "dense"
    slack: int = 0
    page_size: int = 16
    cache_rows: bool = False
    leftpad: bool = False
    window_left: int = -1
    window_right: int = -1
    chunk: int = 0
    top_left: bool = False
    scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""
    bias: str = ""
    bias_dtype: str = "float32"
    sink: bool = False
    dropout_p: float = 0.0
    qv: bool = False
    descale: bool = False
    num_splits: int = 0
    split_size: int = 0
    pack_gqa: int = -1
    strict: bool = False
    grads: bool = False
    dlse: bool = False
    wanted: int | None = None
    deterministic: bool = False
    strides: str = "contiguous"
    spread: float = 1.0
    seed: int = 0
    tiles: tuple[int, int] | None = (32, 48)

    def __str__(self) -> str:
        """Only what differs from the default, as a test id."""
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value == f.default or f.name in ("tiles", "seed"):
                continue
            if isinstance(value, tuple):
                value = "_".join(map(str, value))
            parts.append(f.name if value is True else f"{f.name}={value}")
        return "-".join(parts) or "default"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def dim_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def work(self) -> int:
        """Multiplications of q.k."""
        pairs = sum(a * b for a, b in zip(self.rows, self.keys, strict=True))
        return pairs * self.heads * self.head_dim

    @property
    def small(self) -> bool:
        """Short enough for an emulated kernel."""
        return self.work <= 1 << 22 and self.dtype in ("bfloat16", "float16")

    def to_json(self) -> str:
        return json_of(self)

    @staticmethod
    def from_json(text: str) -> AttentionCase:
        raw = json.loads(text)
        return AttentionCase(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()})


@dataclass
class Inputs:
    """The arguments of `fwd`, and the upstream gradients."""

    kw: dict[str, Any]
    dout: Tensor | None = None
    dlse: Tensor | None = None
    names: list[str] = field(default_factory=list)


class _Builder:
    def __init__(self, case: AttentionCase, device: str) -> None:
        self.case, self.device = case, torch.device(device)
        self.generator = torch.Generator().manual_seed(case.seed)
        self.batch = len(case.rows)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, factor: float = 1.0) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, dtype=torch.float64) * factor
        return x.to(dtype or self.case.torch_dtype).to(self.device)

    def statistic(self, *shape: int) -> Tensor:
        """Slopes, sinks: float32, and float64 beside float64."""
        wide = torch.float64 if self.case.dtype == "float64" else torch.float32
        return self.normal(*shape, dtype=wide)

    def ints(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of NaN, laid out as the case wants it."""
        dtype = dtype or self.case.torch_dtype
        strides = self.case.strides
        if strides == "head_major" and len(shape) >= 3:
            order = [*shape[:-3], shape[-2], shape[-3], shape[-1]]
            x = self._nan(order, dtype).transpose(-2, -3)
        elif strides == "sliced":
            x = self._nan([*shape[:-1], shape[-1] + 8], dtype)[..., : shape[-1]]
        else:
            x = self._nan(list(shape), dtype)
        return x

    def _nan(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        x = torch.full(shape, NAN, dtype=torch.float32).to(dtype)
        return x.to(self.device)

    # ---- queries and keys ---------------------------------------------------------------

    def offsets(self, counts: tuple[int, ...]) -> list[int]:
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count + self.case.slack)
        return starts

    def queries(self, dim: int, factor: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor like q; rows that do not count are NaN."""
        case = self.case
        if case.layout.startswith("packed"):
            starts = self.offsets(case.rows)
            x = self.empty(starts[-1] + case.slack, case.heads, dim, dtype=dtype)
            places = [x[starts[b] : starts[b] + n] for b, n in enumerate(case.rows)]
        else:
            longest = max(case.rows, default=0) + case.slack
            x = self.empty(self.batch, longest, case.heads, dim, dtype=dtype)
            places = [x[b, :n] for b, n in enumerate(case.rows)]
        for place in places:
            place.copy_(self.normal(*place.shape, factor=factor, dtype=dtype))
        return x

    def pads(self) -> list[int]:
        return [3 * b + 1 if self.case.leftpad else 0 for b in range(self.batch)]

    def fill_keys(self, x: Tensor, where: list[list[tuple[Any, ...]]]) -> Tensor:
        for places in where:
            for place in places:
                x[place] = self.normal(*x[place].shape)
        return x

    def keys(self, kw: dict[str, Any]) -> None:
        """Adds k and v, and what says where their sequences lie."""
        case, pads = self.case, self.pads()
        last = [pad + n for pad, n in zip(pads, case.keys, strict=True)]
        kv_heads = 1 if case.strides == "shared_heads" else case.heads_kv
        dims = (case.head_dim, case.dim_v)
        if case.layout == "packed":
            starts = self.offsets(tuple(last))
            kw["cu_seqlens_k"] = self.ints(starts)
            where = [
                [(slice(starts[b] + pads[b], starts[b] + last[b]),)] for b in range(self.batch)
            ]
            shape: tuple[int, ...] = (starts[-1] + case.slack,)
        elif case.layout.endswith("paged"):
            where, shape = self.pages(kw, last), kw.pop("_pages")
        else:
            longest = max(last, default=0) + case.slack
            slots = list(range(self.batch))
            if case.cache_rows:
                slots = [(2 * b + 1) % (self.batch * 2 + 1) for b in reversed(range(self.batch))]
                kw["cache_batch_idx"] = self.ints(slots)
            where = [[(slots[b], slice(pads[b], last[b]))] for b in range(self.batch)]
            shape = (self.batch * 2 + 1 if case.cache_rows else self.batch, longest)
        kw["k"], kw["v"] = (
            self.fill_keys(self.empty(*shape, kv_heads, dim), where) for dim in dims
        )
        if case.strides == "shared_heads":
            for name in ("k", "v"):
                kw[name] = kw[name].expand(*shape, case.heads_kv, -1)
        if case.leftpad:
            kw["leftpad_k"] = self.ints(pads)
        if case.leftpad or self.ragged(case.keys):
            kw["seqused_k"] = self.ints(last)

    def pages(self, kw: dict[str, Any], last: list[int]) -> list[list[tuple[Any, ...]]]:
        """Deals out shuffled pages; unused entries of the table are no pages at all."""
        size, pads = self.case.page_size, self.pads()
        needed = [-(-n // size) for n in last]
        total = sum(needed) + 2
        order = torch.randperm(total, generator=self.generator).tolist()
        table = torch.full((self.batch, max(needed, default=0) + 1), 1 << 29, dtype=torch.int32)
        where: list[list[tuple[Any, ...]]] = []
        for b, count in enumerate(needed):
            mine = [order.pop() for _ in range(count)]
            table[b, :count] = torch.tensor(mine, dtype=torch.int32)
            where.append(
                [
                    (page, slice(max(pads[b] - i * size, 0), max(0, min(size, last[b] - i * size))))
                    for i, page in enumerate(mine)
                ]
            )
        kw["block_table"] = table.to(self.device)
        kw["_pages"] = (total, size)
        return where

    def ragged(self, counts: tuple[int, ...]) -> bool:
        """Whether lengths must be given: always for caches, else where the shape does not say."""
        if self.case.layout in ("cache", "paged", "packed_paged"):
            return True
        if self.case.layout == "packed":
            return self.case.slack > 0
        return self.case.slack > 0 or len(set(counts)) > 1

    # ---- everything else ----------------------------------------------------------------

    def options(self, kw: dict[str, Any]) -> None:
        case = self.case
        names = {
            "window_left": case.window_left, "window_right": case.window_right,
            "attention_chunk": case.chunk, "top_left": case.top_left,
            "softmax_scale": case.scale, "softcap": case.softcap, "dropout_p": case.dropout_p,
            "num_splits": case.num_splits, "split_size": case.split_size,
            "pack_gqa": case.pack_gqa, "strict": case.strict,
        }  # fmt: skip
        kw.update(names)
        if case.alibi:
            shape = (self.batch, case.heads) if case.alibi == "batch" else (case.heads,)
            kw["alibi_slopes"] = self.statistic(*shape).abs() * 0.3
        if case.sink:
            kw["sink"] = self.statistic(case.heads) * 2.0
        if case.bias:
            full = (self.batch, case.heads, kw["q"].shape[1], self.bias_keys(kw))
            shape = tuple(
                1 if letter == "1" else n for letter, n in zip(case.bias, full, strict=True)
            )
            dtype = case.torch_dtype if case.bias_dtype == "same" else torch.float32
            kw["bias"] = self.normal(*shape, dtype=dtype)
        if case.dropout_p > 0.0:
            state = torch.tensor([0x1234567_89ABCDEF + case.seed, case.seed + 7])
            kw["rng_state"] = state.to(self.device)
        if case.descale:
            for name in ("q_descale", "k_descale", "v_descale"):
                scales = torch.rand(self.batch, case.heads_kv, generator=self.generator) + 0.5
                kw[name] = scales.to(self.device)

    @staticmethod
    def bias_keys(kw: dict[str, Any]) -> int:
        if "block_table" in kw:
            return int(kw["block_table"].shape[1] * kw["k"].shape[1])
        return int(kw["k"].shape[1])


def build(case: AttentionCase, device: str = "cpu") -> Inputs:
    """Makes the tensors of a case."""
    make = _Builder(case, device)
    kw: dict[str, Any] = {"q": make.queries(case.head_dim, factor=case.spread)}
    if case.layout.startswith("packed"):
        kw["cu_seqlens_q"] = make.ints(make.offsets(case.rows))
        if case.slack:
            kw["seqused_q"] = make.ints(case.rows)
    elif case.slack or len(set(case.rows)) > 1:
        kw["seqused_q"] = make.ints(case.rows)
    make.keys(kw)
    if case.qv:
        kw["qv"] = make.queries(case.dim_v)
    make.options(kw)
    inputs = Inputs(kw)
    if case.grads:
        inputs.dout = make.queries(case.dim_v)
        if case.dlse:
            wide = torch.float64 if case.dtype == "float64" else torch.float32
            dlse = make.queries(1, dtype=wide)[..., 0]
            inputs.dlse = dlse.transpose(-1, -2).contiguous()
    return inputs


def grid(base: AttentionCase | None = None, **axes: Iterable[Any]) -> list[AttentionCase]:
    """Every combination of the given values; `rows__keys` sets two fields at once."""
    base = base or AttentionCase()
    cases = []
    for i, values in enumerate(product(*axes.values())):
        changes: dict[str, Any] = {"seed": i}
        for names, value in zip(axes, values, strict=True):
            split = names.split("__")
            changes.update(zip(split, value, strict=True) if len(split) > 1 else {names: value})
        cases.append(replace(base, **changes))
    return cases


def each(cases: Iterable[AttentionCase], **changes: Any) -> Iterator[AttentionCase]:
    """The same cases with some fields changed."""
    return (replace(case, **changes) for case in cases)
