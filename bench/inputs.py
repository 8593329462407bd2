"""Tensors of a case, the same for every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case
from .cost import moved_bytes

MAX_SETS = 16


@dataclass
class Inputs:
    """One set of tensors.

    dense: q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_kv, kv_heads, ...).
    varlen: q, k, v (total, heads, head_dim) with cu_seqlens.
    decode: k, v are the cache, (batch, seqlen_kv, ...) or (pages, page_size, ...) with block_table.
    dout has the shape of the output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None
    cu_seqlens: Tensor | None = None  # (batch + 1,) int32
    cache_seqlens: Tensor | None = None  # (batch,) int32; None: the whole cache
    block_table: Tensor | None = None  # (batch, pages of a sequence) int32

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """What gradients are taken for."""
        return self.q, self.k, self.v


def make_inputs(case: Case, device: torch.device, seed: int) -> Inputs:
    """Random normal tensors; the same seed gives the same values."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int, as_type: torch.dtype = dtype) -> Tensor:
        # float8 has no generator of its own.
        drawn = torch.bfloat16 if as_type.itemsize == 1 else as_type
        x = torch.randn(shape, device=device, dtype=drawn, generator=generator)
        return x.to(as_type)

    head = (case.heads, case.head_dim)
    key, value = (case.kv_heads, case.head_dim), (case.kv_heads, case.head_dim_v)
    rows_q: tuple[int, ...] = (case.batch, case.seqlen_q)
    rows_kv: tuple[int, ...] = (case.batch, case.seqlen_kv)
    if case.kind == "varlen":
        rows_q = rows_kv = (sum(case.lengths),)
    if case.kind == "decode" and case.page_size:
        rows_kv = (case.batch * pages_of_sequence(case), case.page_size)
    inputs = Inputs(normal(*rows_q, *head), normal(*rows_kv, *key), normal(*rows_kv, *value))
    if case.kind == "varlen":
        bounds = torch.tensor([0, *case.lengths]).cumsum(0)
        inputs.cu_seqlens = bounds.to(device=device, dtype=torch.int32)
    if case.kind == "decode" and (case.lengths or case.page_size):
        # A full dense cache comes without lengths for everybody: SDPA has no argument for them,
        # and a kernel that knows that all sequences are equally long may use it.
        lengths = torch.tensor([n for _, n in case.spans], dtype=torch.int32)
        inputs.cache_seqlens = lengths.to(device)
        if case.page_size:
            # Pages in random order, as after some time of serving.
            order = torch.randperm(rows_kv[0], device=device, generator=generator)
            inputs.block_table = order.int().view(case.batch, -1)
    if case.needs_backward:
        out_type = torch.bfloat16 if dtype.itemsize == 1 else dtype
        inputs.dout = normal(*rows_q, case.heads, case.head_dim_v, as_type=out_type)
    if case.grad:
        for leaf in inputs.leaves:
            leaf.requires_grad_()
    return inputs


def pages_of_sequence(case: Case) -> int:
    """Pages that one sequence of the cache has."""
    return math.ceil(case.seqlen_kv / case.page_size)


def sets_needed(case: Case, l2_bytes: int) -> int:
    """How many sets to go round, so that none is still in the L2 cache when used again."""
    one = moved_bytes(case, "fwd")
    return min(MAX_SETS, max(3, 1 + math.ceil(3 * l2_bytes / one)))
