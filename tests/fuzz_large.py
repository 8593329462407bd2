"""Large dense calls for fuzz.py: half a tile for every multiprocessor up to eight.

Which kernel serves a call depends on how its tiles fill the device, so small calls reach few of
them. Here a few sequences of random numbers are repeated over batch and heads, at random, so that
the oracle solves each pair of them once and every output is still compared. Whatever lies between
the rows of a tensor is NaN. The forward gives the same bits again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

import flash_cuda

from . import oracle, test_leaps
from .cases import DTYPES, AttentionCase, Inputs, json_of
from .check import HALF_ULP, Backend, assert_near, largest, lse_floor

Choose = Callable[[Sequence[Any]], Any]

HEAD_DIMS = (
    (64, 64), (64, 64), (72, 72), (96, 96), (96, 96), (104, 104), (128, 128), (128, 128),
    (128, 128), (128, 64), (192, 192), (192, 128), (200, 200), (256, 256),
)  # fmt: skip
TILES = (0.5, 0.9, 1.0, 1.1, 1.4, 1.6, 2.0, 2.3, 2.5, 3.0, 3.4, 4.2, 5.0, 6.5, 8.0)
OFF = (0, 0, 0, 1, -1, 63, -63, 64, -64, 65, -65)
QUERIES, KEYS = 2, 3  # sequences of random numbers
SINKS = (0.5, -3.0)  # of a head with each sequence of queries
MOST_SCORES = 1 << 24  # of the oracle's at a time


@dataclass(frozen=True)
class LargeCase:
    """One call.

    Attributes:
        group: query heads of each KV head.
        strides: contiguous; head_major (heads before rows); row_major (rows before the batch);
            sliced (views into longer tensors); fused (q, k and v are slices of one tensor).
        spread: factor of q, to make the softmax peaked.
        step: log2 units that the logits gain every 64 keys (see test_leaps); 0 for random ones.
    """

    dtype: str = "bfloat16"
    batch: int = 1
    rows: int = 64
    keys: int = 64
    heads_kv: int = 1
    group: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    window_left: int = -1
    window_right: int = -1
    top_left: bool = False
    scale: float | None = None
    strict: bool = False
    sink: bool = False
    strides: str = "contiguous"
    spread: float = 1.0
    step: float = 0.0
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    def to_json(self) -> str:
        return json_of(self)

    @staticmethod
    def from_json(text: str) -> LargeCase:
        return LargeCase(**json.loads(text))


def near_an_edge(choose: Choose, most: int) -> int:
    """A length around a multiple of what tiles and blocks may have."""
    unit = choose((64, 128, 192, 256))
    return min(max(unit * choose(range(most // unit + 1)) + choose(OFF), 1), most)


def _window(choose: Choose, keys: int) -> tuple[int, int]:
    width = choose((0, 1, 63, 64, 100, 128, 500, 1023, 1024, keys - 1, keys, 2 * keys))
    other = choose((-1, 0, 0, 5, 64, 300, 3 * keys))
    return choose(((-1, -1), (-1, -1), (-1, 0), (-1, 0), (width, 0), (width, other), (-1, width)))


def draw_large(
    choose: Choose, dtypes: Sequence[str], sms: int, small: bool, seed: int
) -> LargeCase:
    """Draws a case for a device of `sms` multiprocessors; `small` as emulated kernels can bear."""
    head_dim, head_dim_v = choose(HEAD_DIMS)
    rows = near_an_edge(choose, choose((130, 400) if small else (70, 600, 1100, 2200, 4400)))
    keys = near_an_edge(
        choose, choose((130, 400, 1300) if small else (300, 1100, 2400, 4400, 9000))
    )
    if choose((False, False, True)):
        keys = rows
    block_q = 256 if head_dim <= 64 else 192 if head_dim <= 128 else 128
    wanted = min(choose(TILES), 3.0 if small else 8.0) * sms / -(-rows // block_q)
    group = choose((1, 1, 2, 3, 4, 5, 8))
    heads_kv = choose((1, 2, 3, 4, 5, 8, max(round(wanted / group), 1)))
    batch = max(round(wanted / (group * heads_kv)), 1)
    # Not more than 256 MB each of K and V.
    keys = max(min(keys, (1 << 27) // (batch * heads_kv * head_dim)), 1)
    window_left, window_right = _window(choose, keys)
    step = choose((0.0, 0.0, 0.0, 0.0, 14.0, 40.0, 90.0, 200.0))
    return LargeCase(
        dtype=choose(dtypes),
        batch=batch,
        rows=rows,
        keys=keys,
        heads_kv=heads_kv,
        group=group,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        window_left=window_left,
        window_right=window_right,
        top_left=choose((False, False, False, True)),
        scale=choose((None, None, None, 0.3)) if step == 0.0 else None,
        strict=choose((False, False, False, True)),
        sink=choose((False, False, True)),
        strides=choose(("contiguous", "contiguous", "head_major", "row_major", "sliced", "fused")),
        spread=choose((1.0, 1.0, 0.1, 8.0, 20.0)) if step == 0.0 else 1.0,
        step=step,
        seed=seed,
    )


@dataclass
class Sequences:
    """What is repeated, (how many, rows, dim), and which of it each head has."""

    q: Tensor
    k: Tensor
    v: Tensor
    query_of: Tensor  # (batch, heads)
    keys_of: Tensor  # (batch, heads_kv)
    sink: Tensor | None  # (heads,)


def make_sequences(case: LargeCase, device: str) -> Sequences:
    generator = torch.Generator(device).manual_seed(case.seed)
    dtype = DTYPES[case.dtype]

    def normal(count: int, rows: int, dim: int, factor: float = 1.0) -> Tensor:
        x = torch.randn(count, rows, dim, generator=generator, device=device, dtype=torch.float32)
        return (x * factor).to(dtype)

    def which(count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=generator, device=device)

    q = normal(QUERIES, case.rows, case.head_dim, case.spread)
    k, v = (normal(KEYS, case.keys, dim) for dim in (case.head_dim, case.head_dim_v))
    if case.step:
        # The first sequence of queries leaps in all rows, the other in about half of them or none.
        sign = torch.ones(QUERIES, case.rows, device=device)
        sign[1] = 2.0 * which(2, case.rows) - 1.0 if case.seed % 2 else 0.0
        q[:, :, 0] = (8.0 * sign).to(dtype)
        key = torch.arange(case.keys, device=device)
        block = key // 64
        units = case.step * (1.0 + block[-1] - block)
        units = torch.where(key % 64 == block * 29 % 64, units, 0.0)
        k[:, :, 0] = (units * case.head_dim**0.5 / (8.0 * test_leaps.LOG2E)).to(dtype)
    # A sink is a value a head: heads have the same sequence of queries in every batch then.
    query_of = which(QUERIES, case.batch, case.heads)
    sink = None
    if case.sink:
        query_of = query_of[:1].expand(case.batch, -1)
        sink = torch.tensor(SINKS, device=device)[query_of[0]]
    return Sequences(q, k, v, query_of, which(KEYS, case.batch, case.heads_kv), sink)


def _empty(case: LargeCase, rows: int, heads: int, dim: int, like: Tensor) -> Tensor:
    """NaN of (batch, rows, heads, dim), with the case's strides."""
    batch = case.batch

    def nan(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)

    if case.strides == "head_major":
        return nan(batch, heads, rows, dim).transpose(1, 2)
    if case.strides == "row_major":
        return nan(rows, batch, heads, dim).transpose(0, 1)
    if case.strides == "sliced":
        return nan(batch, rows + 3, heads + 1, dim + 8)[:, 2:-1, 1:, :dim]
    return nan(batch, rows, heads, dim)


def lay_out(case: LargeCase, s: Sequences) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the call."""
    shapes = (
        (case.rows, case.heads, case.head_dim),
        (case.keys, case.heads_kv, case.head_dim),
        (case.keys, case.heads_kv, case.head_dim_v),
    )
    if case.strides == "fused":
        longest, heads = max(case.rows, case.keys), [shape[1] for shape in shapes]
        whole = s.q.new_full((case.batch, longest, sum(heads), case.head_dim), torch.nan)
        places = [
            part[:, : shape[0], :, : shape[2]]
            for part, shape in zip(whole.split(heads, 2), shapes, strict=True)
        ]
    else:
        places = [_empty(case, *shape, s.q) for shape in shapes]
    for place, x, of in zip(
        places, (s.q, s.k, s.v), (s.query_of, s.keys_of, s.keys_of), strict=True
    ):
        for b in range(case.batch):
            place[b].copy_(x[of[b]].transpose(0, 1))
    return places[0], places[1], places[2]


def options(case: LargeCase, sink: Tensor | None) -> dict[str, Any]:
    """Arguments of the op beside q, k and v."""
    return {
        "softmax_scale": case.scale,
        "window_left": case.window_left,
        "window_right": case.window_right,
        "top_left": case.top_left,
        "strict": case.strict,
        "sink": sink,
    }


def solve(
    case: LargeCase, s: Sequences, query: int, keys: int, precision: oracle.Precision
) -> dict[str, Tensor]:
    """Out (rows, dim) and lse (rows,) of one pair of sequences, some rows at a time."""
    q, k, v = (x[:, None].to(precision.compute) for x in (s.q[query], s.k[keys], s.v[keys]))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    sink = q.new_tensor([SINKS[query]]) if case.sink else None
    seen = oracle.visible(
        case.rows, case.keys, case.window_left, case.window_right, 0, case.top_left, q.device
    )
    outs, lses = [], []
    step = max(MOST_SCORES // case.keys, 1)
    for part, mask in zip(q.split(step), seen.split(step), strict=True):
        one = oracle.sequence(part, k, v, seen=mask, scale=scale, sink=sink, precision=precision)
        outs.append(one["out"][:, 0])
        lses.append(one["lse"][0])
    return {"out": torch.cat(outs), "lse": torch.cat(lses)}


def compare(case: LargeCase, backend: Backend, s: Sequences, out: Tensor, lse: Tensor) -> None:
    """Compares every head with its pair of sequences."""
    dtype = DTYPES[case.dtype]
    keys_of = s.keys_of.repeat_interleave(case.group, 1)
    for query, keys in product(range(QUERIES), range(KEYS)):
        mine = (s.query_of == query) & (keys_of == keys)
        if not mine.any():
            continue
        want = solve(case, s, query, keys, oracle.EXACT)
        got = {"out": out.transpose(1, 2)[mine], "lse": lse[mine]}
        empty = (want["out"] == 0.0).all(-1)
        assert not got["out"][:, empty].any(), "out is not exactly 0 in rows without keys"
        if case.step:
            rows = want["lse"] > -torch.inf
            assert (got["lse"][:, ~rows] == -torch.inf).all(), "lse of rows without keys"
            test_leaps.check([x[:, rows] for x in got.values()], [x[rows] for x in want.values()])
            continue
        near = solve(case, s, query, keys, oracle.Precision(torch.float32, dtype))
        lse_case = AttentionCase(dtype=case.dtype, head_dim=case.head_dim, scale=case.scale)
        floors = {
            "out": HALF_ULP[dtype],
            "lse": lse_floor(lse_case, backend, Inputs({"q": s.q, "k": s.k}), want["lse"]),
        }
        # Where one key is all that a row sees, P is exactly 1 in the yardstick; in a kernel it may
        # be rounded at another scale (docs/numerics.md). Few rows may all be such.
        chances = {"out": HALF_ULP[dtype] * largest(want["out"]), "lse": 0.0}
        for name, x in got.items():
            right, yardstick = want[name].expand_as(x), near[name].expand_as(x)
            assert_near(name, x, right, yardstick, floors[name], chance=chances[name])


def check_large(case: LargeCase, backend: Backend) -> str:
    """Runs a case twice and compares everything.

    Returns:
        Which kernel served it.

    Raises:
        Unsupported: the backend has no kernel for it.
        AssertionError: a result is wrong.
    """
    s = make_sequences(case, backend.device)
    tensors = lay_out(case, s)
    call = options(case, s.sink)
    out, lse = backend.call(AttentionCase(), "fwd", *tensors, **call)
    assert not out.isnan().any(), f"out has {int(out.isnan().sum())} NaN"
    assert not lse.isnan().any(), f"lse has {int(lse.isnan().sum())} NaN"
    again = backend.call(AttentionCase(), "fwd", *tensors, **call)
    compare(case, backend, s, out, lse)
    for name, first, second in zip(("out", "lse"), (out, lse), again, strict=True):
        assert torch.equal(first, second), f"{name} has other bits in the second run"
    return served_by(case, backend, tensors, s.sink)


def served_by(
    case: LargeCase, backend: Backend, tensors: tuple[Tensor, ...], sink: Tensor | None
) -> str:
    """The kernel and its tile, as explain() has them."""
    if backend.name != "cuda":
        return backend.name
    answer = flash_cuda.explain(
        *tensors, window=(case.window_left, case.window_right), top_left=case.top_left,
        softmax_scale=case.scale, strict=case.strict, sink=sink,
    )  # fmt: skip
    mask = "full" if case.window_left == case.window_right == -1 else "diagonal"
    shares = ", shares" if answer.workspace_bytes else ""
    return f"{str(answer).splitlines()[0]}{shares}, {mask}"
