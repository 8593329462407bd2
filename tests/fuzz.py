"""Draws any legal combination of features, runs it and compares it with the oracle.

    python tests/fuzz.py --seconds 120 --backend cuda
    python tests/fuzz.py --seconds 120 --backend cuda --large           see fuzz_large.py
    python tests/fuzz.py --backend cuda --case '{"rows": [3], ...}'     what a failure prints

`draw_case` takes its choices from a function, so that hypothesis draws from the same space.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.cases import AttentionCase
from tests.check import Backend, Unsupported, check
from tests.fuzz_large import LargeCase, check_large, draw_large

Choose = Callable[[Sequence[Any]], Any]

EDGES = (1, 2, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 127, 128, 129)
LONG = (*EDGES, 175, 191, 193, 255, 256, 257, 383, 385, 511, 513)
HEAD_DIMS = (8, 16, 32, 40, 64, 72, 96, 128, 160, 192, 256)
HEADS = ((1, 1), (2, 2), (2, 1), (4, 1), (4, 2), (6, 2), (8, 1), (3, 3), (16, 2))


def draw_lengths(choose: Choose, count: int, lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(choose((0, *lengths, *lengths)) for _ in range(count))


def draw_case(
    choose: Choose, dtypes: Sequence[str], small: bool, seed: int, served: bool = False
) -> AttentionCase:
    """Draws a case.

    Args:
        choose: picks one of a sequence.
        dtypes: to pick from.
        small: short sequences and few heads, as emulated kernels and a CPU can bear.
        seed: of the tensors.
        served: leaves out what only the CPU engine takes.
    """
    lengths = EDGES if small else LONG
    rare = (False, False, False, True)
    dtype = choose(dtypes)
    fp8 = dtype.startswith("float8")
    grads = not fp8 and choose((False, True))
    layouts = (
        ["dense", "packed"] if grads else ["dense", "packed", "cache", "paged", "packed_paged"]
    )
    layout = choose(layouts)
    batch = choose((1, 1, 2, 3, 5) if small else (1, 2, 3, 5, 9))
    rows, keys = draw_lengths(choose, batch, lengths), draw_lengths(choose, batch, lengths)
    if layout in ("cache", "paged") and choose((False, True)):
        rows = (choose((1, 1, 2, 4)),) * batch
    same = choose((False, True)) and layout == "dense"
    if same:
        rows, keys = rows[:1] * batch, keys[:1] * batch
    heads, heads_kv = choose(HEADS[:6] if small else HEADS)
    head_dim = choose(HEAD_DIMS[:9] if small else HEAD_DIMS)
    if not served and choose(rare):
        head_dim = choose((1, 7, 46, 65))
    window = choose(((-1, -1), (-1, 0), (-1, 0), (choose((0, 5, 31, 64)), 0),
                     (choose((-1, 3, 40)), choose((-1, 0, 9, 50)))))  # fmt: skip
    plain = choose((False, True))
    feature = rare if plain else (False, True)
    splits = (0, 0) if grads else choose(((0, 0), (1, 0), (3, 0), (7, 0), (0, 32), (0, 100)))
    return AttentionCase(
        dtype=dtype,
        rows=rows,
        keys=keys,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=choose((0, 0, 0, *HEAD_DIMS[:6])) if not plain else 0,
        layout=layout,
        slack=choose((0, 0, 3)),
        page_size=choose((1, 16, 16, 48, 64, 256)),
        cache_rows=layout == "cache" and choose((False, True)),
        leftpad=layout in ("cache", "paged") and choose(rare),
        window_left=window[0],
        window_right=window[1],
        chunk=choose((0, 0, 0, 16, 33, 100)) if not plain else 0,
        top_left=choose(rare) and not plain,
        scale=choose((None, None, 0.3, -0.1, 0.0)) if not plain else None,
        softcap=choose((0.0, 5.0, 30.0)) if not plain else 0.0,
        alibi=choose(("", "head", "batch")) if choose(feature) else "",
        bias=choose(("bhqk", "11qk", "1h1k", "b1qk")) if choose(feature) and layout in
        ("dense", "cache", "paged") else "",
        bias_dtype="float32" if fp8 else choose(("float32", "same")),
        sink=choose(feature),
        dropout_p=choose((0.1, 0.5)) if choose(rare) and not plain else 0.0,
        qv=not grads and not plain and choose(rare),
        descale=fp8 and choose((False, True)),
        num_splits=splits[0],
        split_size=splits[1],
        pack_gqa=choose((-1, -1, 0, 1)),
        strict=choose(rare),
        grads=grads,
        dlse=grads and choose((False, True)),
        wanted=choose((None, None, 1, 2, 4, 6)) if grads else None,
        deterministic=choose((False, True)),
        strides=choose(("contiguous", "contiguous", "sliced", "head_major", "shared_heads")),
        spread=choose((1.0, 1.0, 0.1, 8.0)),
        seed=seed,
        tiles=choose(((32, 48), (16, 16), (48, 128), None)),
    )  # fmt: skip


def _dtypes(backend: Backend) -> tuple[str, ...]:
    if backend.is_engine:
        return ("float32", "float64", "bfloat16", "float16", "float8_e4m3fn")
    if backend.is_emulated:
        return ("bfloat16", "float16")
    return ("bfloat16", "bfloat16", "float16", "float8_e4m3fn")


# A case, and what runs it, compares it and may say what served it.
Drawn = tuple[Any, Callable[[Any, Backend], str | None]]


def small_cases(backend: Backend, generator: random.Random, small: bool) -> Iterator[Drawn]:
    while True:
        case = draw_case(
            generator.choice, _dtypes(backend), small, generator.randrange(1 << 30),
            served=not backend.is_engine,
        )  # fmt: skip
        yield case, check


def large_cases(backend: Backend, generator: random.Random) -> Iterator[Drawn]:
    while True:
        case = draw_large(
            generator.choice, ("bfloat16", "float16"), backend.num_sms, backend.is_emulated,
            generator.randrange(1 << 30),
        )  # fmt: skip
        yield case, check_large


def fuzz(
    backend: Backend, seconds: float, seed: int, small: bool, most_failures: int, large: bool
) -> int:
    """Runs random cases until the time is up; returns the number of failures."""
    generator = random.Random(seed)
    end = time.monotonic() + seconds
    cases = large_cases(backend, generator) if large else small_cases(backend, generator, small)
    failures, refused, served = 0, Counter[str](), Counter[str]()
    flag = " --large" if large else ""
    while time.monotonic() < end and failures < most_failures:
        case, judge = next(cases)
        try:
            served[judge(case, backend) or ""] += 1
        except Unsupported as refusal:
            refused[str(refusal)] += 1
        except Exception as error:
            failures += 1
            print(f"FAILED: {type(error).__name__}: {error}")
            print(
                f"  python tests/fuzz.py{flag} --backend {backend.name} --case '{case.to_json()}'"
            )
    print(f"{backend.name}, seed {seed}: {served.total()} cases agreed, {failures} failed, "
          f"{refused.total()} not served")  # fmt: skip
    for reason, count in [*served.most_common(), *refused.most_common(20)]:
        if reason:
            print(f"  {count} x {reason}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--backend", default="cpu", help="cpu, cuda or emulated:ARCH")
    parser.add_argument("--seed", type=int, default=None, help="default: the time")
    parser.add_argument("--small", action="store_true", help="short sequences only")
    parser.add_argument("--large", action="store_true", help="dense forwards that fill a device")
    parser.add_argument("--most-failures", type=int, default=10, help="stop after so many")
    parser.add_argument("--case", help="run this one case, as a failure prints it")
    options = parser.parse_args()
    backend = Backend(options.backend)
    if options.case:
        if options.large:
            check_large(LargeCase.from_json(options.case), backend)
        else:
            check(AttentionCase.from_json(options.case), backend)
        print("agrees")
        return 0
    seed = int(time.time()) if options.seed is None else options.seed
    small = options.small or backend.device == "cpu"
    failures = fuzz(backend, options.seconds, seed, small, options.most_failures, options.large)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
