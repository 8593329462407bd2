"""Packed sequences: empty ones, gaps, rows behind the last, one query, many sequences."""

from __future__ import annotations

import torch

from .cases import AttentionCase, grid
from .check import Backend, check, with_cases

PACKED = AttentionCase(layout="packed", grads=True, head_dim=32)
SEQUENCES = [
    ((40,), (40,)),
    ((17, 33, 1), (17, 33, 1)),
    ((3, 7, 4), (0, 5, 0)),
    ((5, 0, 5), (4, 5, 4)),
    ((0, 0), (3, 0)),
    ((), ()),
    ((64, 1, 65), (65, 64, 63)),
    ((1, 1, 1, 1), (100, 1, 33, 0)),
    ((130, 2), (3, 129)),
]


@with_cases(
    grid(
        PACKED,
        rows__keys=SEQUENCES,
        dtype=("bfloat16", "float32"),
        window_right=(-1, 0),
        slack=(0, 3),
    )
)
def test_packed(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(
            layout="packed", grads=True, dlse=True, rows=(20, 0, 33, 9), keys=(31, 8, 33, 0)
        ),
        heads__heads_kv=[(4, 2), (9, 3)],
        window_left__window_right=[(7, 0), (5, 9), (-1, 0)],
        sink=(False, True),
        alibi=("", "batch"),
        slack=(0, 2),
    )
)
def test_packed_with_features(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        PACKED,
        rows__keys=[((3,) * 40, (5,) * 40), (tuple(range(20)), tuple(range(20, 0, -1)))],
        dropout_p=(0.0, 0.3),
        softcap=(0.0, 4.0),
    )
)
def test_many_sequences(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(layout="packed", rows=(20, 0, 33), keys=(41, 8, 90), heads=4),
        num_splits=(1, 3),
        split_size=(0,),
        window_right=(-1, 0),
    ),
    grid(
        AttentionCase(layout="packed", rows=(20, 0, 33), keys=(41, 8, 90), heads=4, sink=True),
        split_size=(32, 64),
    ),
)
def test_packed_splits(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


def test_packed_equals_dense(backend: Backend) -> None:
    """The same sequences, packed and one by one, agree to the rounding of the dtype."""
    counts = [30, 64, 5]
    total = sum(counts)
    q, k, v = (torch.randn(total, 4, 64, device=backend.device).bfloat16() for _ in "qkv")
    cu = torch.tensor([0, 30, 94, 99], dtype=torch.int32, device=backend.device)
    case = AttentionCase()
    out, lse = backend.call(
        case, "fwd", q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, window_right=0,
        max_seqlen_q=64, max_seqlen_k=64,
    )  # fmt: skip
    start = 0
    for n in counts:
        rows = slice(start, start + n)
        one = backend.call(case, "fwd", *(x[None, rows] for x in (q, k, v)), window_right=0)
        assert torch.allclose(out[None, rows].float(), one[0].float(), atol=1e-2)
        assert torch.allclose(lse[None, :, rows], one[1], atol=2e-4)
        start += n
