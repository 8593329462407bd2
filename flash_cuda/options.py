"""From what callers say to the arguments of `fwd`."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

import torch
from torch import Tensor

# Keys seen to the left and to the right, inclusive; None or -1 is all of them.
Window = tuple[int | None, int | None]


def window_ends(causal: bool, window: Window) -> tuple[int, int]:
    """Returns the ends as `fwd` takes them: -1 is unlimited, and causal is a right end of 0."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(
            f"window must be a pair (left, right) of integers or None, got {window!r}"
        ) from None
    left = -1 if left is None else left
    return left, 0 if causal else (-1 if right is None else right)


def refuse_others(**tensors: Any) -> None:
    """Raises a TypeError for the first that is no tensor."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {value!r:.60} ({type(value).__name__})")


def batch_of(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """Returns the number of sequences."""
    if cu_seqlens_q is None:
        refuse_others(q=q)
        return q.shape[0]
    refuse_others(cu_seqlens_q=cu_seqlens_q)
    return cu_seqlens_q.shape[0] - 1


def cache_lengths(
    seqlens: Tensor | SupportsIndex | None, batch: int, device: torch.device
) -> Tensor | None:
    """Returns cache_seqlens as a (batch,) int32 tensor: one number is that of every sequence."""
    if seqlens is None or isinstance(seqlens, Tensor):
        return seqlens
    if not isinstance(seqlens, int):  # asked first: torch.compile knows this one
        if not isinstance(seqlens, SupportsIndex):
            raise TypeError(
                "cache_seqlens must be an int32 tensor, an integer or None, "
                f"got {seqlens!r:.60} ({type(seqlens).__name__})"
            )
        seqlens = operator.index(seqlens)
    try:
        return torch.full((batch,), seqlens, dtype=torch.int32, device=device)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ValueError(f"cache_seqlens must be an integer of 32 bits, got {seqlens}") from None


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
        options["softmax_scale"] = softmax_scale
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
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    pack_gqa: bool | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    split_size: int = 0,
    top_left: bool = False,
    strict: bool = False,
    **rest: Any,
) -> dict[str, Any]:
    """Returns the arguments of `fwd` by name, without those that have their default.

    Short on purpose: each argument that is passed costs host time at every call.
    """
    options = {name: value for name, value in rest.items() if value is not None}
    for name in ("sink", "alibi_slopes"):
        if name in options:
            options[name] = _as_statistic(options[name], q)
    left, right = window_ends(causal, window)
    if left != -1:
        options["window_left"] = left
    if right != -1:
        options["window_right"] = right
    if softcap:
        options["softcap"] = softcap
    if attention_chunk:
        options["attention_chunk"] = attention_chunk
    if num_splits:
        options["num_splits"] = num_splits
    if split_size:
        options["split_size"] = split_size
    if top_left:
        options["top_left"] = True
    if strict:
        options["strict"] = True
    if pack_gqa is not None:
        if not isinstance(pack_gqa, int):
            raise TypeError(
                "pack_gqa must be True, False or None, "
                f"got {pack_gqa!r:.60} ({type(pack_gqa).__name__})"
            )
        options["pack_gqa"] = int(pack_gqa)
    if dropout_p:
        options["dropout_p"] = dropout_p
        options["rng_state"] = draw_rng_state(dropout_p, q.device)
    return options


def _as_statistic(tensor: Tensor, q: Tensor) -> Tensor:
    """Casts a parameter that models keep in 16 bits to the type that logits are formed in."""
    if not hasattr(tensor, "is_floating_point"):
        return tensor  # the op says what is wrong with it
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# By type of the schema: how an argument is called in an error, and what such a value has.
_TYPES = {
    "int": ("an integer", "__index__"),
    "SymInt": ("an integer", "__index__"),
    "float": ("a number", "__float__"),
    "bool": ("True or False", "__bool__"),
}


def refuse_types(op: Any, call: dict[str, Any]) -> None:
    """Raises a TypeError for the first argument of another type than the schema has for it."""
    for argument in op._schema.arguments:
        kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
        value = call.get(argument.name, argument.default_value)
        if kind == "Tensor":
            words = "a tensor"
            wrong = not isinstance(value, Tensor) and (value is not None or argument.name in "qkv")
            if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_quantized):
                kind = "quantized" if value.is_quantized else str(value.layout)
                raise TypeError(f"{argument.name} must be a plain dense tensor, got a {kind} one")
        else:
            words, method = _TYPES[kind]
            wrong = value is not None and not hasattr(value, method)
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                words, wrong = f"{words} of 64 bits", True
        if wrong:
            name = "window" if argument.name.startswith("window_") else argument.name
            raise TypeError(f"{name} must be {words}, got {value!r:.60} ({type(value).__name__})")
