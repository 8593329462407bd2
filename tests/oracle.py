"""Attention that is right because it is simple: dense, float64, one formula a line.

Nothing here is shared with what it judges: no tiles, no running maxima, no helper of the engine.
Every entry of S and P exists at once, gradients are written out, and test_reference.py checks
them against autograd. `solve` takes the arguments of the ops; `Precision` turns the same formulas
into what PyTorch gives in a lower dtype, whose error is the yardstick of check.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

INF = float("inf")


@dataclass(frozen=True)
class Precision:
    """How the formulas are evaluated.

    Attributes:
        compute: dtype of sums and of everything between the products.
        rounded: dtype of P, dS and the results, None to leave them in `compute`.
        p_rounded: dtype of P alone, where it differs (fp8 kernels multiply an fp8 P).
    """

    compute: torch.dtype = torch.float64
    rounded: torch.dtype | None = None
    p_rounded: torch.dtype | None = None

    def round(self, x: Tensor) -> Tensor:
        return x if self.rounded is None else x.to(self.rounded).to(self.compute)

    def round_p(self, p: Tensor) -> Tensor:
        if self.p_rounded is None:
            return self.round(p)
        # An 8-bit P is stored relative to the row's largest entry, times 256 of at most 448.
        largest = p.amax(-1, keepdim=True).clamp(min=1e-30)
        stored = (p / largest * 256.0).to(self.p_rounded).to(self.compute)
        return stored / 256.0 * largest


EXACT = Precision()


def philox4x32(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32 with ten rounds, on uint64 arrays that hold 32-bit words."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    x = [np.asarray(c, dtype=np.uint64) for c in counter]
    k0, k1 = key
    for _ in range(10):
        left = x[0] * np.uint64(0xD2511F53)
        right = x[2] * np.uint64(0xCD9E8D57)
        x = [
            (right >> shift) ^ x[1] ^ np.uint64(k0),
            right & low,
            (left >> shift) ^ x[3] ^ np.uint64(k1),
            left & low,
        ]
        k0 = (k0 + 0x9E3779B9) % 2**32
        k1 = (k1 + 0xBB67AE85) % 2**32
    return x


def dropout_keep(rng_state: Tensor, p: float, pair: int, rows: int, columns: int) -> Tensor:
    """Which entries of P survive, (rows, columns) bool, for pair = batch * num_heads_q + head."""
    seed, offset = (int(x) % 2**64 for x in rng_state.tolist())
    row = np.arange(rows, dtype=np.uint64)[:, None]
    column = np.arange(columns, dtype=np.uint64)[None, :]
    zero = np.zeros((rows, columns), dtype=np.uint64)
    words = philox4x32(
        [zero + column // np.uint64(4), zero + row, zero + np.uint64(pair),
         zero + np.uint64(offset % 2**32)],
        (seed % 2**32, seed >> 32),
    )  # fmt: skip
    chosen = np.choose((column % np.uint64(4) + zero).astype(np.int64), words)
    threshold = int(np.floor(np.float64(np.float32(p)) * 2.0**32 + 0.5))
    return torch.from_numpy(chosen.astype(np.int64) >= threshold)


def visible(
    rows: int, keys: int, left: int, right: int, chunk: int, top_left: bool, device: Any
) -> Tensor:
    """(rows, keys) bool, straight from the definition of the masks."""
    position = torch.arange(rows, device=device)[:, None]
    if not top_left:
        position = position + keys - rows
    key = torch.arange(keys, device=device)[None, :]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if left != -1:
        seen &= position - key <= left
    if right != -1:
        seen &= key - position <= right
    if chunk > 0:
        seen &= torch.div(key, chunk, rounding_mode="floor") == torch.div(
            position, chunk, rounding_mode="floor"
        )
    return seen


def sequence(
    q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor, scale: float, softcap: float = 0.0,
    qv: Tensor | None = None, distance_slope: Tensor | None = None, bias: Tensor | None = None,
    sink: Tensor | None = None, keep: Tensor | None = None, dropout_p: float = 0.0,
    dout: Tensor | None = None, dlse: Tensor | None = None, precision: Precision = EXACT,
) -> dict[str, Tensor]:  # fmt: skip
    """One sequence, all heads.

    Args:
        q: (rows, heads, head_dim), k: (keys, heads, head_dim), v: (keys, heads, head_dim_v); all
            three already in precision.compute and with equal head counts.
        seen: (rows, keys) bool.
        scale: factor of q.k.
        softcap: 0 for none.
        qv: (rows, heads, head_dim_v).
        distance_slope: (heads, rows, keys), what ALiBi subtracts.
        bias: (heads or 1, rows or 1, keys).
        sink: (heads,).
        keep: (heads, rows, keys) bool, dropout.
        dropout_p: its probability.
        dout: (rows, heads, head_dim_v); gradients are returned if given.
        dlse: (heads, rows).
        precision: see Precision.

    Returns:
        out (rows, heads, head_dim_v), lse (heads, rows), score (see `solve`), and dq, dk, dv like
        q, k, v; dbias (heads, rows, keys), dsink (heads,), and spreads, see `solve`.
    """
    rd = precision.round
    heads, rows, keys = q.shape[1], q.shape[0], k.shape[0]
    s = torch.einsum("ihd,jhd->hij", q, k)
    if qv is not None:
        s = s + torch.einsum("ihd,jhd->hij", qv, v)
    s = s * scale
    score = s[:, seen].abs().amax() if seen.any() else s.new_zeros(())
    t = torch.tanh(s / softcap) if softcap > 0 else None
    if t is not None:
        s = softcap * t
    if distance_slope is not None:
        s = s - distance_slope
    if bias is not None:
        s = s + bias
    s = torch.where(seen, s, -INF)
    extra = torch.full((heads, rows, 1), -INF, dtype=s.dtype, device=s.device)
    if sink is not None:
        extra = sink[:, None, None].expand(heads, rows, 1)
    logits = torch.cat((s, extra), dim=-1)
    lse = torch.logsumexp(logits, dim=-1)
    # exp(s - lse) is off by the last place of both: ALiBi and a bias may leave a row nothing but
    # logits far from 0. Beyond some thousand they would excuse anything.
    far = lse.abs()[lse.abs() < 4096.0]
    score = torch.maximum(score, far.amax()) if far.numel() else score
    no_keys = lse == -INF
    # Not exp(s - lse): next to a logit of -1e8 the sum is lost in lse.
    all_p = torch.softmax(logits.masked_fill(no_keys[..., None], 0.0), dim=-1)
    all_p = all_p.masked_fill(no_keys[..., None], 0.0)
    p = all_p[..., :-1]
    factor = torch.ones_like(p) if keep is None else keep.to(p.dtype) / (1.0 - dropout_p)
    p_used = precision.round_p(p * factor) if keys else p
    out = rd(torch.einsum("hij,jhd->ihd", p_used, v))
    result = {"out": out, "lse": lse, "score": score}
    if dout is None:
        return result
    delta = (dout * out).sum(-1).transpose(0, 1)
    if dlse is not None:
        delta = delta - torch.where(no_keys, 0.0, dlse)
    dp = torch.einsum("ihd,jhd->hij", dout, v) * factor
    ds = p * (dp - delta[..., None])
    result["dbias"] = ds
    # How far rounding of the entries of out moves delta, squared, in units of that rounding.
    spread = (dout * out).pow(2).sum(-1).transpose(0, 1)
    result["dbias_spread"] = p.pow(2) * spread[..., None]
    if sink is not None:
        p_sink = all_p[..., -1]
        result["dsink"] = -(p_sink * delta).sum(1)
        result["dsink_spread"] = (p_sink.pow(2) * spread).sum(1)
    slope = p if t is None else p * (1.0 - t * t)
    if t is not None:
        ds = ds * (1.0 - t * t)
    ds = rd(ds)
    result["dq"] = scale * torch.einsum("hij,jhd->ihd", ds, k)
    result["dk"] = scale * torch.einsum("hij,ihd->jhd", ds, q)
    pulled = scale * torch.einsum("hij,jhd->ihd", slope, k)  # by a delta that is off by one
    result["dq_spread"] = pulled.pow(2) * spread.transpose(0, 1)[..., None]
    weight = slope.pow(2) * spread[..., None]
    result["dk_spread"] = scale**2 * torch.einsum("hij,ihd->jhd", weight, q.pow(2))
    result["dv"] = torch.einsum("hij,ihd->jhd", rd(p * factor), dout)
    return result


def _cached_rows(cache: Tensor, kw: dict[str, Any], b: int, count: int) -> Tensor:
    """The first `count` rows of sequence b of k or v, whatever the layout."""
    if kw.get("block_table") is not None:
        size = cache.shape[1]
        table = kw["block_table"][b].tolist()
        rows = [cache[table[j // size], j % size] for j in range(count)]
        return torch.stack(rows) if rows else cache.new_zeros(0, *cache.shape[2:])
    if kw.get("cu_seqlens_k") is not None:
        first = int(kw["cu_seqlens_k"][b])
        return cache[first : first + count]
    slot = b if kw.get("cache_batch_idx") is None else int(kw["cache_batch_idx"][b])
    return cache[slot, :count]


def _length(used: Tensor | None, cu: Tensor | None, rows: int, b: int) -> int:
    if used is not None:
        return int(used[b])
    return int(cu[b + 1] - cu[b]) if cu is not None else rows


class _Call:
    """A call's tensors in the dtype of the formulas, cut into sequences."""

    def __init__(self, kw: dict[str, Any], precision: Precision) -> None:
        self.kw, self.precision = kw, precision
        self.q, self.k, self.v = kw["q"], kw["k"], kw["v"]
        self.packed = kw.get("cu_seqlens_q") is not None
        self.heads, self.heads_kv = self.q.shape[-2], self.k.shape[-2]
        self.group = self.heads // self.heads_kv
        if self.packed:
            self.batch = kw["cu_seqlens_q"].shape[0] - 1
        else:
            self.batch = self.q.shape[0]

    def rows(self, b: int) -> tuple[int, int]:
        """First row of sequence b (packed) and how many count."""
        cu = self.kw.get("cu_seqlens_q")
        count = _length(self.kw.get("seqused_q"), cu, 0 if self.packed else self.q.shape[1], b)
        return (int(cu[b]) if cu is not None else 0), count

    def keys(self, b: int) -> tuple[int, int]:
        """First key of sequence b that counts (left padding), and the one past the last."""
        table = self.kw.get("block_table")
        rows = self.k.shape[1] if table is None else table.shape[1] * self.k.shape[1]
        last = _length(self.kw.get("seqused_k"), self.kw.get("cu_seqlens_k"), rows, b)
        pad = self.kw.get("leftpad_k")
        return (int(pad[b]) if pad is not None else 0), last

    def query_rows(self, x: Tensor, b: int) -> Tensor:
        first, count = self.rows(b)
        return x[first : first + count] if self.packed else x[b, :count]

    def lse_rows(self, x: Tensor, b: int) -> Tensor:
        first, count = self.rows(b)
        return x[:, first : first + count] if self.packed else x[b, :, :count]

    def convert(self, x: Tensor, descale: str, b: int) -> Tensor:
        """Into the compute dtype, times the scales of fp8, heads repeated as q has them."""
        x = x.to(self.precision.compute)
        scales = self.kw.get(descale)
        if scales is not None:
            x = x * scales[b].to(x.dtype).repeat_interleave(x.shape[1] // self.heads_kv)[:, None]
        return x.repeat_interleave(self.heads // x.shape[1], dim=1)

    def scale(self) -> float:
        if self.kw.get("softmax_scale") is not None:
            return float(self.kw["softmax_scale"])
        width = self.q.shape[-1]
        if self.kw.get("qv") is not None:
            width += self.v.shape[-1]
        return width**-0.5

    def options(self, b: int, rows: int, keys: int) -> dict[str, Any]:
        """The arguments of `sequence` beside the tensors."""
        kw, compute = self.kw, self.precision.compute
        top_left = kw.get("top_left", False)
        device = self.q.device
        options: dict[str, Any] = {
            "seen": visible(
                rows, keys, kw.get("window_left", -1), kw.get("window_right", -1),
                kw.get("attention_chunk", 0), top_left, device,
            ),
            "scale": self.scale(),
            "softcap": kw.get("softcap", 0.0),
            "dropout_p": kw.get("dropout_p", 0.0),
            "precision": self.precision,
        }  # fmt: skip
        if kw.get("qv") is not None:
            options["qv"] = self.convert(self.query_rows(kw["qv"], b), "q_descale", b)
        if kw.get("alibi_slopes") is not None:
            slopes = kw["alibi_slopes"].to(compute)
            slopes = slopes if slopes.dim() == 1 else slopes[b]
            i = torch.arange(rows, device=device)[:, None] + (0 if top_left else keys - rows)
            distance = (i - torch.arange(keys, device=device)).abs().to(compute)
            options["distance_slope"] = slopes[:, None, None] * distance
        if kw.get("bias") is not None:
            bias = kw["bias"][b if kw["bias"].shape[0] > 1 else 0].to(compute)
            options["bias"] = (bias if bias.shape[1] == 1 else bias[:, :rows])[..., :keys]
        if kw.get("sink") is not None:
            options["sink"] = kw["sink"].to(compute)
        if kw.get("dropout_p", 0.0) > 0.0:
            state, p = kw["rng_state"], kw["dropout_p"]
            options["keep"] = torch.stack(
                [dropout_keep(state, p, b * self.heads + h, rows, keys) for h in range(self.heads)]
            ).to(device)
        return options


def _grouped(x: Tensor, heads_kv: int) -> Tensor:
    """Sums the gradient of repeated heads, (keys, heads, dim) -> (keys, heads_kv, dim)."""
    return x.reshape(x.shape[0], heads_kv, x.shape[1] // heads_kv, x.shape[-1]).sum(2)


def _add_dbias(total: Tensor, ds: Tensor, b: int) -> None:
    """Adds dS (heads, rows, keys) to the places of bias it came from."""
    place = total[b if total.shape[0] > 1 else 0]
    if place.shape[0] == 1:
        ds = ds.sum(0, keepdim=True)
    if place.shape[1] == 1:
        ds = ds.sum(1, keepdim=True)
    place[:, : ds.shape[1], : ds.shape[2]] += ds


def solve(
    kw: dict[str, Any], dout: Tensor | None = None, dlse: Tensor | None = None,
    precision: Precision = EXACT,
) -> dict[str, Tensor]:  # fmt: skip
    """The right results of a call.

    Args:
        kw: arguments of the op `fwd` by name; what it does not need for the result is ignored.
        dout: upstream gradient of out, or None for the forward alone.
        dlse: upstream gradient of lse.
        precision: see Precision.

    Returns:
        out and lse, score (the largest |scale * q.k| that counts, or |lse|), and with dout also dq,
        dk, dv, dbias and dsink (where there is a bias, a sink), whole: rows that do not count are
        0, their lse -inf. dq, dk, dsink and dbias are sums of terms of both signs; NAME_spread is
        how far the rounding of out moves each, squared, in units of that rounding.
    """
    call = _Call(kw, precision)
    dtype, q = precision.compute, call.q
    bias, sink = kw.get("bias"), kw.get("sink")
    lse_shape = (call.heads, q.shape[0]) if call.packed else (q.shape[0], call.heads, q.shape[1])

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=q.device)

    result = {"out": zeros(*q.shape[:-1], call.v.shape[-1]), "lse": zeros(*lse_shape) - INF}
    result["score"] = zeros()
    if dout is not None:
        result.update(dq=zeros(*q.shape), dk=zeros(*call.k.shape), dv=zeros(*call.v.shape))
        result.update(dq_spread=zeros(*q.shape), dk_spread=zeros(*call.k.shape))
        if bias is not None:
            result["dbias"] = zeros(*bias.shape)
            result["dbias_spread"] = zeros(*bias.shape)
        if sink is not None:
            result["dsink"] = zeros(*sink.shape)
            result["dsink_spread"] = zeros(*sink.shape)
    for b in range(call.batch):
        (_, rows), (first, last) = call.rows(b), call.keys(b)
        keys = max(last - first, 0)
        one = sequence(
            call.convert(call.query_rows(q, b), "q_descale", b),
            call.convert(_cached_rows(call.k, kw, b, last)[first:], "k_descale", b),
            call.convert(_cached_rows(call.v, kw, b, last)[first:], "v_descale", b),
            dout=None if dout is None else call.query_rows(dout, b).to(dtype),
            dlse=None if dlse is None else call.lse_rows(dlse, b).to(dtype),
            **call.options(b, rows, keys),
        )
        call.query_rows(result["out"], b)[:] = one["out"]
        call.lse_rows(result["lse"], b)[:] = one["lse"]
        result["score"] = torch.maximum(result["score"], one["score"])
        if dout is None:
            continue
        call.query_rows(result["dq"], b)[:] = precision.round(one["dq"])
        call.query_rows(result["dq_spread"], b)[:] = one["dq_spread"]
        for name in ("dk", "dv"):
            place = _cached_rows(result[name], kw, b, last)[first:]
            place[:] = precision.round(_grouped(one[name], call.heads_kv))
        place = _cached_rows(result["dk_spread"], kw, b, last)[first:]
        place[:] = _grouped(one["dk_spread"], call.heads_kv)
        if bias is not None:
            _add_dbias(result["dbias"], one["dbias"], b)
            _add_dbias(result["dbias_spread"], one["dbias_spread"], b)
        if sink is not None:
            result["dsink"] += one["dsink"]
            result["dsink_spread"] += one["dsink_spread"]
    return result


def combine(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merged partial results, in float64: (splits, B, S, H, D) and (splits, B, H, S)."""
    lses = lses.double()
    lse = torch.logsumexp(lses, dim=0)
    share = torch.exp(lses - torch.where(lse == -INF, 0.0, lse))
    weighted = share.transpose(2, 3)[..., None] * outs.double()
    out = torch.where(share.transpose(2, 3)[..., None] == 0.0, 0.0, weighted).sum(0)
    return out, lse
