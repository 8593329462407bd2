"""From the arguments of an op to parts: heads and sequences of equal length, worked on together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .mask import Mask
from .options import EngineOptions


@dataclass(frozen=True)
class Part:
    """Sequences [b0, b1) and KV heads [h0, h1) that share lengths, places and mask."""

    b0: int
    b1: int
    h0: int
    h1: int
    q_row0: int
    kv_row0: int
    kv_batch: int
    mask: Mask

    @property
    def seqlen_q(self) -> int:
        """Query rows that count."""
        return self.mask.seqlen_q

    @property
    def seqlen_kv(self) -> int:
        """Keys that count."""
        return self.mask.seqlen_kv


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of scores and sums: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _ints(x: Tensor | None) -> list[int] | None:
    return None if x is None else [int(i) for i in x.tolist()]


@dataclass
class Problem:
    """One call, forward or backward: its tensors and options, and how to look into them.

    The names are those of the op. `group` is the number of query heads that share a KV head.
    All views returned for a part have the shape (sequences, kv_heads, group, rows, ...) on the
    query side and (sequences, kv_heads, keys, ...) on the key side.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None
    block_table: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    qv: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    rng_state: Tensor | None = None
    softmax_scale: float | None = None
    window_left: int = -1
    window_right: int = -1
    attention_chunk: int = 0
    top_left: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    options: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        """Derives the sizes."""
        self.packed_q = self.cu_seqlens_q is not None
        self.num_heads_q, self.num_heads_kv = self.q.shape[-2], self.k.shape[-2]
        self.group = self.num_heads_q // self.num_heads_kv if self.num_heads_kv else 1
        self.dtype = compute_dtype(self.q.dtype)
        if self.cu_seqlens_q is not None:
            self.batch = self.cu_seqlens_q.numel() - 1
        else:
            self.batch = self.q.shape[0]
        if self.softmax_scale is None:
            latent = 0 if self.qv is None else self.qv.shape[-1]
            self.scale = float(max(self.q.shape[-1] + latent, 1)) ** -0.5
        else:
            self.scale = self.softmax_scale

    # ---- sizes of tiles -----------------------------------------------------------------

    @property
    def enlarged(self) -> int:
        """Factor of the sides of a tile: threads wait for each other after every operation."""
        return 1 if torch.get_num_threads() == 1 else 2

    def block_q(self, part: Part) -> int:
        """Returns the query rows of a tile."""
        block_q = self.options.block_q or 128 * self.enlarged
        return max(1, min(block_q, part.seqlen_q))

    def block_kv(self, part: Part) -> int:
        """Returns the keys of a tile: more of them when there are few query rows."""
        if self.options.block_kv is not None:
            return self.options.block_kv
        return 256 * self.enlarged if self.block_q(part) > 32 else 1024

    # ---- parts --------------------------------------------------------------------------

    def parts(self) -> Iterator[Part]:
        """Yields the parts of the call; together they cover every row that counts."""
        if self.num_heads_q == 0:
            return
        pending: Part | None = None
        for sequence in self._sequences():
            if pending is not None and self._continues(pending, sequence):
                pending = replace(pending, b1=sequence.b1)
                continue
            if pending is not None:
                yield from self._cut(pending)
            pending = sequence
        if pending is not None:
            yield from self._cut(pending)

    def _sequences(self) -> Iterator[Part]:
        """Yields one part a sequence, all heads; the same rules as csrc/common/seqlen.h."""
        cu_q, cu_k = _ints(self.cu_seqlens_q), _ints(self.cu_seqlens_k)
        used_q, used_k = _ints(self.seqused_q), _ints(self.seqused_k)
        leftpad, cache_row = _ints(self.leftpad_k), _ints(self.cache_batch_idx)
        for b in range(self.batch):
            q_row0 = cu_q[b] if cu_q else 0
            seqlen_q = max(cu_q[b + 1] - q_row0, 0) if cu_q else self.q.shape[1]
            if used_q:
                seqlen_q = min(max(used_q[b], 0), seqlen_q)
            kv_row0 = cu_k[b] if cu_k else 0
            if cu_k:
                seqlen_kv = max(cu_k[b + 1] - kv_row0, 0)
            elif self.block_table is not None:
                seqlen_kv = self.block_table.shape[1] * self.k.shape[1]
            else:
                seqlen_kv = self.k.shape[1]
            if used_k:
                seqlen_kv = min(max(used_k[b], 0), seqlen_kv)
            if leftpad:
                kv_row0, seqlen_kv = kv_row0 + leftpad[b], max(seqlen_kv - leftpad[b], 0)
            mask = Mask.make(
                seqlen_q,
                seqlen_kv,
                self.window_left,
                self.window_right,
                self.attention_chunk,
                self.top_left,
            )
            kv_batch = cache_row[b] if cache_row else b
            yield Part(b, b + 1, 0, self.num_heads_kv, q_row0, kv_row0, kv_batch, mask)

    def _continues(self, part: Part, following: Part) -> bool:
        """Whether a sequence can join the ones before it."""
        scattered = (self.cu_seqlens_q, self.cu_seqlens_k, self.block_table, self.cache_batch_idx)
        return (
            all(x is None for x in scattered)
            and following.mask == part.mask
            and following.kv_row0 == part.kv_row0
        )

    def _cut(self, part: Part) -> Iterator[Part]:
        """Cuts a part until its tiles fit the cache: first by sequences, then by heads."""
        tile = self.group * self.block_q(part) * min(self.block_kv(part), max(part.seqlen_kv, 1))
        tile_scores = self.options.tile_scores or (1 << 19) * self.enlarged**2
        pairs = max(1, tile_scores // max(tile, 1))
        heads = min(max(part.h1, 1), pairs)
        sequences = max(1, pairs // max(part.h1, 1))
        for b in range(part.b0, part.b1, sequences):
            b1 = min(b + sequences, part.b1)
            for h in range(0, part.h1, heads):
                h1 = min(h + heads, part.h1)
                yield replace(part, b0=b, b1=b1, h0=h, h1=h1, kv_batch=part.kv_batch + b - part.b0)

    # ---- views of a part ----------------------------------------------------------------

    def query_view(self, x: Tensor, part: Part) -> Tensor:
        """Returns the part's rows of a tensor like q or out: (n, kv_heads, group, rows, dim)."""
        heads = slice(part.h0 * self.group, part.h1 * self.group)
        if self.packed_q:
            rows = x[None, part.q_row0 : part.q_row0 + part.seqlen_q, heads]
        else:
            rows = x[part.b0 : part.b1, : part.seqlen_q, heads]
        return self._by_group(rows, 2, part).permute(0, 2, 3, 1, 4)

    def lse_view(self, x: Tensor, part: Part) -> Tensor:
        """Returns the part's rows of a tensor like lse: (n, kv_heads, group, rows)."""
        heads = slice(part.h0 * self.group, part.h1 * self.group)
        if self.packed_q:
            rows = x[None, heads, part.q_row0 : part.q_row0 + part.seqlen_q]
        else:
            rows = x[part.b0 : part.b1, heads, : part.seqlen_q]
        return self._by_group(rows, 1, part)

    def key_view(self, x: Tensor, part: Part) -> Tensor:
        """Returns the part's rows of a tensor like k or v: (n, kv_heads, keys, dim).

        A view, but a copy where pages have to be gathered. Rows past the length are not touched.
        """
        heads = slice(part.h0, part.h1)
        first, last = part.kv_row0, part.kv_row0 + part.seqlen_kv
        if self.block_table is not None:
            page_size = x.shape[1]
            first_page = first // page_size
            pages = self.block_table[part.b0, first_page : -(-last // page_size)]
            rows = x[pages.long()][:, :, heads].flatten(0, 1)
            rows = rows[None, first - first_page * page_size :][:, : part.seqlen_kv]
        elif self.cu_seqlens_k is not None:
            rows = x[None, first:last, heads]
        else:
            cache = part.kv_batch
            rows = x[cache : cache + part.b1 - part.b0, first:last, heads]
        return rows.transpose(1, 2)

    def head_view(self, x: Tensor, part: Part) -> Tensor:
        """Returns (n or 1, kv_heads, group, 1, 1) of a tensor (num_heads_q) or (batch, ...)."""
        heads = slice(part.h0 * self.group, part.h1 * self.group)
        rows = x[None, heads] if x.dim() == 1 else x[part.b0 : part.b1, heads]
        return self._by_group(rows, 1, part)[..., None, None]

    def bias_view(self, x: Tensor, part: Part) -> Tensor:
        """Returns the part of a tensor like bias: (n, kv_heads, group, rows, keys) or 1."""
        if x.shape[0] > 1:
            x = x[part.b0 : part.b1]
        if x.shape[1] == 1:
            x = x[:, :, None]
        else:
            x = x[:, part.h0 * self.group : part.h1 * self.group]
            x = self._by_group(x, 1, part)
        rows = part.seqlen_q if x.shape[3] > 1 else x.shape[3]
        return x[:, :, :, :rows, : part.seqlen_kv]

    def batch_heads(self, part: Part) -> Tensor:
        """Returns (n, kv_heads, group) int64: batch * num_heads_q + head, for the dropout mask."""
        heads = torch.arange(part.h0 * self.group, part.h1 * self.group)
        pairs = torch.arange(part.b0, part.b1)[:, None] * self.num_heads_q + heads
        return self._by_group(pairs, 1, part)

    def _by_group(self, x: Tensor, dim: int, part: Part) -> Tensor:
        """Splits a dimension of query heads into (kv_heads, group), as a view."""
        return x.view(*x.shape[:dim], part.h1 - part.h0, self.group, *x.shape[dim + 1 :])

    # ---- operands in the compute dtype --------------------------------------------------

    def queries(self, part: Part, factor: float) -> Tensor:
        """Returns q times `factor`, (n, kv_heads, group, rows, head_dim [+ head_dim_v])."""
        q = self.query_view(self.q, part)
        if self.qv is not None:
            q = torch.cat((q, self.query_view(self.qv, part)), dim=-1)
        q = self._descaled(q, self.q_descale, part)
        return q * factor

    def keys(self, part: Part) -> Tensor:
        """Returns k, or [k, v] where qv takes part in the scores: q.k + qv.v = [q, qv].[k, v]."""
        k = self._descaled(self.key_view(self.k, part), self.k_descale, part)
        return k if self.qv is None else torch.cat((k, self.values(part)), dim=-1)

    def values(self, part: Part) -> Tensor:
        """Returns v, (n, kv_heads, keys, head_dim_v)."""
        return self._descaled(self.key_view(self.v, part), self.v_descale, part)

    def _descaled(self, x: Tensor, descale: Tensor | None, part: Part) -> Tensor:
        x = x.to(self.dtype, memory_format=torch.contiguous_format)
        if descale is not None:
            factor = descale[part.b0 : part.b1, part.h0 : part.h1].to(self.dtype)
            x = x * factor.reshape(*factor.shape, *[1] * (x.dim() - 2))
        return x.contiguous()
