"""Each family of instructions against numbers computed here, in numpy, torch or exact fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from .library import Failure, load

POLICIES = ("eager", "lazy", "random")


@pytest.fixture(scope="module")
def kernels() -> Any:
    library = load("instructions")
    library.configure()
    return library


def bits_of(t: torch.Tensor, dtype: Any) -> np.ndarray:
    return t.contiguous().view(torch.uint8).numpy().view(dtype)


@pytest.mark.parametrize(
    ("name", "torch_dtype", "raw", "k"),
    [
        ("mma_bf16", torch.bfloat16, np.uint16, 16),
        ("mma_bf16_k8", torch.bfloat16, np.uint16, 8),
        ("mma_f16", torch.float16, np.uint16, 16),
        ("mma_e4m3", torch.float8_e4m3fn, np.uint8, 32),
        ("mma_e5m2", torch.float8_e5m2, np.uint8, 32),
    ],
)
def test_mma(kernels: Any, name: str, torch_dtype: torch.dtype, raw: Any, k: int) -> None:
    a = torch.randn(16, k).to(torch_dtype)
    b = torch.randn(k, 8).to(torch_dtype)
    c = torch.randn(16, 8)
    d = np.full((16, 8), np.nan, np.float32)
    getattr(kernels, name)(bits_of(a, raw), bits_of(b, raw), c.numpy(), d)
    expected = c.double() + a.double() @ b.double()
    assert np.abs(d - expected.numpy()).max() < 1e-4


def test_mma_tf32(kernels: Any) -> None:
    a, b, c = torch.randn(16, 8), torch.randn(8, 8), torch.randn(16, 8)
    d = np.full((16, 8), np.nan, np.float32)
    kernels.mma_tf32(a.numpy(), b.numpy(), c.numpy(), d)

    def chop(t: torch.Tensor) -> np.ndarray:
        return (t.numpy().view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64)

    assert np.abs(d - (c.double().numpy() + chop(a) @ chop(b))).max() < 1e-4


def test_mma_float16_accumulator(kernels: Any) -> None:
    a, b = torch.randn(16, 16).half(), torch.randn(16, 8).half()
    c = torch.randn(16, 8).half()
    d = np.zeros((16, 8), np.uint16)
    kernels.mma_f16_f16(bits_of(a, np.uint16), bits_of(b, np.uint16), bits_of(c, np.uint16), d)
    expected = c.double() + a.double() @ b.double()
    got = d.view(np.float16).astype(np.float64)
    assert np.abs(got - expected.numpy()).max() < 2e-2  # one rounding of numbers up to 16


@pytest.mark.parametrize("transpose", [0, 1])
def test_ldmatrix_stmatrix(kernels: Any, transpose: int) -> None:
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    shown = matrices.transpose(0, 2, 1) if transpose else matrices
    # Lane l holds the two elements from column 2 (l % 4) of row l / 4 of each matrix.
    pairs = shown.reshape(4, 32, 2).astype(np.uint32)
    expected = (pairs[:, :, 0] | pairs[:, :, 1] << 16).T.copy()
    out = np.zeros((32, 4), np.uint32)
    kernels.ldmatrix(matrices, out, transpose)
    assert (out == expected).all()
    back = np.zeros((4, 8, 8), np.uint16)
    kernels.stmatrix(expected, back, transpose)
    assert (back == matrices).all()


def test_movmatrix(kernels: Any) -> None:
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    out = np.zeros(32, np.uint32)
    kernels.movmatrix(matrix.reshape(-1).view(np.uint32), out)
    assert (out.view(np.uint16).reshape(8, 8) == matrix.T).all()


def sample_floats() -> np.ndarray:
    """All magnitudes, ties of every format, and the specials."""
    rng = np.random.default_rng(0)
    wide = np.ldexp(rng.uniform(-1, 1, 4000), rng.integers(-24, 17, 4000)).astype(np.float32)
    bits = rng.integers(0, 2**32, 2000, dtype=np.uint32)
    ties = bits & 0xFFFF0000 | 0x8000  # halfway between two bfloat16
    ties16 = bits & 0xFFFFE000 | 0x1000  # halfway between two float16 of normal size
    special = np.array(
        [
            0,
            -0.0,
            np.inf,
            -np.inf,
            448,
            464,
            465,
            57344,
            65504,
            65520,
            2**-9,
            2**-10,
            1.5 * 2**-10,
            2**-24,
            2**-25,
            3 * 2**-25,
        ],
        np.float32,
    )
    x = np.concatenate([wide, ties.view(np.float32), ties16.view(np.float32), special, -special])
    return np.ascontiguousarray(x[~np.isnan(x)][: len(x) // 2 * 2])


def test_conversions(kernels: Any) -> None:
    x = sample_floats()
    x = x[: len(x) // 2 * 2]
    out = np.zeros((len(x) // 2, 9), np.uint32)
    kernels.convert(x, out, len(x))
    t = torch.from_numpy(x)

    def halves(column: int) -> np.ndarray:
        return np.ascontiguousarray(out[:, column]).view(np.uint16)

    assert (halves(0) == bits_of(t.bfloat16(), np.uint16)).all()
    assert (halves(1) == bits_of(t.half(), np.uint16)).all()
    assert (halves(4) == (x.view(np.uint32) >> 16)).all()
    truncated = halves(5).view(np.float16).astype(np.float64)
    inside = np.abs(x) < 65504
    assert (np.abs(truncated)[inside] <= np.abs(x.astype(np.float64))[inside]).all()
    step = np.spacing(np.abs(truncated[inside]).astype(np.float16)).astype(np.float64)
    assert (np.abs(x[inside].astype(np.float64)) - np.abs(truncated[inside]) < step).all()
    for column, dtype, largest in (
        (2, torch.float8_e4m3fn, 448.0),
        (3, torch.float8_e5m2, 57344.0),
    ):
        got = np.stack([out[:, column] & 0xFF, out[:, column] >> 8], 1).astype(np.uint8).reshape(-1)
        expected = t.clamp(-largest, largest).to(dtype)
        assert (got == bits_of(expected, np.uint8)).all()
        column16 = 7 if column == 2 else 8
        assert (halves(column16) == bits_of(expected.half(), np.uint16)).all()
    low = x[0::2].view(np.uint32).astype(np.uint64)
    rna = ((low + 0x1000) & 0xFFFFE000).astype(np.uint32)
    finite = np.isfinite(x[0::2])
    assert (out[:, 6][finite] == rna[finite]).all()


def round_fraction(value: Fraction, mode: str) -> np.float32:
    """An exact value to float32 by comparing with its two neighbours."""
    guess = np.float32(float(value))
    below, above = guess, guess
    while Fraction(float(below)) > value:
        below = np.nextafter(below, np.float32(-np.inf))
    while Fraction(float(above)) < value:
        above = np.nextafter(above, np.float32(np.inf))
    while Fraction(float(np.nextafter(below, np.float32(np.inf)))) <= value:
        below = np.nextafter(below, np.float32(np.inf))
    while Fraction(float(np.nextafter(above, np.float32(-np.inf)))) >= value:
        above = np.nextafter(above, np.float32(-np.inf))
    if mode == "rm":
        return below
    if mode == "rp":
        return above
    if mode == "rz":
        return below if value > 0 else above
    lower, upper = value - Fraction(float(below)), Fraction(float(above)) - value
    if lower == upper:
        return below if below.view(np.uint32) % 2 == 0 else above
    return below if lower < upper else above


def test_directed_rounding(kernels: Any) -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(-2, 2, (200, 3)).astype(np.float32)
    out = np.zeros((200, 10), np.float32)
    kernels.rounding(x, out, 200)
    for row, got in zip(x, out, strict=True):
        a, b, c = (Fraction(float(v)) for v in row)
        exact = [a * b + c] * 4 + [a + b] * 4 + [a * b]
        modes = ["rn", "rz", "rm", "rp", "rn", "rz", "rm", "rp", "rz"]
        assert [round_fraction(e, m) for e, m in zip(exact, modes, strict=True)] == list(got[:9])
        assert got[9] == min(max(round_fraction(a * b + c, "rn"), np.float32(0)), np.float32(1))


def signed(x: int) -> int:
    return x - 2**32 if x >= 2**31 else x


def permuted(a: int, b: int, selector: int) -> int:
    pool = (b << 32 | a).to_bytes(8, "little")
    out = []
    for i in range(4):
        s = selector >> (4 * i) & 15
        byte = pool[s & 7]
        out.append((0xFF if byte & 0x80 else 0) if s & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def field(a: int, start: int, length: int, is_signed: bool) -> int:
    """bfe: bits past the top are copies of the sign for s32, zeros for u32."""
    if length == 0:
        return 0
    top = a >> 31 if is_signed else 0
    bits = [(a >> (start + i) & 1) if start + i < 32 else top for i in range(length)]
    out = sum(bit << i for i, bit in enumerate(bits))
    if is_signed and bits[-1]:
        out |= ~((1 << length) - 1) & 0xFFFFFFFF
    return out


def expected_integers(a: int, b: int, c: int) -> list[int]:
    m = 0xFFFFFFFF
    inserted = ((1 << 7) - 1) << (c & 31) & m
    lut = 0
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        lut |= (0x6A >> index & 1) << bit
    s = c & 63
    return [
        permuted(a, b, c),
        lut,
        field(a, b & 31, c & 31, False),
        field(a, b & 31, c & 31, True),
        (b & ~inserted | a << (c & 31) & inserted) & m,
        (b << 32 | a) << (c & 31) >> 32 & m,
        (b << 32 | a) >> min(s, 32) & m,
        a * b >> 32,
        signed(a) * signed(b) >> 32 & m,
        32 - a.bit_length(),
        bin(a).count("1"),
        int(f"{a:032b}"[::-1], 2),
        (a.bit_length() - 1) & m,
        (c + (a + b > m)) & m,
        signed(a) >> min(s, 31) & m,
        (a * b + c) & m,
    ]


def test_integers(kernels: Any) -> None:
    rng = np.random.default_rng(2)
    x = rng.integers(0, 2**32, (300, 3), dtype=np.uint32)
    x[:4, 0] = [0, 1, 0xFFFFFFFF, 0x80000000]
    out = np.zeros((300, 16), np.uint32)
    kernels.integer(x, out, 300)
    for row, got in zip(x, out, strict=True):
        assert [int(g) for g in got] == expected_integers(*(int(v) for v in row))


@pytest.mark.parametrize("policy", POLICIES)
def test_warp_collectives(kernels: Any, policy: str) -> None:
    kernels.configure(policy)
    v = np.random.default_rng(3).integers(0, 2**32, 32, dtype=np.uint32)
    v[9] = v[1]
    out = np.zeros((32, 12), np.uint32)
    kernels.warp(v, out)
    match = [sum(1 << j for j in range(32) if v[j] & 7 == v[lane] & 7) for lane in range(32)]
    for lane in range(32):
        segment = lane // 8 * 8
        assert out[lane, 0] == v[segment + (lane * 5 + 3) % 8]
        assert out[lane, 1] == v[lane - 3 if lane - 3 >= segment else lane]
        assert out[lane, 2] == v[lane + 3 if lane + 3 < segment + 8 else lane]
        assert out[lane, 3] == v[lane ^ 5]
        assert out[lane, 6] == match[lane]
        assert out[lane, 11] == v[2 if lane < 16 else 18]
    assert (out[:, 4] == sum(int(x & 1) << i for i, x in enumerate(v))).all()
    assert (out[:, 5] == 1).all()
    assert (out[:, 7] == int(v.astype(np.uint64).sum()) % 2**32).all()
    assert (out[:, 8] == v.max()).all()
    assert (out[:, 9].view(np.int32) == v.view(np.int32).min()).all()
    assert out[:, 10].sum() == 1


def test_packed_halves(kernels: Any) -> None:
    t = torch.randn(64, 3, 2).bfloat16()
    out = np.zeros((64, 5), np.uint32)
    kernels.packed(bits_of(t, np.uint32).reshape(64, 3), out, 64)
    a, b, c = (t[:, i].double() for i in range(3))
    expected = torch.stack([a * b + c, a * b, torch.maximum(a, b), -a, a + b], 1).bfloat16()
    assert (out == bits_of(expected, np.uint32).reshape(64, 5)).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_cp_async_fills_with_zeros(kernels: Any, policy: str) -> None:
    kernels.configure(policy)
    source = np.arange(1, 513, dtype=np.int64).astype(np.uint8).reshape(32, 16)
    valid = np.arange(32, dtype=np.int32) % 17
    out = np.full((32, 16), 0xAA, np.uint8)
    kernels.cp_async(source, out, valid)
    keep = np.arange(16)[None, :] < valid[:, None]
    assert (out == np.where(keep, source, 0)).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_take_turns(kernels: Any, policy: str) -> None:
    """Blocks alive at a time can wait for each other; more of them than SMs need launch order."""
    for blocks, step, sms in ((8, 1, 1), (8, 1, 4), (4, -1, 4)):
        kernels.configure(policy, sms=sms)
        turn, order = np.zeros(1, np.int32), np.zeros(blocks, np.int32)
        kernels.turns(turn, order, blocks, step)
        assert turn[0] == blocks
        assert list(order) == (list(range(blocks)) if step > 0 else list(range(blocks))[::-1])


def test_waiting_for_a_block_that_cannot_start(kernels: Any) -> None:
    kernels.configure(sms=2)
    with pytest.raises(Failure, match="deadlock"):
        kernels.turns(np.zeros(1, np.int32), np.zeros(4, np.int32), 4, -1)
