"""Which kernel would serve a call, here or on a named device, or why none does."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_cuda import _C, _engine
from flash_cuda.options import (
    as_bool,
    as_number,
    check_length,
    fwd_options,
    refuse_others,
    shown,
)

# Compute capabilities by the names that people use.
DEVICES = {
    "a100": 80,
    "a10": 86,
    "a40": 86,
    "rtx 3090": 86,
    "l4": 89,
    "l40s": 89,
    "rtx 4090": 89,
    "gh200": 90,
    "h100": 90,
    "h20": 90,
    "h200": 90,
    "b200": 100,
    "gb200": 100,
    "b300": 103,
    "gb300": 103,
    "rtx 5090": 120,
    "rtx pro 6000": 120,
}
CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)
_NO_DEVICE = (
    f"device must be a torch device, one of {', '.join(DEVICES)}, 'sm90' or '9.0', got {{!r}}"
)
_LARGEST = 1 << 62  # sizes and strides are 64-bit integers in C++
_CPU = -1  # in place of a compute capability
_FLOAT32 = ("alibi_slopes", "sink", "q_descale", "k_descale", "v_descale")
_INT32 = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "block_table",
    "cache_batch_idx",
)  # fmt: skip
_TENSORS = frozenset((*_FLOAT32, *_INT32, "bias", "qv"))
_DEFAULTS = {"causal": False, "window": (None, None)}
_OPTIONS = _TENSORS | frozenset((
    *_DEFAULTS, "softmax_scale", "softcap", "attention_chunk", "top_left", "dropout_p",
    "num_splits", "split_size", "pack_gqa", "strict", "max_seqlen_q", "max_seqlen_k",
    "deterministic",
))  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """What serves one pass of a call.

    Attributes:
        served: whether anything does.
        kernel: its name, ``"sm90_fwd_hdim128"`` or ``"cpu"``; empty if nothing serves the call.
        block_q: query rows of the tile that serves the call (on Hopper's forward it depends on the
            shape; one with fewer rows may end a head); 0 for the CPU engine, as for the next two.
        block_kv: keys of a tile.
        threads: threads of a block.
        cluster: thread blocks that copy K and V together.
        num_splits: parts that the keys are cut into.
        split_size: keys of a part, where the caller fixed them.
        pack_gqa: whether query heads of one KV head share a tile.
        workspace_bytes: device memory that the call takes beside its results.
        reason: why nothing serves the call.
        nearest: what to change so that something does; may be empty.
        text: all of it in a few lines, which ``str()`` gives.
    """

    served: bool
    kernel: str = ""
    block_q: int = 0
    block_kv: int = 0
    threads: int = 0
    cluster: int = 1
    num_splits: int = 1
    split_size: int = 0
    pack_gqa: bool = False
    workspace_bytes: int = 0
    reason: str = ""
    nearest: str = ""
    text: str = ""

    def __str__(self) -> str:
        """The text."""
        return self.text


class _Shape:
    """Stands in for a tensor where only its layout counts."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        strides: Sequence[int] | None = None,
        address: int = 0,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self._address = address
        if strides is None:
            step, reverse = 1, []
            for n in reversed(self.shape):
                reverse.append(step)
                step = min(step * max(n, 1), _LARGEST)
            strides = reverse[::-1]
        self._strides = tuple(strides)

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return self._address

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(self, dtype: torch.dtype) -> _Shape:
        """A cast, as fwd_options makes it of sinks and slopes."""
        return _Shape(self.shape, dtype, self.device)


Described = Tensor | Sequence[int]


def explain(
    q: Described,
    k: Described,
    v: Described,
    *,
    device: str | int | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
    **options: Any,
) -> Explanation:
    """Says which kernel would serve a call of attention, or why none does.

    Nothing is computed, and no device memory is taken.

    Args:
        q: as in :func:`flash_cuda.attention`, :func:`flash_cuda.attention_varlen` or
            :func:`flash_cuda.attention_decode`: a tensor, or a shape.
        k: like `q`.
        v: like `q`.
        device: where the call would run: a torch device, a card (``"H100"``, ``"RTX 5090"``), a
            folder of kernels (``"sm90"``) or a compute capability (``"9.0"``, 90). Default: where
            `q` is; for shapes and meta tensors the current CUDA device, or the CPU without one.
        dtype: of q, k and v where they are shapes.
        backward: explain the gradient instead.
        **options: the keyword arguments of those three functions; tensors may be shapes.

    Returns:
        The explanation; ``print`` it. A wrong argument is a reason too, not an exception.

    Raises:
        ValueError: `device` or an option is not known.
    """
    capability, place = _target(device, q)
    options = _renamed(options)
    try:
        tensors = [_describe(n, t, dtype, place) for n, t in (("q", q), ("k", k), ("v", v))]
        dtype = tensors[0].dtype
        call = _fwd_call(tensors[0], options, dtype, place)
        deterministic = call.pop("deterministic")
        if as_bool("backward", backward):
            return _explain_bwd(capability, tensors, call, deterministic)
        return _explain_fwd(capability, tensors, call)
    except (ValueError, TypeError, NotImplementedError) as error:
        return Explanation(False, reason=str(error), text=f"not served: {error}")


def supported(
    q: Described,
    k: Described,
    v: Described,
    *,
    device: str | int | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
    **options: Any,
) -> bool:
    """Whether a call would be served; :func:`explain` says by what, or why not.

    Args:
        q: see :func:`explain`.
        k: see :func:`explain`.
        v: see :func:`explain`.
        device: see :func:`explain`.
        dtype: see :func:`explain`.
        backward: ask for the gradient.
        **options: see :func:`explain`.

    Returns:
        True if it would.

    Raises:
        ValueError: `device` or an option is not known.
    """
    answer = explain(q, k, v, device=device, dtype=dtype, backward=backward, **options)
    return answer.served


# ---- the device ----------------------------------------------------------------------------------


def _target(device: str | int | torch.device | None, q: Described) -> tuple[int, torch.device]:
    """Returns the compute capability (0: of the device itself, -1: the CPU) and the device."""
    if device is None:
        if isinstance(q, Tensor) and not q.is_meta:
            place = q.device
        else:
            place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        capability = _capability(device)
        if capability is not None:
            return capability, torch.device("cuda", 0)
        place = torch.device(device)
    if place.type == "cpu":
        return _CPU, place
    if place.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(
            f"device {place} is not here: name a card ({', '.join(DEVICES)}), a folder of kernels "
            "('sm90') or a compute capability ('9.0')"
        )
    index = torch.cuda.current_device() if place.index is None else place.index
    major, minor = torch.cuda.get_device_capability(index)
    # A build without kernels knows of no device; the text should still name the card's own kind.
    capability = 0 if _C.build_info()["folders"] else 10 * major + minor
    return capability, torch.device("cuda", index)


def _capability(device: str | int | torch.device) -> int | None:
    """Reads a name; None for a device of torch's."""
    if isinstance(device, torch.device):
        return None
    if isinstance(device, int):
        capability = device
    elif not isinstance(device, str):
        raise ValueError(_NO_DEVICE.format(device))
    else:
        name = device.lower().removeprefix("nvidia ").strip()
        if name in DEVICES:
            return DEVICES[name]
        if name.split(":")[0] in ("cpu", "cuda"):
            return None
        digits = name.removeprefix("sm").strip("_").replace(".", "")
        if not digits.isdigit():
            raise ValueError(_NO_DEVICE.format(device))
        capability = int(digits)
    if not 10 <= capability < 200:
        raise ValueError(f"device must be a compute capability like 90 or '9.0', got {device!r}")
    return capability


# ---- the arguments -------------------------------------------------------------------------------


def _describe(name: str, value: Described, dtype: torch.dtype, place: torch.device) -> _Shape:
    if not isinstance(value, Tensor):
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be one of torch's, got {dtype!r:.60}")
        try:
            shape = [operator.index(n) for n in value]
        except TypeError:
            raise TypeError(f"{name} must be a tensor or a shape, got {shown(value)}") from None
        if any(not 0 <= n < _LARGEST for n in shape):
            raise ValueError(f"{name} must have sizes of at least 0 and under 2**62, got {value}")
        return _Shape(shape, dtype, place)
    refuse_others(**{name: value})
    # Meta and fake tensors have a layout and no address.
    address = 0 if value.is_meta or type(value) is not Tensor else value.data_ptr()
    return _Shape(value.shape, value.dtype, place, value.stride(), address)


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """The names of attention_decode and of FlashAttention, in those of `fwd`."""
    synonyms = {
        "cache_seqlens": "seqused_k",
        "cache_leftpad": "leftpad_k",
        "page_table": "block_table",
        "learnable_sink": "sink",
        "window_size": "window",
    }
    renamed = {synonyms.get(name, name): value for name, value in options.items()}
    for name in ("return_lse", "return_attn_probs", "return_softmax_lse"):
        renamed.pop(name, None)  # changes nothing
    for name in renamed:
        if name not in _OPTIONS:
            raise ValueError(f"attention has no option {name!r}")
    return renamed


def _fwd_call(
    q: _Shape, options: dict[str, Any], dtype: torch.dtype, place: torch.device
) -> dict[str, Any]:
    """Returns the arguments of `fwd` behind q, k, v, by name."""
    call = {**_DEFAULTS, **options}
    for name, value in options.items():
        if name not in _TENSORS or value is None:
            continue
        if isinstance(value, int) and name == "seqused_k":  # one length for all sequences
            check_length("cache_seqlens", value)
            value = (_batch(q, options.get("cu_seqlens_q")),)
        kind = torch.int32 if name in _INT32 else torch.float32 if name in _FLOAT32 else dtype
        call[name] = _describe(name, value, kind, place)
    deterministic = as_bool("deterministic", call.pop("deterministic", False))
    dropout_p = call.pop("dropout_p", None)
    dropout_p = 0.0 if dropout_p is None else as_number("dropout_p", dropout_p)
    named = fwd_options(q, **call)  # type: ignore[arg-type]
    if dropout_p:
        named["dropout_p"] = dropout_p
        named["rng_state"] = _Shape((2,), torch.int64, place)
    named["deterministic"] = deterministic
    return named


def _batch(q: _Shape, cu_seqlens: Described | None) -> int:
    if cu_seqlens is None:
        return q.shape[0]
    return (cu_seqlens.shape if isinstance(cu_seqlens, Tensor) else cu_seqlens)[0] - 1


# ---- the answer ----------------------------------------------------------------------------------


def _explain_fwd(capability: int, qkv: list[_Shape], call: dict[str, Any]) -> Explanation:
    if capability == _CPU:
        _C.check_fwd(*qkv, **call)
        if not _engine.emulated():
            return _by_engine()
        return _explanation(_C.explain_fwd(0, *qkv, **call))
    return _explanation(_C.explain_fwd(capability, *qkv, **call))


def _explain_bwd(
    capability: int, qkv: list[_Shape], call: dict[str, Any], deterministic: bool
) -> Explanation:
    q, k, v = qkv
    _C.check_fwd(*qkv, **call)  # it knows more options than bwd
    names = ("num_splits", "split_size", "pack_gqa")
    call = {name: value for name, value in call.items() if name not in names}
    for name in ("leftpad_k", "block_table", "cache_batch_idx", "qv", "q_descale", "k_descale"):
        if name in call:
            raise NotImplementedError(f"gradients of attention with {name} are not supported")
    out = _Shape((*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    rows = q.shape[:1] + q.shape[2:3] + q.shape[1:2] if len(q.shape) == 4 else q.shape[1::-1]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = _Shape(rows, lse_dtype, q.device)
    wanted = 7 + 8 * ("bias" in call) + 16 * ("sink" in call)
    args = (out, None, q, k, v, out, lse)
    call.update(deterministic=deterministic, wanted=wanted)
    if capability == _CPU:
        _C.check_bwd(*args, **call)
        if not _engine.emulated():
            return _by_engine()
        return _explanation(_C.explain_bwd(0, *args, **call))
    return _explanation(_C.explain_bwd(capability, *args, **call))


def _by_engine() -> Explanation:
    text = "served by the CPU engine (flash_cuda.reference), in tiles, in plain PyTorch"
    return Explanation(True, kernel="cpu", text=text)


def _explanation(answer: _C.ExplanationDict) -> Explanation:
    return Explanation(
        served=answer["served"],
        kernel=answer["kernel"],
        block_q=answer["block_q"],
        block_kv=answer["block_kv"],
        threads=answer["threads"],
        cluster=answer["cluster"],
        num_splits=answer["num_splits"],
        split_size=answer["split_size"],
        pack_gqa=answer["pack_gqa"],
        workspace_bytes=answer["workspace_bytes"],
        reason=answer["refusal"],
        nearest=answer["nearest"],
        text=answer["text"],
    )
