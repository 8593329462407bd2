"""The attention function of transformers' models; with the package, a small model as well."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash_cuda
from flash_cuda.compat import transformers as adapter

B, S, H, HK, D = 2, 7, 4, 2, 16
HAVE_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def heads_first(rows: int = S, keys: int = S) -> tuple[Tensor, Tensor, Tensor]:
    kv = (B, HK, keys, D)
    return (
        torch.randn(B, H, rows, D, dtype=torch.float64),
        torch.randn(*kv, dtype=torch.float64),
        torch.randn(*kv, dtype=torch.float64),
    )


def layer(is_causal: bool = True, training: bool = False) -> nn.Module:
    module = nn.Module().train(training)
    module.is_causal = is_causal
    return module


def rows_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in tensors)


@pytest.mark.parametrize("is_causal", [True, False, None])
def test_layout_and_causal(is_causal: bool | None) -> None:
    q, k, v = heads_first(3)
    out, weights = adapter.attention(layer(), q, k, v, None, scaling=0.3, is_causal=is_causal)
    assert weights is None
    want = flash_cuda.attention(
        *rows_first(q, k, v), causal=is_causal is not False, softmax_scale=0.3
    )
    torch.testing.assert_close(out, want)


def test_sliding_window_counts_the_token_itself() -> None:
    q, k, v = heads_first()
    out, _ = adapter.attention(
        layer(), q, k, v, None, sliding_window=3, softcap=5.0, s_aux=torch.ones(H)
    )
    want = flash_cuda.attention(
        *rows_first(q, k, v), window=(2, 0), softcap=5.0,
        sink=torch.ones(H, dtype=torch.float64),
    )  # fmt: skip
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("rows", [S, 1])
def test_padding_masks(rows: int) -> None:
    """Left or right padded: each sequence as it is alone."""
    mask = torch.ones(B, S, dtype=torch.int64)
    mask[0, :3] = 0
    if rows == S:
        mask[1, 5:] = 0
    q, k, v = heads_first(rows)
    out, _ = adapter.attention(layer(), q, k, v, mask)
    q, k, v = rows_first(q, k, v)
    for b, (first, last) in enumerate(((3, S), (0, int(mask[1].sum())))):
        at = slice(first, last) if rows == S else slice(0, 1)
        alone = flash_cuda.attention(
            q[b : b + 1, at], k[b : b + 1, first:last], v[b : b + 1, first:last], causal=True
        )
        torch.testing.assert_close(out[b : b + 1, at], alone)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_in_four_dimensions_says_it_all(additive: bool) -> None:
    q, k, v = heads_first()
    mask = torch.rand(B, 1, S, S) > 0.4
    bias = torch.zeros(B, 1, S, S, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    out, _ = adapter.attention(layer(), q, k, v, bias if additive else mask)
    torch.testing.assert_close(out, flash_cuda.attention(*rows_first(q, k, v), bias=bias))


def test_packed_sequences() -> None:
    q, k, v = (t[:1] for t in heads_first())
    cu = torch.tensor([0, 3, S], dtype=torch.int32)
    out, _ = adapter.attention(
        layer(), q, k, v, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=4, max_length_k=4
    )
    packed = (t[0] for t in rows_first(q, k, v))
    want = flash_cuda.attention_varlen(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    torch.testing.assert_close(out, want[None])


def test_positions_that_start_again_are_packed_sequences() -> None:
    """As a collator without padding lays them out; nothing else says so."""
    q, k, v = (t[:1] for t in heads_first())
    cu = torch.tensor([0, 3, S], dtype=torch.int32)
    want, _ = adapter.attention(layer(), q, k, v, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    for _ in range(2):  # the second layer finds what the first one found
        out, _ = adapter.attention(layer(), q, k, v, None, position_ids=positions)
        assert torch.equal(out, want)
    whole, _ = adapter.attention(layer(), q, k, v, None)
    positions[0] = torch.arange(5, 5 + S)  # written to: looked at again
    out, _ = adapter.attention(layer(), q, k, v, None, position_ids=positions)
    assert torch.equal(out, whole)
    with torch.inference_mode():
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
        out, _ = adapter.attention(layer(), q, k, v, None, position_ids=positions)
        assert torch.equal(out, want)
        positions[0] = torch.arange(S)
        out, _ = adapter.attention(layer(), q, k, v, None, position_ids=positions)
        assert torch.equal(out, whole)
    # A gap is no start: one sequence.
    positions = torch.tensor([[0, 1, 2, 7, 8, 9, 10]])
    out, _ = adapter.attention(layer(), q, k, v, None, position_ids=positions)
    assert torch.equal(out, whole)
    # Neither a cache nor a mask, nor a batch, is packed.
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    mask = torch.ones(1, S)
    masked, _ = adapter.attention(layer(), q, k, v, mask, position_ids=positions)
    torch.testing.assert_close(masked, whole)
    last, _ = adapter.attention(layer(), q[:, :, 4:], k, v, None, position_ids=positions[:, 4:])
    torch.testing.assert_close(last, whole[:, 4:])


def test_dropout_is_for_training() -> None:
    tensors = heads_first()
    still, _ = adapter.attention(layer(), *tensors, None, dropout=0.5)
    moving, _ = adapter.attention(layer(training=True), *tensors, None, dropout=0.5)
    torch.testing.assert_close(still, adapter.attention(layer(), *tensors, None)[0])
    assert not torch.equal(still, moving)


def test_registers_attention_and_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both or nothing: with the attention alone transformers leaves masks out."""
    registered: dict[str, dict[str, Any]] = {"attention": {}, "mask": {}}

    def interface(kind: str) -> type:
        def register(name: str, function: Any) -> None:
            registered[kind][name] = function

        return type(kind, (), {"register": staticmethod(register)})

    package, masks = types.ModuleType("transformers"), types.ModuleType("masking_utils")
    package.AttentionInterface = interface("attention")  # type: ignore[attr-defined]
    masks.AttentionMaskInterface = interface("mask")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    with pytest.raises(ImportError, match=r"4\.53"):
        adapter.register()
    assert not registered["attention"]
    masks.flash_attention_mask = object()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="flash"):
        adapter.register("flash_cuda")
    adapter.register("mine")
    assert registered["attention"] == {"mine": adapter.attention}
    assert registered["mask"] == {"mine": masks.flash_attention_mask}


@pytest.mark.skipif(HAVE_TRANSFORMERS, reason="transformers is installed")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(ImportError, match="transformers"):
        adapter.register()


@pytest.mark.skipif(not HAVE_TRANSFORMERS, reason="needs the package transformers")
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_a_model_gives_what_it_gives_on_sdpa(padding: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    adapter.register()
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    tokens = torch.randint(50, (2, 9))
    mask = torch.ones_like(tokens)
    if padding != "none":
        mask[0, slice(0, 4) if padding == "left" else slice(5, 9)] = 0
    logits = []
    for implementation in ("sdpa", adapter.IMPLEMENTATION):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()
        logits.append(model(tokens, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not HAVE_TRANSFORMERS, reason="needs the package transformers")
def test_a_model_keeps_packed_sequences_apart() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    adapter.register()
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation=adapter.IMPLEMENTATION)
    model.eval()
    one, two = torch.randint(50, (1, 5)), torch.randint(50, (1, 9))
    positions = torch.cat((torch.arange(5), torch.arange(9)))[None]
    together = model(torch.cat((one, two), 1), position_ids=positions).logits
    for tokens, place in ((one, slice(0, 5)), (two, slice(5, 14))):
        torch.testing.assert_close(together[:, place], model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_packed_sequences_stay_causal_beside_a_mask() -> None:
    """A mask of padding, which what is packed has not, does not say what is causal."""
    q, k, v = (t[:1] for t in heads_first())
    bounds = torch.tensor([0, 3, S], dtype=torch.int32)
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    want, _ = adapter.attention(layer(), q, k, v, None, **packed)
    for mask in (torch.ones(1, S), torch.ones(1, 1, S, S, dtype=torch.bool)):
        out, _ = adapter.attention(layer(), q, k, v, mask, **packed)
        assert torch.equal(out, want)
