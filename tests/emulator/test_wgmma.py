"""wgmma operands: every major and swizzle, laid out here by the canonical layouts of the ISA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from .library import load

POLICIES = ("eager", "lazy", "random")
CODES = {16: 0, 128: 1, 64: 2, 32: 3}  # bytes of a swizzled row -> field of the descriptor


def place(matrix: np.ndarray, span: int, mn_major: bool) -> tuple[np.ndarray, np.ndarray]:
    """Bytes in shared memory of a 64 x depth operand, and its layout for wgmma.cu.

    Rows of `span` bytes; eight of them make a core matrix, within which the 16-byte chunks are
    exchanged by row. Span 16 is the layout without swizzle.
    """
    rows, depth = matrix.shape
    size = matrix.itemsize
    image = np.zeros(rows * depth * size, np.uint8)
    per_step = 32 // size  # k of one instruction
    if span == 16:
        # Cores of 8 rows x 16 bytes: across the major direction `stride`, along it `leading`.
        stride, leading = (128, 128 * rows // 8) if not mn_major else (128 * depth // 8, 128)
    else:
        leading, stride = (16, 8 * span) if not mn_major else (depth * span, 8 * span)
    raw = matrix.view(np.uint8).reshape(rows, depth, size)
    for r in range(rows):
        for k in range(depth):
            if span == 16 and not mn_major:
                at = k * size // 16 * leading + r // 8 * stride + r % 8 * 16 + k * size % 16
            elif span == 16:
                at = r * size // 16 * stride + k // 8 * leading + k % 8 * 16 + r * size % 16
            elif not mn_major:
                panel = k * size // span
                at = panel * rows * span + r // 8 * stride + r % 8 * span + k * size % span
            else:
                at = r * size // span * leading + k // 8 * stride + k % 8 * span + r * size % span
            at ^= (at >> 7 & (span // 16 - 1)) << 4
            image[at : at + size] = raw[r, k]
    starts = []
    for step in range(4):
        k = step * per_step
        if mn_major:
            starts.append(k // 8 * (leading if span == 16 else stride))
        elif span == 16:
            starts.append(k * size // 16 * leading)
        else:
            starts.append(k * size // span * rows * span + k * size % span)
    layout = np.array([leading, stride, CODES[span], len(image), *starts], np.int32)
    return image, layout


def run(
    variant: int, a: torch.Tensor, b: torch.Tensor, span_a: int, span_b: int, mn_a: bool, mn_b: bool
) -> np.ndarray:
    def bits(t: torch.Tensor) -> np.ndarray:
        width = np.uint16 if t.element_size() == 2 else np.uint8
        return t.contiguous().view(torch.uint8).numpy().view(width)

    image_a, layout_a = place(bits(a), span_a, mn_a)
    image_b, layout_b = place(bits(b), span_b, mn_b)
    out = np.full((64, 64), np.nan, np.float32)
    rows = np.ascontiguousarray(bits(a)).view(np.uint32)
    load("wgmma").wgmma(image_a, image_b, layout_a, layout_b, out, variant, rows)
    return out


@pytest.fixture(autouse=True)
def _strict() -> None:
    load("wgmma").configure()


@pytest.mark.parametrize("span_b", [16, 32, 64, 128])
@pytest.mark.parametrize("span_a", [16, 32, 64, 128])
@pytest.mark.parametrize(("mn_a", "mn_b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_bfloat16(mn_a: int, mn_b: int, span_a: int, span_b: int) -> None:
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    got = run(2 * mn_a + mn_b, a, b, span_a, span_b, bool(mn_a), bool(mn_b))
    assert np.abs(got - (a.double() @ b.double().T).numpy()).max() < 1e-3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_in_registers(policy: str) -> None:
    library: Any = load("wgmma")
    library.configure(policy)
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    got = run(4, a, b, 128, 128, False, False)
    assert np.abs(got - (a.double() @ b.double().T).numpy()).max() < 1e-3


@pytest.mark.parametrize("variant", [5, 6])
@pytest.mark.parametrize("span", [16, 32, 64, 128])
def test_float8(variant: int, span: int) -> None:
    a = torch.randn(64, 128).to(torch.float8_e4m3fn)
    b = torch.randn(64, 128).to(torch.float8_e4m3fn)
    got = run(variant, a, b, span, span, False, False)
    assert np.abs(got - (a.double() @ b.double().T).numpy()).max() < 1e-3
