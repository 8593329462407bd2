"""What conditional rescaling and polynomial exponentials do to results and to training.

    python -m bench.numerics_study                    # errors: a minute or two on a CPU
    python -m bench.numerics_study --train            # loss curves of examples/train_gpt.py as well

Runs the CPU engine, which has the switches of the GPU kernels (`EngineOptions`), against float64
attention on the same inputs. docs/numerics.md has the results.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor

from flash_cuda import attention
from flash_cuda.reference import EngineOptions, use_options

STRICT = EngineOptions(block_kv=128, round_p=True)
HEAD_DIM = 64
LOG2_E = math.log2(math.e)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Variant:
    """One setting of the shortcuts."""

    name: str
    options: EngineOptions

    @staticmethod
    def all(dtype: str) -> list[Variant]:
        """Strict first; float16 has room for P up to 2^15, so its largest threshold is 14."""
        largest = 14.0 if dtype == "float16" else 16.0
        variants = [Variant("strict", STRICT)]
        for threshold in (4.0, 8.0, largest):
            options = replace(STRICT, rescale_threshold=threshold)
            variants.append(Variant(f"threshold {threshold:.0f}", options))
        for degree in (2, 3, 4):
            for share in (0.25, 0.5, 1.0):
                options = replace(STRICT, exp_share=share, exp_degree=degree)
                variants.append(Variant(f"degree {degree}, share {share}", options))
        degree = 4 if dtype == "float16" else 3
        for share in (0.1875, 0.375):
            options = replace(STRICT, rescale_threshold=8.0, exp_share=share, exp_degree=degree)
            variants.append(Variant(f"threshold 8, degree {degree}, share {share}", options))
        return variants


@dataclass
class Case:
    """q, k, v, dout: (1, rows or keys, heads, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool


def _case(rows: int, keys: int, heads: int, causal: bool, q_factor: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(rows + keys)

    def normal(length: int) -> Tensor:
        return torch.randn(1, length, heads, HEAD_DIM, generator=generator, dtype=torch.float64)

    return Case(normal(rows) * q_factor, normal(keys), normal(keys), normal(rows), causal)


def random_case() -> Case:
    """Scores of standard deviation 1: a flat softmax."""
    return _case(512, 512, 4, causal=True)


def peaked_case() -> Case:
    """Scores of standard deviation 16: a row is one or two keys."""
    return _case(512, 512, 4, causal=True, q_factor=16.0)


def long_case() -> Case:
    """A few rows over 32768 keys."""
    return _case(64, 32768, 1, causal=False)


def staircase_case() -> Case:
    """Maxima that climb by a little less than 8 powers of two, once, and stay.

    The first tile's reference then serves the whole row, and nearly all of the sum comes from P
    near 2^8, the largest that a threshold of 8 allows.
    """
    case = _case(256, 1024, 2, causal=False, q_factor=0.1)
    step = 7.9 / LOG2_E * HEAD_DIM**0.5
    case.q[..., 0] = 1.0
    case.k[..., 0] = 0.0
    case.k[:, 128:, :, 0] = step
    return case


def ramp_case() -> Case:
    """Maxima that climb with every tile: by 3 powers of two, so a stale reference keeps aging."""
    case = _case(256, 1024, 2, causal=False, q_factor=0.1)
    case.q[..., 0] = 1.0
    tiles = torch.arange(1024, dtype=torch.float64) // 128
    case.k[..., 0] = (3.0 / LOG2_E * HEAD_DIM**0.5 * tiles)[:, None]
    return case


def cancelling_case() -> Case:
    """Pairs of equal keys whose values nearly cancel: the output is a twentieth of its terms."""
    case = _case(256, 1024, 2, causal=False)
    case.v[:, 1::2] = 0.05 * case.v[:, 1::2] - case.v[:, ::2]
    case.k[:, 1::2] = case.k[:, ::2]
    return case


CASES: dict[str, Callable[[], Case]] = {
    "random": random_case,
    "peaked": peaked_case,
    "long": long_case,
    "staircase": staircase_case,
    "ramp": ramp_case,
    "cancelling": cancelling_case,
}


def exact(case: Case) -> list[Tensor]:
    """out, lse, dq, dk, dv in float64, from the formulas."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
    if case.causal:
        rows, keys = s.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
        s = s.masked_fill(hidden, -math.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)
    gradients = torch.autograd.grad(out, (q, k, v), case.dout)
    return [out.detach(), s.logsumexp(-1).detach(), *gradients]


def engine(case: Case, options: EngineOptions, dtype: torch.dtype) -> list[Tensor]:
    """The same by the engine in `dtype`, as float64."""
    q, k, v = (x.to(dtype).requires_grad_() for x in (case.q, case.k, case.v))
    with use_options(options):
        out, lse = attention(q, k, v, causal=case.causal, return_lse=True)
        gradients = torch.autograd.grad(out, (q, k, v), case.dout.to(dtype))
    return [x.detach().double() for x in (out, lse, *gradients)]


def errors(found: list[Tensor], right: list[Tensor]) -> dict[str, float]:
    """Root mean square errors relative to that of the right value; for lse the largest one."""
    names = ("out", "lse", "dq", "dk", "dv")
    result = {}
    for name, x, y in zip(names, found, right, strict=True):
        difference = x - y
        if name == "lse":
            result[name] = difference.abs().max().item()
        else:
            result[name] = (difference.square().mean() / y.square().mean()).sqrt().item()
    return result


@dataclass
class Row:
    """Errors of one variant on one input."""

    case: str
    dtype: str
    variant: str
    errors: dict[str, float]


def study(dtypes: list[str], cases: list[str]) -> Iterator[Row]:
    """Yields the errors of every variant, strict first for each input."""
    for dtype in dtypes:
        for name in cases:
            case = CASES[name]()
            # What the inputs lose by rounding is not the kernels' doing.
            for field in ("q", "k", "v", "dout"):
                setattr(case, field, getattr(case, field).to(DTYPES[dtype]).double())
            right = exact(case)
            for variant in Variant.all(dtype):
                found = engine(case, variant.options, DTYPES[dtype])
                yield Row(name, dtype, variant.name, errors(found, right))


def print_rows(rows: Iterator[Row]) -> list[Row]:
    """A Markdown table for each input: strict's errors, the others relative to them (not lse)."""
    kept: list[Row] = []
    strict: dict[str, float] = {}
    for row in rows:
        kept.append(row)
        if row.variant == "strict":
            strict = row.errors
            print(f"\n{row.case}, {row.dtype}\n\n| | {' | '.join(strict)} |")
            print("|---|" + "---|" * len(strict))
            cells = [f"{e:.2e}" for e in strict.values()]
        else:
            cells = [
                f"{e:.2e}" if name == "lse" else f"x {e / strict[name]:.3f}"
                for name, e in row.errors.items()
            ]
        print(f"| {row.variant} | {' | '.join(cells)} |", flush=True)
    return kept


# ---- training --------------------------------------------------------------------------------

TRAINED = {
    "strict": STRICT,
    "strict, other seed": STRICT,
    **{f"threshold {x}": replace(STRICT, rescale_threshold=float(x)) for x in (4, 8, 16)},
    **{
        f"degree {degree}, share {share}": replace(STRICT, exp_share=share, exp_degree=degree)
        for degree in (2, 3, 4)
        for share in (0.25, 0.5, 1.0)
    },
    "threshold 8, degree 3, share 0.1875": replace(STRICT, rescale_threshold=8.0, exp_share=0.1875),
}


def train_all(steps: int) -> dict[str, list[float]]:
    """Loss curves in bfloat16, from the same weights on the same batches."""
    from examples import train_gpt

    config = train_gpt.Config(2, 128, 4, 2, 256, 1024, steps, 2e-3, torch.bfloat16)
    pieces = train_gpt.cut_pieces(train_gpt.read_files(), config.seqlen, "documents")
    losses = {}
    for name, options in TRAINED.items():
        seed = 1 if "seed" in name else 0
        with use_options(options), redirect_stdout(StringIO()):
            run = train_gpt.train("flash_cuda", config, pieces, torch.device("cpu"), seed, None)
        losses[name] = run.losses
        print_curve(name, run.losses, losses["strict"])
    return losses


def print_curve(name: str, losses: list[float], strict: list[float]) -> None:
    """One line: the last losses' mean, and how far the curve strays from strict's."""
    last = sum(losses[-10:]) / len(losses[-10:])
    away = [abs(a - b) for a, b in zip(losses, strict, strict=True)]
    print(
        f"| {name} | {last:.4f} | {max(away[:20]):.1e} | {sum(away) / len(away):.1e} |", flush=True
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.numerics_study", description=__doc__)
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--train", action="store_true", help="loss curves as well")
    parser.add_argument("--steps", type=int, default=80, help="of training")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    arguments = parser.parse_args()
    rows = print_rows(study(arguments.dtype or list(DTYPES), arguments.case or list(CASES)))
    losses = {}
    if arguments.train:
        print("\n| | last loss | away, first 20 steps | away, mean |\n|---|---|---|---|")
        losses = train_all(arguments.steps)
    if arguments.json:
        text = json.dumps({"errors": [asdict(row) for row in rows], "losses": losses}, indent=1)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
