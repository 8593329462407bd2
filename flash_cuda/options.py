"""From what callers say to the arguments of `fwd`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch import Tensor

# Keys seen to the left and to the right, inclusive; None or -1 is all of them.
Window = tuple[int | None, int | None]

_INTEGERS = (int, torch.SymInt)
_NUMBERS = (float, int, torch.SymFloat, torch.SymInt)
_LARGEST_LENGTH = (1 << 31) - 1

# ---- one argument --------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """Returns a value as errors show it, short whatever it is."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.60} ({type(value).__name__})"


def as_bool(name: str, value: Any) -> bool:
    """Returns a flag: a bool, also of numpy, 0 or 1, or a tensor of one bool."""
    if value is True or value is False:
        return value
    one_bool = isinstance(value, Tensor) and value.dtype == torch.bool and value.numel() == 1
    is_flag = isinstance(value, int) and value in (0, 1)
    if one_bool or is_flag or type(value).__name__ in ("bool", "bool_", "SymBool"):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {shown(value)}")


def as_integer(name: str, value: Any) -> int:
    """Returns an integer of any type, also of numpy, or a tensor of one."""
    if isinstance(value, _INTEGERS):
        return value  # type: ignore[return-value]
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {shown(value)}") from None


def as_number(name: str, value: Any) -> float:
    """Returns a number of any type, also of numpy, or a tensor of one, which gets no gradient."""
    if isinstance(value, _NUMBERS):
        return value  # type: ignore[return-value]
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} must not require a gradient: flash_cuda computes none for it; for one of "
            "softmax_scale multiply q by the tensor, and give softmax_scale=1.0"
        )
    if hasattr(value, "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            pass  # more than one number
    raise TypeError(f"{name} must be a number, got {shown(value)}")


def refuse_others(**tensors: Any) -> None:
    """Raises a TypeError for the first that is no plain tensor."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {shown(value)}")
        if value.layout is not torch.strided or value.is_quantized:
            kind = "quantized" if value.is_quantized else str(value.layout)
            raise TypeError(f"{name} must be a plain dense tensor, got a {kind} one")


def refuse_negated(**written: Tensor) -> None:
    """Raises a TypeError for a view whose values torch negates at each look."""
    for name, tensor in written.items():
        if tensor.is_neg():
            raise TypeError(f"{name} is written to and must not be a negated view")


def check_length(name: str, length: int) -> None:
    """Raises a ValueError for what is no length."""
    if not 0 <= length <= _LARGEST_LENGTH:
        raise ValueError(f"{name} must be 0 to {_LARGEST_LENGTH}, got {length}")


def refuse_lengths(name: str, lengths: Tensor, batch: int, device: torch.device) -> None:
    """Raises for what is no (batch,) int32 tensor on the device, under the caller's own name."""
    refuse_others(**{name: lengths})
    if lengths.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {str(lengths.dtype).removeprefix('torch.')}")
    if lengths.shape != (batch,):
        raise ValueError(f"{name} must have shape (batch) = ({batch},), got {tuple(lengths.shape)}")
    if lengths.device != device:
        raise ValueError(f"{name} must be on the device of q ({device}), got {lengths.device}")


def write_to(name: str, target: Tensor, result: Tensor) -> Tensor:
    """Copies a result into the caller's tensor, which must have its shape, and returns that."""
    refuse_others(**{name: target})
    if target.device != result.device:
        raise ValueError(f"{name} must be on {result.device}, got {target.device}")
    if target.shape != result.shape:
        raise ValueError(f"{name} must have shape {tuple(result.shape)}, got {tuple(target.shape)}")
    if any(n > 1 and step == 0 for n, step in zip(target.shape, target.stride(), strict=True)):
        raise ValueError(f"{name} is written to and must not be expanded, got {target.stride()}")
    return target.copy_(result)


# ---- several -------------------------------------------------------------------------------------


def window_ends(causal: bool, window: Window) -> tuple[int, int]:
    """Returns the ends as `fwd` takes them: -1 is unlimited, and causal is a right end of 0."""
    if causal is not True and causal is not False:
        causal = as_bool("causal", causal)
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(
            f"window must be a pair (left, right) of integers or None, got {shown(window)}"
        ) from None
    left = -1 if left is None else as_integer("window", left)
    right = -1 if right is None else as_integer("window", right)
    return left, 0 if causal else right


def with_lse(out: Tensor, lse: Tensor, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the output, or a pair."""
    return (out, lse) if as_bool("return_lse", return_lse) else out


def batch_of(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """Returns the number of sequences; 0 of tensors that the checks refuse later."""
    if cu_seqlens_q is None:
        refuse_others(q=q)
        return q.shape[0] if q.dim() else 0
    refuse_others(cu_seqlens_q=cu_seqlens_q)
    return max(cu_seqlens_q.shape[0] - 1, 0) if cu_seqlens_q.dim() else 0


def cache_lengths(
    seqlens: Tensor | SupportsIndex | None, batch: int, device: torch.device
) -> Tensor | None:
    """Returns cache_seqlens as a (batch,) int32 tensor: one number is that of every sequence."""
    if seqlens is None:
        return None
    if isinstance(seqlens, Tensor):
        refuse_lengths("cache_seqlens", seqlens, batch, device)
        return seqlens
    if not isinstance(seqlens, _INTEGERS) and not hasattr(seqlens, "__index__"):
        raise TypeError(
            f"cache_seqlens must be an int32 tensor, an integer or None, got {shown(seqlens)}"
        )
    length = as_integer("cache_seqlens", seqlens)
    check_length("cache_seqlens", length)
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def refuse_beyond(
    cache_seqlens: Any, new_keys: int, k_cache: Tensor, block_table: Tensor | None
) -> None:
    """Raises a ValueError where a number of keys, which is on the host, exceeds the cache."""
    if not isinstance(cache_seqlens, int) or not isinstance(k_cache, Tensor) or k_cache.dim() != 4:
        return  # kv_append_ looks at tensors, where it can
    pages = 1
    if block_table is not None:
        refuse_others(block_table=block_table)
        pages = block_table.shape[-1] if block_table.dim() else 0
    capacity = k_cache.shape[1] * pages
    if cache_seqlens + new_keys > capacity:
        new = f" and {new_keys} new keys" if new_keys else ""
        raise ValueError(
            f"the cache is too small: cache_seqlens {cache_seqlens}{new} "
            f"exceed its capacity of {capacity}"
        )


def draw_rng_state(dropout_p: float, device: torch.device) -> Tensor | None:
    """Returns [seed, offset] of a new dropout mask, or None, without touching the generator.

    A tensor on the device and not a number, so a CUDA graph draws a new one at each replay.
    """
    if dropout_p == 0.0:
        return None
    return torch.randint(0, 1 << 62, (2,), device=device, dtype=torch.int64)


def plain_options(causal: bool, window: Window, softmax_scale: float | None) -> dict[str, Any]:
    """:func:`fwd_options` where nothing else is given, 3 us faster."""
    left, right = window_ends(causal, window)
    options: dict[str, Any] = {}
    if softmax_scale is not None:
        options["softmax_scale"] = as_number("softmax_scale", softmax_scale)
    if left != -1:
        options["window_left"] = left
    if right != -1:
        options["window_right"] = right
    return options


def fwd_options(
    q: Tensor,
    *,
    causal: bool,
    window: Window,
    softmax_scale: float | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    pack_gqa: bool | None = None,
    softcap: float | None = 0.0,
    dropout_p: float | None = 0.0,
    attention_chunk: int | None = 0,
    num_splits: int | None = 0,
    split_size: int | None = 0,
    top_left: bool = False,
    strict: bool = False,
    **tensors: Any,
) -> dict[str, Any]:
    """Returns the arguments of `fwd` by name, without those that have their default.

    Short on purpose: each argument that is passed costs host time at every call. A number that is
    None is off.
    """
    options = {name: value for name, value in tensors.items() if value is not None}
    for name in ("sink", "alibi_slopes"):
        if name in options:
            options[name] = _as_statistic(options[name], q)
    left, right = window_ends(causal, window)
    if left != -1:
        options["window_left"] = left
    if right != -1:
        options["window_right"] = right
    if softmax_scale is not None:
        options["softmax_scale"] = as_number("softmax_scale", softmax_scale)
    if softcap is not None and (softcap := as_number("softcap", softcap)):
        options["softcap"] = softcap
    for name, value in (
        ("attention_chunk", attention_chunk),
        ("num_splits", num_splits),
        ("split_size", split_size),
    ):
        if value is not None and (value := as_integer(name, value)):
            options[name] = value
    for name, hint in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if hint is not None:
            options[name] = as_integer(name, hint)
    if as_bool("top_left", top_left):
        options["top_left"] = True
    if as_bool("strict", strict):
        options["strict"] = True
    if pack_gqa is not None:
        if not isinstance(pack_gqa, int):
            raise TypeError(f"pack_gqa must be True, False or None, got {shown(pack_gqa)}")
        options["pack_gqa"] = int(pack_gqa)
    if dropout_p is not None and (dropout_p := as_number("dropout_p", dropout_p)):
        options["dropout_p"] = dropout_p
        options["rng_state"] = draw_rng_state(dropout_p, q.device)
    return options


def _as_statistic(tensor: Tensor, q: Tensor) -> Tensor:
    """Casts a parameter that models keep in 16 bits to the type that logits are formed in."""
    if isinstance(tensor, torch.dtype) or not hasattr(tensor, "is_floating_point"):
        return tensor  # the op says what is wrong with it
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# By type of the schema.
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "int": as_integer,
    "SymInt": as_integer,
    "float": as_number,
    "bool": as_bool,
}


def refuse_types(op: Any, call: dict[str, Any]) -> None:
    """Raises a TypeError for the first argument of another type than the schema has for it."""
    for argument in op._schema.arguments:
        name, kind = argument.name, str(argument.real_type)
        optional = kind.startswith("Optional[")
        kind = kind.removeprefix("Optional[").removesuffix("]")
        value = call.get(name, argument.default_value)
        if value is None and optional:
            continue
        if kind == "Tensor":
            refuse_others(**{name: value})
            continue
        name = "window" if name.startswith("window_") else name
        number = _READERS[kind](name, value)
        if isinstance(number, int) and not -(1 << 63) <= number < 1 << 63:
            words = "an integer" if "nt" in kind else "a number"
            raise TypeError(f"{name} must be {words} of 64 bits, got {shown(value)}")
