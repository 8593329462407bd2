"""The cycle model of the Blackwell kernels, and the counting of SASS behind it."""

from __future__ import annotations

import pytest

from bench import roofline

LOOP = """\
.text.kernel:
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
{body}
        /*0500*/                   @P0 BRA `(.L_x_1) ;
        /*0510*/                   EXIT ;
.L_x_2:
        /*0520*/                   BRA `(.L_x_1) ;
"""


def kernel(name: str) -> roofline.Kernel | roofline.Pass:
    return next(k for k in roofline.KERNELS if k.name == name)


@pytest.mark.parametrize(
    ("name", "matrix", "exp2"),
    [
        ("forward 128", 2048, 1664),
        ("backward 64", 1280, 1024),
        ("backward 128", 2560, 1024),
        ("backward 256, keys stay", 4096, 1024),
        ("backward 256, queries stay", 3072, 1024),
    ],
)
def test_cycles(name: str, matrix: float, exp2: float) -> None:
    cycles = kernel(name).cycles()
    assert (cycles["matrix"], cycles["exp2"]) == (matrix, exp2)
    # A product of two operands from shared memory takes every byte of it.
    assert cycles["smem"] >= matrix


def test_table_has_a_line_for_each_kernel() -> None:
    lines = roofline.table().splitlines()
    assert len(lines) == 2 + len(roofline.KERNELS)
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_count_leaves_masks_out() -> None:
    body = ["MUFU.EX2 R4, R4"] * 8 + ["ISETP.GE P1, R5, R6", "SEL R4, R4, R7, P1"] * 16
    text = "\n".join(
        f"        /*{16 * (i + 1):04x}*/                   {x} ;" for i, x in enumerate(body)
    )
    found = list(roofline.count(LOOP.format(body=text)))
    assert found == ["kernel: exponentials 9 (32 more where masked)"]
