"""Predicted cycles of the Blackwell kernels, by unit: nothing here has been timed.

    python -m bench.roofline                    # the table of docs/kernels/sm100_bwd.md
    python -m bench.roofline --sass file.sass   # instructions of the loops, from nvdisasm -c

A kernel cannot be faster than its busiest unit, so the largest number of a row bounds it from
below; waits, latency, the power limit and memory come on top. The counts of instructions are those
of the SASS that nvcc 13.0 makes for sm_100a (bfloat16, plain variant), without the masks' part,
which only blocks at an edge run.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Of an SM in a cycle.
FLOPS, EXPONENTIALS, SMEM_BYTES, ISSUE_SLOTS = 8192, 16, 128, 4
KEYS = 128
PEAK_TFLOPS = 2250.0  # bfloat16, dense, of a B200
# FlashAttention-4, as its authors publish it: forward, head dim 128, bfloat16, B200.
FA4_FORWARD = 1613.0


@dataclass(frozen=True)
class Kernel:
    """A pass over one block of keys (forward) or of queries (backward).

    Attributes:
        rows: queries of the block.
        emulated: exponentials of each 128 that run on the FMA units.
        instructions: of each role in one turn of its loop, and its warps.
        pair: two thread blocks share the right operands; the numbers are of one of them.
    """

    name: str
    backward: bool
    head_dim: int
    head_dim_v: int
    rows: int
    emulated: int
    instructions: tuple[tuple[int, int], ...]
    pair: bool = False

    @property
    def flops(self) -> float:
        dims = 3 * self.head_dim + 2 * self.head_dim_v
        return 2.0 * self.rows * KEYS * (dims if self.backward else self.head_dim + self.head_dim_v)

    @property
    def smem_bytes(self) -> float:
        """Operands that products read, what threads write and read, what the copy engine moves."""
        # In shared memory a head dim fills panels of 64 columns; products stop at its end.
        d, dv = self.head_dim, self.head_dim_v
        panels, panels_v = -(-d // 64) * 64, -(-dv // 64) * 64
        rows, k, v = self.rows, 2 * KEYS * d, 2 * KEYS * dv
        if not self.backward:
            tiles = rows // 128
            return tiles * (2 * 128 * d + k + v) + 2 * KEYS * (panels + panels_v)
        q, dout, ds = 2 * rows * d, 2 * rows * dv, 2 * rows * KEYS
        sums = 2 * 4 * rows * d  # staged and read
        if self.pair:
            # dQ: half of the queries, all keys of the pair; half of dS is sent and received.
            q, dout, ds, sums = q // 2, dout // 2, 2 * ds, sums // 2
            operands = (k + q) + (v + dout) + dout + q + (ds // 2 + k)
        else:
            operands = (k + q) + (v + dout) + dout + q + (ds + k)  # S, dP, dV, dK, dQ
        # Four queries' lse or delta for all lanes of a warp take a cycle; a warp has half of them.
        stats = 8 * (2 * rows // 8) * SMEM_BYTES
        return operands + ds + sums + stats + 2 * rows * (panels + panels_v)

    def cycles(self) -> dict[str, float]:
        exact = 1.0 - self.emulated / 128
        return {
            "matrix": self.flops / FLOPS,
            "exp2": self.rows * KEYS * exact / EXPONENTIALS,
            "smem": self.smem_bytes / SMEM_BYTES,
            "issue": sum(count * warps for count, warps in self.instructions) / ISSUE_SLOTS,
        }


@dataclass(frozen=True)
class Pass:
    """A pass of the backward for head dims up to 256, by pairs of thread blocks.

    64 rows of one side stay in each block and blocks of 128 of the other side pass: two turns of
    the loop for 128 x 128 scores.

    Attributes:
        gradients: that are summed up, dK and dV or dQ.
        instructions: of each role in one turn of its loop, and its warps.
    """

    name: str
    gradients: int
    instructions: tuple[tuple[int, int], ...]

    @property
    def smem_bytes(self) -> float:
        """Of two turns, as those of Kernel."""
        rows, scores = 2 * 64 * 256, 2 * 64 * 128  # 64 rows of an operand, of P or dS
        operands = 2 * (rows + rows) + self.gradients * (scores + rows)
        stats = 8 * (2 * 32 // 4) * SMEM_BYTES if self.gradients == 2 else 0
        arriving = (2 + self.gradients) * rows
        return 2.0 * (operands + self.gradients * scores + stats + arriving)

    def cycles(self) -> dict[str, float]:
        return {
            "matrix": 2.0 * (2 + self.gradients) * 128 * KEYS * 256 / FLOPS,
            "exp2": 128.0 * KEYS / EXPONENTIALS,
            "smem": self.smem_bytes / SMEM_BYTES,
            "issue": 2.0 * sum(count * warps for count, warps in self.instructions) / ISSUE_SLOTS,
        }


# Instructions: softmax or scores, correction or dQ, MMA, load (single warps).
KERNELS: tuple[Kernel | Pass, ...] = (
    Kernel("forward 64", False, 64, 64, 256, 32, ((665, 8), (198, 4), (256, 1), (109, 1))),
    Kernel("forward 96", False, 96, 96, 256, 24, ((644, 8), (283, 4), (324, 1), (183, 1))),
    Kernel("forward 128", False, 128, 128, 256, 24, ((644, 8), (367, 4), (306, 1), (183, 1))),
    Kernel("forward 192/128", False, 192, 128, 256, 16, ((607, 8), (367, 4), (305, 1), (233, 1))),
    Kernel("forward 256", False, 256, 256, 128, 0, ((532, 4), (368, 4), (188, 1), (343, 1))),
    Kernel("backward 64", True, 64, 64, 128, 0, ((392, 8), (320, 4), (299, 1), (151, 1))),
    Kernel("backward 96", True, 96, 96, 128, 0, ((396, 8), (461, 4), (331, 1), (190, 1))),
    Kernel("backward 128", True, 128, 128, 128, 0, ((392, 8), (413, 4), (311, 1), (190, 1))),
    Kernel(
        "backward 128, pairs",
        True,
        128,
        128,
        128,
        0,
        ((453, 8), (370, 4), (370, 1), (324, 1)),
        pair=True,
    ),
    Kernel("backward 192/128", True, 192, 128, 128, 0, ((401, 8), (618, 4), (314, 1), (200, 1))),
    Pass("backward 256, keys stay", 2, ((282, 8), (242, 1), (505, 1))),
    Pass("backward 256, queries stay", 1, ((217, 8), (178, 1), (350, 1))),
)


def table() -> str:
    """The kernels, a line each, as Markdown."""
    units = list(KERNELS[0].cycles())
    lines = [
        f"| kernel | {' | '.join(units)} | bound | TFLOP/s at most |",
        "|---" * (len(units) + 3) + "|",
    ]
    for kernel in KERNELS:
        cycles = kernel.cycles()
        unit, most = max(cycles.items(), key=lambda item: item[1])
        numbers = " | ".join(f"{cycles[u]:.0f}" for u in units)
        limit = PEAK_TFLOPS * cycles["matrix"] / most
        lines.append(f"| {kernel.name} | {numbers} | {unit} | {limit:.0f} |")
    return "\n".join(lines)


# ---- counting instructions

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
# An instruction that only one role's loop has.
_MARKS = {"exponentials": "MUFU.EX2", "dQ": "UBLKRED", "correction": "STTM", "MMA": "UTCHMMA",
          "load": "UTMALDG"}  # fmt: skip


def _operation(text: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def loops(lines: list[str]) -> Iterator[list[str]]:
    """The operations of each loop of one function. Code behind the last EXIT is the slow way
    through waits, which branches back."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction[1])
    end = max(i for i, text in enumerate(code) if _operation(text) == "EXIT")
    for i, text in enumerate(code[:end]):
        branch = _BRANCH.search(text)
        if branch and labels.get(branch[1], end) <= i:
            yield [_operation(x) for x in code[labels[branch[1]] : i + 1]]


def count(sass: str) -> Iterator[str]:
    """A line for each role of each kernel in nvdisasm's text."""
    parts = re.split(r"^\.text\.(\S+):$", sass, flags=re.MULTILINE)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        found = list(loops(text.splitlines()))
        for role, mark in _MARKS.items():
            # The steady loop: the shortest one with a good part of the marks. Loops of a few
            # instructions only issue one of them.
            having = [(sum(o.startswith(mark) for o in x), x) for x in found if len(x) > 40]
            most = max((marks for marks, _ in having), default=0)
            if most == 0:
                continue
            loop = min((x for marks, x in having if marks > 0.3 * most), key=len)
            if role == "correction" and any(o.startswith("MUFU.EX2") for o in loop):
                continue  # the backward's scores store to tensor memory themselves
            masks = 2 * sum(o.startswith("SEL") for o in loop) if role == "exponentials" else 0
            yield f"{name}: {role} {len(loop) - masks} ({masks} more where masked)"


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted cycles; nothing here has been timed.")
    parser.add_argument("--sass", type=Path, help="text of nvdisasm -c, whose loops to count")
    arguments = parser.parse_args()
    if arguments.sass:
        print("\n".join(count(arguments.sass.read_text())))
        return
    print("Predictions. Cycles of a block of 128 keys (backward: and 128 queries), of each unit:\n")
    print(table())
    print(f"\nFlashAttention-4 publishes {FA4_FORWARD:.0f} TFLOP/s forward at head dim 128.")


if __name__ == "__main__":
    main()
