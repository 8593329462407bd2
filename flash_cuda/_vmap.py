"""torch.vmap over the ops: the new dimension joins the batch where it can, else one call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_cuda import _handles

# Tensors of a dense call whose first dimension is the batch.
_PER_SEQUENCE = frozenset((
    "q", "k", "v", "dout", "dlse", "out", "lse", "seqused_q", "seqused_k", "leftpad_k", "qv",
    "q_descale", "k_descale", "v_descale",
))  # fmt: skip
# Sequences of these calls do not lie behind each other in equal slots, or a gradient is a sum
# over the batch that must stay apart for each element.
_ONE_BY_ONE = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "cache_batch_idx", "rng_state")
_SUMMED_OVER_BATCH = 8 | 16  # dbias, dsink

Result = tuple[Any, Any]


def _call_of(
    names: tuple[str, ...], in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[dict[str, Any], dict[str, int | None]]:
    call = dict(zip(names, args))  # noqa: B905  trailing defaults are left out
    dims = dict(zip(names, in_dims))  # noqa: B905
    return call, dims


def _can_fold(call: dict[str, Any], dims: dict[str, int | None]) -> bool:
    if any(call.get(name) is not None for name in _ONE_BY_ONE):
        return False
    return dims.get("sink") is None and not call.get("wanted", 7) & _SUMMED_OVER_BATCH


def _fold(name: str, tensor: Tensor, dim: int | None, count: int, batch: int) -> Tensor:
    """Returns the tensor with the vmapped dimension as part of its batch."""
    one_for_all = tensor.dim() == 1 if name == "alibi_slopes" else tensor.shape[0] == 1
    if dim is None and name not in _PER_SEQUENCE and one_for_all:
        return tensor  # broadcasts over the batch, of whatever size
    stacked = tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    if name == "alibi_slopes" and stacked.dim() == 2:  # (count, heads)
        stacked = stacked[:, None].expand(count, batch, -1)
    elif name == "bias" and stacked.shape[1] == 1:
        stacked = stacked.expand(count, batch, *stacked.shape[2:])
    return stacked.flatten(0, 1)


def _one_by_one(
    op: Callable[..., Any], count: int, call: dict[str, Any], dims: dict[str, int | None]
) -> Result:
    results = []
    for i in range(count):
        single = {
            name: value if dims.get(name) is None else value.select(dims[name], i)
            for name, value in call.items()
        }
        results.append(op(**single))
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _batched(op: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Result]:
    """Returns the rule of an op whose tensors have the batch first."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Result:
        call, dims = _call_of(names, in_dims, args)
        count = info.batch_size
        if count == 0:
            raise ValueError("vmap over flash_cuda's attention needs at least one element, got 0")
        if not _can_fold(call, dims):
            return _one_by_one(op, count, call, dims)
        q, q_dim = call["q"], dims["q"]
        batch = q.shape[0] if q_dim is None else q.movedim(q_dim, 0).shape[1]
        folded = {
            name: _fold(name, value, dims[name], count, batch)
            if isinstance(value, Tensor) and name != "sink"
            else value
            for name, value in call.items()
        }
        results = op(**folded)
        # What a backward call leaves out has one dimension and no elements.
        unfolded = tuple(
            r.new_empty(count, 0) if r.dim() == 1 else r.view(count, batch, *r.shape[1:])
            for r in results
        )
        return unfolded, (0,) * len(unfolded)

    return rule


def _combine_rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Result:
    call, dims = _call_of(("out_partial", "lse_partial", "dtype"), in_dims, args)
    count = info.batch_size
    for name in ("out_partial", "lse_partial"):  # (splits, batch, ...): fold into dimension 1
        tensor, dim = call[name], dims[name]
        if dim is None:
            stacked = tensor.unsqueeze(1).expand(-1, count, *tensor.shape[1:])
        else:
            stacked = tensor.movedim(dim, 1)
        call[name] = stacked.flatten(1, 2)
    results = _handles.COMBINE(**call)
    return tuple(r.view(count, -1, *r.shape[1:]) for r in results), (0, 0)


def _kv_append_rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Result:
    if in_dims[0] is None or in_dims[1] is None:
        raise ValueError(
            "vmap over kv_append_ needs k_cache and v_cache to be mapped too: all elements would "
            "write to the same cache"
        )
    for i in range(info.batch_size):
        _handles.KV_APPEND(*(
            arg if dim is None else arg.select(dim, i)
            for arg, dim in zip(args, in_dims, strict=True)
        ))  # fmt: skip
    return None, None


def _register() -> None:
    for name, rule in (
        ("fwd", _batched(_handles.FWD, _handles.FWD_NAMES)),
        ("bwd", _batched(_handles.BWD, _handles.BWD_NAMES)),
        ("combine", _combine_rule),
        ("kv_append_", _kv_append_rule),
    ):
        torch.library.register_vmap(f"flash_cuda::{name}", rule)


_register()
