"""Between padded and packed batches: the functions of FlashAttention-2's ``bert_padding``."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cuda.options import as_integer, refuse_others, shown

# rows, indices, cu_seqlens, longest, seqused
Unpadded = tuple[Tensor, Tensor, Tensor, int, Tensor]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> Unpadded:
    """Packs the rows of a padded batch behind each other. Waits for the GPU.

    Args:
        hidden_states: ``(batch, seqlen, ...)``.
        attention_mask: ``(batch, seqlen)``, nonzero where there is a token.
        unused_mask: ``(batch, seqlen)``, nonzero where a row is kept but does not count.

    Returns:
        The rows ``(total, ...)``; their places in the flattened batch, ``(total,)`` int64;
        ``(batch + 1,)`` int32, where each sequence starts; the longest length; and ``(batch,)``
        int32, the rows of each sequence that count.

    Raises:
        TypeError, ValueError: what is given is no tensor, or the shapes do not match.
    """
    refuse_others(hidden_states=hidden_states, attention_mask=attention_mask)
    masks = {"attention_mask": attention_mask}
    if unused_mask is not None:
        refuse_others(unused_mask=unused_mask)
        masks["unused_mask"] = unused_mask
    for name, mask in masks.items():
        if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"{name} must have shape (batch, seqlen) = {tuple(hidden_states.shape[:2])}, "
                f"got {tuple(mask.shape)}"
            )
    token = attention_mask != 0
    kept = token if unused_mask is None else token | (unused_mask != 0)
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    rows = hidden_states.flatten(0, 1)[indices]
    return rows, indices, cu_seqlens, longest, token.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Puts packed rows back to their places, with zeros elsewhere.

    Args:
        hidden_states: ``(total, ...)``.
        indices: ``(total,)``, as :func:`unpad_input` returns them.
        batch: of the result.
        seqlen: of the result.

    Returns:
        ``(batch, seqlen, ...)``.

    Raises:
        TypeError, ValueError: what is given is no tensor or no number, or the shapes do not match.
    """
    refuse_others(hidden_states=hidden_states, indices=indices)
    batch, seqlen = as_integer("batch", batch), as_integer("seqlen", seqlen)
    if indices.dim() != 1 or hidden_states.shape[:1] != indices.shape:
        raise ValueError(
            f"indices must have shape (total) = {tuple(hidden_states.shape[:1])}, "
            f"got {shown(indices)}"
        )
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded = padded.index_put((indices,), hidden_states)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])
