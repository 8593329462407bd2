"""What results are compared with before they are timed: explicit attention in float32.

Rows of the score matrix are taken in slices, so that memory stays bounded; float64 on a CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case
from .inputs import Inputs

SLICE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}  # of one slice of the scores
# Largest error of 64 rows of one head, relative to the size of those rows. Rounding gives a tenth
# of it; one wrong row among the 64 gives more.
TOLERANCE = {"bfloat16": 4e-2, "float16": 1e-2, "float32": 1e-4, "float8_e4m3fn": 0.2}
ROWS_OF_CHECK = 64


@dataclass
class Reference:
    """Output and gradients, each a list over groups of equal sequences.

    A group is (sequences * heads, rows, columns).
    """

    out: list[Tensor]
    grads: tuple[list[Tensor], list[Tensor], list[Tensor]] | None


def heads_first(case: Case, x: Tensor) -> list[Tensor]:
    """(batch, rows, heads, columns) or (total, heads, columns) as one tensor a group of sequences.

    A dense batch is one group, (batch * heads, rows, columns); packed sequences are one each.
    """
    if case.kind == "varlen":
        return [part.transpose(0, 1) for part in x.split(list(case.lengths))]
    return [x.transpose(1, 2).flatten(0, 1)]


def cache_groups(case: Case, inputs: Inputs) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(q, k, v) of a decode case, heads first: one group if all lengths are equal."""
    q, k, v = (t.detach() for t in inputs.leaves)
    if inputs.block_table is not None:
        pages = inputs.block_table.long()
        k, v = (t[pages].flatten(1, 2) for t in (k, v))
    lengths = [n for _, n in case.spans]
    if len(set(lengths)) == 1:
        rows = [(q, k[:, : lengths[0]], v[:, : lengths[0]])]
    else:
        rows = [(q[i, None], k[i, None, :n], v[i, None, :n]) for i, n in enumerate(lengths)]
    return [tuple(t.transpose(1, 2).flatten(0, 1) for t in group) for group in rows]


def hidden(
    case: Case, begin: int, end: int, seqlen_q: int, seqlen_kv: int, like: Tensor
) -> Tensor | None:
    """Mask (rows, keys), true where row begin + i must not see key j; None if all are seen."""
    right = 0 if case.causal else case.window_right
    if right < 0 and case.window_left < 0:
        return None
    place = torch.arange(begin, end, device=like.device)[:, None] + seqlen_kv - seqlen_q
    key = torch.arange(seqlen_kv, device=like.device)[None]
    mask = torch.zeros(end - begin, seqlen_kv, dtype=torch.bool, device=like.device)
    if right >= 0:
        mask |= key > place + right
    if case.window_left >= 0:
        mask |= key < place - case.window_left
    return mask


def slice_bytes(like: Tensor) -> int:
    """How large one temporary tensor may be."""
    if not like.is_cuda:
        return SLICE_BYTES["cpu"]
    return min(SLICE_BYTES["cuda"], torch.cuda.mem_get_info(like.device)[0] // 12)


def attend(
    case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """One group, heads first; k and v have as many heads as q. Gradients if dout is given."""
    heads, seqlen_q, head_dim = q.shape
    seqlen_kv, scale = k.shape[1], 1 / math.sqrt(head_dim)
    out = torch.empty(heads, seqlen_q, v.shape[2], device=q.device, dtype=q.dtype)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    limit = slice_bytes(q)
    rows = max(1, limit // (heads * max(1, seqlen_kv) * q.element_size()))
    for begin in range(0, seqlen_q, rows):
        end = min(begin + rows, seqlen_q)
        part = slice(begin, end)
        s = torch.matmul(q[:, part], k.transpose(1, 2)).mul_(scale)
        bend = None
        if case.softcap:
            bend = torch.tanh_(s.div_(case.softcap))
            s = bend * case.softcap
        mask = hidden(case, begin, end, seqlen_q, seqlen_kv, q)
        if mask is not None:
            s.masked_fill_(mask, -math.inf)
        p = torch.softmax(s, dim=-1).nan_to_num_(nan=0.0)  # a row without keys
        del s
        out[:, part] = p @ v
        if dout is None:
            continue
        ds = dout[:, part] @ v.transpose(1, 2)
        ds -= (dout[:, part] * out[:, part]).sum(-1, keepdim=True)
        ds *= p
        if bend is not None:
            ds *= 1 - bend * bend
        dq[:, part] = torch.matmul(ds, k).mul_(scale)
        dk += torch.matmul(ds.transpose(1, 2), q[:, part]).mul_(scale)
        dv += p.transpose(1, 2) @ dout[:, part]
    return out, (dq, dk, dv) if dout is not None else None


def attend_heads(
    group: int, case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None
) -> list[Tensor]:
    """[out], or [out, dq, dk, dv], of one group; `group` query heads share a kv head."""
    exact = torch.float32 if q.is_cuda else torch.float64
    one_head = 2 * group * k.shape[1] * max(k.shape[2], v.shape[2]) * exact.itemsize
    step = max(1, slice_bytes(q) // max(1, one_head))
    parts = []
    for i in range(0, k.shape[0], step):
        mine, ours = slice(i * group, (i + step) * group), slice(i, i + step)
        keys, values = (t[ours].to(exact).repeat_interleave(group, 0) for t in (k, v))
        grad = None if dout is None else dout[mine].to(exact)
        out, gradients = attend(case, q[mine].to(exact), keys, values, grad)
        if gradients is None:
            parts.append([out])
            continue
        dk, dv = (t.unflatten(0, (-1, group)).sum(1) for t in gradients[1:])
        parts.append([out, gradients[0], dk, dv])
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]


def compute(case: Case, inputs: Inputs, backward: bool) -> Reference:
    """The reference of one set of inputs."""
    if case.kind == "decode":
        groups = cache_groups(case, inputs)
    else:
        groups = list(zip(*(heads_first(case, t.detach()) for t in inputs.leaves), strict=True))
    douts: list[Tensor | None] = [None] * len(groups)
    if backward and inputs.dout is not None:
        douts = list(heads_first(case, inputs.dout))
    group = case.heads // case.kv_heads
    found = [
        attend_heads(group, case, *tensors, dout)
        for tensors, dout in zip(groups, douts, strict=True)
    ]
    out, *grads = (list(results) for results in zip(*found, strict=True))
    return Reference(out, (grads[0], grads[1], grads[2]) if backward else None)


def worst_error(case: Case, got: Tensor, expected: list[Tensor]) -> float:
    """Largest relative error of 64 rows of one head; infinite for NaN and wrong shapes."""
    if case.kind == "decode" and len(expected) > 1:
        parts = [part.transpose(0, 1) for part in got]
    else:
        try:
            parts = heads_first(case, got)
        except (RuntimeError, IndexError):
            return math.inf
    if [part.shape for part in parts] != [want.shape for want in expected]:
        return math.inf
    sizes = [block_norms(want) for want in expected]
    # Rows that cancel to nearly nothing are judged by the tensor's usual size.
    floor = 0.5 * torch.cat([size.flatten() for size in sizes]).square().mean().sqrt()
    worst = torch.zeros((), device=got.device, dtype=expected[0].dtype)
    for part, want, size in zip(parts, expected, sizes, strict=True):
        error = block_norms(part.to(want.dtype) - want)
        error /= torch.maximum(size, floor).clamp_min(1e-30)
        worst = torch.maximum(worst, torch.nan_to_num(error, nan=math.inf).max())
    return float(worst)


def block_norms(x: Tensor) -> Tensor:
    """Euclidean norms of blocks of 64 rows; x is (heads, rows, columns)."""
    squares = x.square().sum(-1)
    padded = torch.nn.functional.pad(squares, (0, -squares.shape[1] % ROWS_OF_CHECK))
    return padded.unflatten(1, (-1, ROWS_OF_CHECK)).sum(-1).sqrt()
