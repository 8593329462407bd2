"""flash_cuda as an attention implementation of Hugging Face transformers.

    import flash_cuda.compat.transformers
    flash_cuda.compat.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fcuda")

`register` adds the attention function and its mask function: with the first alone, transformers
would leave out masks without a word.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from flash_cuda import _ops
from flash_cuda._names import calls_them
from flash_cuda.options import as_bool, as_integer, fwd_options, refuse_others, shown

# Transformers takes any name with "flash" in it for the flash_attn package, and looks for that.
IMPLEMENTATION = "fcuda"


def register(name: str = IMPLEMENTATION) -> None:
    """Makes ``attn_implementation=name`` known to transformers.

    Args:
        name: the name that models are then loaded with; not one that contains ``flash``.

    Raises:
        ValueError: the name contains ``flash``, which transformers keeps for flash_attn.
        ImportError: transformers is missing, or too old to register implementations with.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {shown(name)}")
    if "flash" in name:
        raise ValueError(
            f"name must not contain 'flash', got {name!r}: transformers would look "
            "for the flash_attn package"
        )
    try:
        from transformers import AttentionInterface  # type: ignore[import-not-found]
        from transformers.masking_utils import (  # type: ignore[import-not-found]
            AttentionMaskInterface,
            flash_attention_mask,
        )
    except ImportError as error:
        raise ImportError(
            "flash_cuda.compat.transformers needs transformers with AttentionInterface and "
            f"masking_utils (4.53 or newer): {error}"
        ) from error
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, flash_attention_mask)


@calls_them(
    q="query", k="key", v="value", bias="attention_mask", softmax_scale="scaling", sink="s_aux",
    dropout_p="dropout", window="sliding_window", window_left="sliding_window",
    cu_seqlens_q="cu_seq_lens_q", cu_seqlens_k="cu_seq_lens_k", max_seqlen_q="max_length_q",
    max_seqlen_k="max_length_k",
)  # fmt: skip
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' models call.

    Args:
        module: the attention layer; its ``is_causal`` is the default of `is_causal`.
        query: ``(batch, num_heads_q, seqlen_q, head_dim)``.
        key: ``(batch, num_heads_kv, seqlen_kv, head_dim)``.
        value: ``(batch, num_heads_kv, seqlen_kv, head_dim_v)``.
        attention_mask: ``(batch, seqlen_kv)``, nonzero where there is a token; or a mask of four
            dimensions, bool (True takes part) or additive, that also says what is causal.
        scaling: default ``head_dim ** -0.5``.
        dropout: probability of dropping a weight.
        is_causal: bottom-right aligned; default the module's.
        sliding_window: keys that a query sees, its own among them.
        softcap: bounds the logits.
        s_aux: ``(num_heads_q,)`` sinks.
        cu_seq_lens_q: ``(batch + 1,)`` int32; the sequences are packed into a batch of 1.
        cu_seq_lens_k: the same for keys.
        max_length_q: hint.
        max_length_k: hint.
        position_ids: ``(1, seqlen_q)``; without a mask and without `cu_seq_lens_q`, positions that
            start again in a batch of 1 are those of packed sequences. Looking at them waits for
            the GPU, once for all layers (in inference mode, once a layer).
        **kwargs: what models pass for other implementations.

    Returns:
        ``(batch, seqlen_q, num_heads_q, head_dim_v)``, and None for the weights.
    """
    refuse_others(query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have shape (batch, num_heads, seqlen, head_dim), "
                f"got {tuple(tensor.shape)}"
            )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = as_bool("is_causal", is_causal)
    packed: dict[str, Any] = {}
    if attention_mask is None and cu_seq_lens_q is None and k.shape[1] == q.shape[1]:
        cu_seq_lens_q = cu_seq_lens_k = _bounds_of(position_ids, q)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        attention_mask = None  # what is packed has no padding
        packed = {
            "cu_seqlens_q": cu_seq_lens_q,
            "cu_seqlens_k": cu_seq_lens_k,
            "max_seqlen_q": max_length_q,
            "max_seqlen_k": max_length_k,
        }
    window: tuple[int | None, int | None] = (None, None)
    bias = None
    if attention_mask is not None:
        refuse_others(attention_mask=attention_mask)
        if attention_mask.dim() == 4:
            bias, causal = _additive(attention_mask[..., : k.shape[1]], q.dtype), False
        elif attention_mask.dim() == 2:
            bias = _additive(attention_mask[:, None, None, -k.shape[1] :] != 0, q.dtype)
        else:
            raise ValueError(
                "attention_mask must be (batch, seqlen_kv) or have four dimensions, "
                f"got {tuple(attention_mask.shape)}"
            )
    if sliding_window is not None and (attention_mask is None or attention_mask.dim() == 2):
        sliding_window = as_integer("sliding_window", sliding_window)
        window = (sliding_window - 1, None if causal else sliding_window - 1)
    options = fwd_options(
        q,
        causal=causal,
        window=window,
        softmax_scale=scaling,
        softcap=softcap,
        dropout_p=dropout if getattr(module, "training", False) else 0.0,
        sink=s_aux,
        bias=bias,
        **packed,
    )
    out, _ = _ops.attention_forward(q, k, v, options)
    return (out.view(query.shape[0], -1, *out.shape[1:]) if packed else out), None


# The last position_ids, their version, and the bounds found: all layers of a model see the same.
_Seen = tuple["weakref.ref[Tensor]", int, Tensor | None]
_seen: _Seen | None = None


def _bounds_of(position_ids: Tensor | None, q: Tensor) -> Tensor | None:
    """Bounds of the packed sequences that positions tell of; None if there is but one."""
    global _seen
    rows = q.shape[1]
    if position_ids is None or q.shape[0] != 1 or rows < 2 or position_ids.shape != (1, rows):
        return None
    # A tensor of inference mode has no version that would tell of changes in place.
    if torch.compiler.is_dynamo_compiling() or position_ids.is_inference():
        return _find_bounds(position_ids)
    version = position_ids._version
    seen = _seen
    if seen is None or seen[0]() is not position_ids or seen[1] != version:
        _seen = seen = (weakref.ref(position_ids), version, _find_bounds(position_ids))
    return seen[2]


def _find_bounds(position_ids: Tensor) -> Tensor | None:
    positions = position_ids[0]
    starts = torch.cat((positions[:1] == positions[0], positions[1:] <= positions[:-1]))
    if int(starts.sum()) == 1:
        return None
    first = starts.nonzero().flatten()
    return torch.cat((first, first.new_tensor([len(positions)]))).int()


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask if mask.dtype == torch.float32 else mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
