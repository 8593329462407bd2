"""What tracing and counting need to know of the ops: shapes of results, and FLOPs.

The fakes serve FakeTensor and meta tensors, with symbolic sizes. FLOPs are counted as torch counts
its own attention: every pair of a query and a key of the same sequence, whatever the mask hides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from flash_cuda import _handles

_OPS = "flash_cuda::"


def _out_dtype(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def _accumulate_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _refuse_other_devices(tensors: dict[str, Tensor], q: Tensor) -> None:
    """torch sends a mix of cpu and meta tensors here."""
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {tensor.device}")


def _fake_fwd(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    _refuse_other_devices({"k": k, "v": v}, q)
    *batch, rows, heads, _ = q.shape
    out = q.new_empty([*q.shape[:-1], v.shape[-1]], dtype=_out_dtype(q))
    return out, q.new_empty([*batch, heads, rows], dtype=_accumulate_dtype(q))


def _fake_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = {**dict(zip(_handles.BWD_NAMES, args)), **kwargs}  # noqa: B905
    q, wanted = call["q"], call.get("wanted", 7)
    _refuse_other_devices({name: call[name] for name in ("k", "v", "dout", "out", "lse")}, q)
    dtype = _accumulate_dtype(q)
    like = (
        (q, q.dtype),
        (call["k"], call["k"].dtype),
        (call["v"], call["v"].dtype),
        (call.get("bias"), dtype),
        (call.get("sink"), dtype),
    )
    return tuple(
        q.new_empty(t.shape if t is not None and wanted >> bit & 1 else [0], dtype=gradient_dtype)
        for bit, (t, gradient_dtype) in enumerate(like)
    )


def _fake_combine(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    out = out_partial.new_empty(out_partial.shape[1:], dtype=dtype or out_partial.dtype)
    return out, lse_partial.new_empty(lse_partial.shape[1:])


def _fake_kv_append_(*args: Any, **kwargs: Any) -> None:
    return None


# ---- FLOPs ---------------------------------------------------------------------------------------


def _lengths(call: dict[str, Any], side: str) -> list[int]:
    """Rows (side "q") or keys ("k") of each sequence; bounds where values cannot be read."""
    tensor = call[side]
    cu_seqlens, used = call.get(f"cu_seqlens_{side}"), call.get(f"seqused_{side}")
    table = call.get("block_table") if side == "k" else None
    if table is not None:
        slots = [table.shape[1] * tensor.shape[1]] * table.shape[0]
    elif cu_seqlens is None:
        batch = tensor.shape[0] if side == "q" else len(_lengths(call, "q"))
        slots = [tensor.shape[1]] * batch
    elif _readable(cu_seqlens):
        slots = cu_seqlens.diff().tolist()
    else:
        bound = call.get(f"max_seqlen_{side}") or tensor.shape[0]
        slots = [bound] * (cu_seqlens.shape[0] - 1)
    if used is not None and _readable(used):
        slots = [min(n, slot) for n, slot in zip(used.tolist(), slots, strict=True)]
    return slots


def _readable(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def _pairs(call: dict[str, Any]) -> int:
    rows, keys = _lengths(call, "q"), _lengths(call, "k")
    heads: int = call["q"].shape[-2]
    return heads * sum(n * m for n, m in zip(rows, keys, strict=True))


def _flops_fwd(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = {**dict(zip(_handles.FWD_NAMES, args)), **kwargs}  # noqa: B905
    head_dim, head_dim_v = call["q"].shape[-1], call["v"].shape[-1]
    columns = head_dim + head_dim_v + (0 if call.get("qv") is None else head_dim_v)
    return 2 * _pairs(call) * int(columns)


def _flops_bwd(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = {**dict(zip(_handles.BWD_NAMES, args)), **kwargs}  # noqa: B905
    # S again, dQ and dK over head_dim; dP and dV over head_dim_v.
    columns = 3 * call["q"].shape[-1] + 2 * call["v"].shape[-1]
    return 2 * _pairs(call) * int(columns)


def _flops_combine(out_partial: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return 2 * out_partial.numel()


def _register() -> None:
    torch.library.register_fake(_OPS + "fwd", _fake_fwd)
    torch.library.register_fake(_OPS + "_fwd_dense", _fake_fwd)
    torch.library.register_fake(_OPS + "bwd", _fake_bwd)
    torch.library.register_fake(_OPS + "combine", _fake_combine)
    torch.library.register_fake(_OPS + "kv_append_", _fake_kv_append_)
    ops = torch.ops.flash_cuda
    register_flop_formula(ops.fwd, get_raw=True)(_flops_fwd)
    register_flop_formula(ops.bwd, get_raw=True)(_flops_bwd)
    register_flop_formula(ops.combine, get_raw=True)(_flops_combine)


_register()
