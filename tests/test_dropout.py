"""Dropout: the same mask on every backend, in every tiling, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flash_cuda.reference.dropout import keep_mask, philox

from . import oracle
from .cases import AttentionCase, grid
from .check import Backend, check, with_cases

# Known answers of Philox4x32-10, from the authors' Random123 (counter, key, result).
ONES = 0xFFFFFFFF
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    seed = key[0] | key[1] << 32
    engine = philox(tuple(torch.tensor([c]) for c in counter), seed)
    assert engine[0].tolist() == words
    apart = oracle.philox4x32([np.array([c], dtype=np.uint64) for c in counter], (key[0], key[1]))
    assert [int(w[0]) for w in apart] == words


@pytest.mark.parametrize("seed", [0, 1, 1 << 40, -3])
def test_engine_mask_is_the_documented_one(seed: int) -> None:
    """Tiles that start anywhere, also off a multiple of four columns."""
    state = torch.tensor([seed, (1 << 35) + 5])
    whole = oracle.dropout_keep(state, 0.3, pair=6, rows=20, columns=50)
    pair = torch.tensor([[6]])
    for q0, q1, kv0, kv1 in [(0, 20, 0, 50), (3, 9, 5, 6), (7, 20, 3, 50), (0, 1, 49, 50)]:
        tile = keep_mask(state, 0.3, pair, q0, q1, kv0, kv1)
        assert tile.shape == (1, 1, q1 - q0, kv1 - kv0)
        assert torch.equal(tile[0, 0], whole[q0:q1, kv0:kv1])


def test_share_of_kept_entries() -> None:
    """The mean of a million Bernoulli draws is within five standard deviations."""
    for p in (0.05, 0.5, 0.9):
        kept = oracle.dropout_keep(torch.tensor([12345, 6]), p, 3, 1000, 1000).double().mean()
        assert abs(float(kept) - (1 - p)) < 5 * (p * (1 - p) / 1e6) ** 0.5


def drawn_mask(
    backend: Backend, state: torch.Tensor, p: float, rows: int, keys: int
) -> torch.Tensor:
    """Reads the mask off the output: with q = 0 and one-hot values it is keep / (1 - p) / keys."""
    q = torch.zeros(2, rows, 3, 64, dtype=torch.float16, device=backend.device)
    k = torch.zeros(2, keys, 3, 64, dtype=torch.float16, device=backend.device)
    parts = []
    for first in range(0, keys, 64):
        v = torch.zeros(2, keys, 3, 64, dtype=torch.float16, device=backend.device)
        for j in range(first, min(first + 64, keys)):
            v[:, j, :, j - first] = 1.0
        out, _ = backend.call(
            AttentionCase(), "fwd", q, k, v, dropout_p=p, rng_state=state.to(backend.device)
        )
        parts.append(out)
    return torch.cat(parts, dim=-1)[..., :keys].permute(0, 2, 1, 3).cpu() > 0


@pytest.mark.parametrize("state", [(7, 0), (7, 1), (7 + (1 << 33), 0), (-1, (1 << 40) + 2)])
def test_mask_bit_for_bit(state: tuple[int, int], backend: Backend) -> None:
    rng_state = torch.tensor(state)
    got = drawn_mask(backend, rng_state, 0.4, rows=70, keys=150)
    for b in range(2):
        for h in range(3):
            want = oracle.dropout_keep(rng_state, 0.4, b * 3 + h, 70, 150)
            assert torch.equal(got[b, h], want), f"batch {b}, head {h}"


@with_cases(
    grid(
        AttentionCase(rows=(50, 50), keys=(130, 130), heads=4, heads_kv=2, grads=True, dlse=True),
        dropout_p=(0.1, 0.75),
        dtype=("bfloat16", "float16", "float32", "float64"),
        window_right=(-1, 0),
    ),
    grid(
        AttentionCase(rows=(50, 0, 9), keys=(30, 4, 70), layout="packed", grads=True),
        dropout_p=(0.3,),
        slack=(0, 3),
        window_right=(-1, 0),
    ),
    grid(AttentionCase(rows=(50,), keys=(130,), dropout_p=0.3), num_splits=(3,), pack_gqa=(0, 1)),
    grid(AttentionCase(rows=(33,), keys=(300,), dropout_p=0.2, grads=True), tiles=(None, (7, 5))),
)
def test_dropout(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


def test_lse_is_without_dropout(backend: Backend) -> None:
    q, k, v = (torch.randn(1, 40, 2, 64, device=backend.device).bfloat16() for _ in "qkv")
    state = torch.tensor([3, 4], device=backend.device)
    case = AttentionCase()
    _, dropped = backend.call(case, "fwd", q, k, v, dropout_p=0.5, rng_state=state)
    _, whole = backend.call(case, "fwd", q, k, v)
    assert torch.allclose(dropped, whole, atol=2e-4)
