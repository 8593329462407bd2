"""FLOPs and bytes of a case, by the conventions that published figures use."""

from __future__ import annotations

from functools import lru_cache

from .cases import DTYPE_BYTES, Case

# Matrix products of a pass in units of the forward's two: S and dP, dQ, dK, dV and P V.
PASS_FACTOR = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}


def visible_pairs(case: Case) -> float:
    """(query, key) pairs that the masks leave, over the batch, for one head.

    Causal with as many queries as keys counts S^2 / 2, as everyone does; everything else is exact.
    """
    return sum(pairs_of_span(case, seqlen_q, seqlen_kv) for seqlen_q, seqlen_kv in case.spans)


@lru_cache(maxsize=4096)
def pairs_of_span(case: Case, seqlen_q: int, seqlen_kv: int) -> float:
    """Visible pairs of one sequence."""
    right = 0 if case.causal else case.window_right
    left = case.window_left
    if left < 0 and right < 0:
        return float(seqlen_q * seqlen_kv)
    if left < 0 and case.causal and seqlen_q == seqlen_kv:
        return seqlen_q * seqlen_kv / 2
    offset, total = seqlen_kv - seqlen_q, 0
    for row in range(seqlen_q):
        begin = max(0, row + offset - left) if left >= 0 else 0
        end = min(seqlen_kv, row + offset + 1 + right) if right >= 0 else seqlen_kv
        total += max(0, end - begin)
    return float(total)


def flops(case: Case, pass_name: str) -> float:
    """Floating-point operations of a pass.

    Forward 4 * pairs * head_dim a head, backward 2.5 times that.
    """
    forward = 2.0 * visible_pairs(case) * case.heads * (case.head_dim + case.head_dim_v)
    return forward * PASS_FACTOR[pass_name]


def moved_bytes(case: Case, pass_name: str) -> float:
    """Bytes that must cross the memory bus once: inputs and outputs.

    For decode only the keys and values that are read, the figure by which caches are compared.
    """
    size = DTYPE_BYTES[case.dtype]
    out_size = max(2, size)  # float8 inputs give a bfloat16 output
    rows_q = sum(q for q, _ in case.spans)
    rows_kv = sum(kv for _, kv in case.spans)
    keys_values = rows_kv * case.kv_heads * (case.head_dim + case.head_dim_v) * size
    if case.kind == "decode":
        return float(keys_values)
    query = rows_q * case.heads * case.head_dim * size
    out = rows_q * case.heads * case.head_dim_v * out_size
    lse = rows_q * case.heads * 4
    forward = query + keys_values + out + lse
    backward = 2 * (query + keys_values) + 2 * out + lse
    return float({"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[pass_name])


def score_bytes(case: Case) -> float:
    """Bytes of one copy of the scores, which materialised attention keeps in memory."""
    pairs = sum(q * kv for q, kv in case.spans)
    return float(pairs * case.heads * max(2, DTYPE_BYTES[case.dtype]))


def tflops(case: Case, pass_name: str, ms: float) -> float:
    """TFLOP/s."""
    return flops(case, pass_name) / ms / 1e9


def tbps(case: Case, pass_name: str, ms: float) -> float:
    """TB/s."""
    return moved_bytes(case, pass_name) / ms / 1e9
