"""The support table: one row a feature, one column a kind of device, asked of dispatch itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flash_cuda import _C
from flash_cuda.explain import explain

# Column, and the device that explain() is asked about.
COLUMNS: tuple[tuple[str, int | str], ...] = (
    ("A100", 80),
    ("RTX 30/40, L4", 89),
    ("H100, H200", 90),
    ("B200", 100),
    ("B300", 103),
    ("RTX 50", 120),
    ("CPU", "cpu"),
)


class Call(NamedTuple):
    """A call that shows a feature."""

    feature: str
    options: dict[str, Any]
    head_dim: int = 128
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    packed: bool = False
    cached: bool = False  # keys in pages of a cache; has no gradient


_BATCH, _ROWS, _KEYS, _HEADS, _HEADS_KV, _PAGE = 2, 512, 1024, 8, 2, 64
CALLS: tuple[Call, ...] = (
    Call("head_dim 64", {}, 64),
    Call("head_dim 96", {}, 96),
    Call("head_dim 128", {}),
    Call("head_dim 192, values 128", {}, 192, 128),
    Call("head_dim 256", {}, 256),
    Call("head_dim 512", {}, 512),
    Call("float16", {}, dtype=torch.float16),
    Call("float8_e4m3fn", {}, dtype=torch.float8_e4m3fn),
    Call("float32", {}, dtype=torch.float32),
    Call("causal", {"causal": True}),
    Call("window", {"window": (128, 0)}),
    Call("attention_chunk", {"attention_chunk": 256, "causal": True}),
    Call("packed sequences", {"causal": True}, packed=True),
    Call("softcap", {"softcap": 30.0}),
    Call("ALiBi", {"alibi_slopes": (_HEADS,)}),
    Call("bias", {"bias": (1, _HEADS, _ROWS, _KEYS)}),
    Call("sink", {"sink": (_HEADS,)}),
    Call("dropout", {"dropout_p": 0.1}),
    Call("deterministic", {"deterministic": True}),
    Call("KV cache", {"cache_seqlens": 1000}),
    Call("pages", {"cache_seqlens": 1000, "causal": True}, cached=True),
    Call("split keys", {"cache_seqlens": 1000, "num_splits": 4}, cached=True),
    Call("second query (qv)", {"causal": True, "qv": (_BATCH, _ROWS, _HEADS, 128)}),
    Call(
        "absorbed latent (qv), values 512",
        {"causal": True, "qv": (_BATCH, _ROWS, _HEADS, 512)},
        64,
        512,
    ),
)


def _shapes(call: Call) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Returns the shapes of q, k, v, and the options that go with them."""
    head_dim, head_dim_v = call.head_dim, call.head_dim_v or call.head_dim
    heads = (_HEADS, _HEADS_KV, _HEADS_KV)
    dims = (head_dim, head_dim, head_dim_v)
    options = dict(call.options)
    if call.packed:
        rows = (_BATCH * _ROWS, _BATCH * _KEYS, _BATCH * _KEYS)
        options.update(cu_seqlens_q=(_BATCH + 1,), cu_seqlens_k=(_BATCH + 1,))
        return [(n, h, d) for n, h, d in zip(rows, heads, dims, strict=True)], options
    if call.cached:
        pages = _KEYS // _PAGE
        options["block_table"] = (_BATCH, pages)
        lengths = ((_BATCH, 1), (_BATCH * pages, _PAGE), (_BATCH * pages, _PAGE))
    else:
        lengths = ((_BATCH, _ROWS), (_BATCH, _KEYS), (_BATCH, _KEYS))
    return [(*n, h, d) for n, h, d in zip(lengths, heads, dims, strict=True)], options


def cell(call: Call, device: int | str) -> str:
    """Says which folders serve the forward and the backward pass: ``sm90, sm80``."""
    shapes, options = _shapes(call)
    answers = []
    for backward in (False, True):
        answer = explain(*shapes, dtype=call.dtype, device=device, backward=backward, **options)
        answers.append(answer.kernel.split("_")[0] if answer.served else "-")
    forward, gradient = answers
    return forward if forward == gradient else f"{forward}, {gradient}"


def rows(columns: Sequence[tuple[str, int | str]] = COLUMNS) -> list[list[str]]:
    """Returns the table, its first row the heading."""
    heading = ["", *(name for name, _ in columns)]
    return [heading, *([c.feature, *(cell(c, device) for _, device in columns)] for c in CALLS)]


def markdown() -> str:
    """Returns the table for README."""
    heading, *body = rows()
    lines = ["| " + " | ".join(row) + " |" for row in (heading, ["---"] * len(heading), *body)]
    return "\n".join(lines) + "\n"


def plain() -> str:
    """Returns the table for a terminal."""
    table = rows()
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def missing_folders(folders: Sequence[str]) -> list[str]:
    """Returns those of `folders` whose kernels this build lacks."""
    return sorted(set(folders) - set(_C.build_info()["folders"]))
