"""Cases: masks, sizes, score modifications, layouts."""
from __future__ import annotations

import math

import torch

from .model import BF16, F16, KV, VARLEN, Gen, case


# --------------------------------------------------------------------------------------------
# cases: masks, rows without keys, windows
# --------------------------------------------------------------------------------------------
@case("B01", "causal with more queries than keys: top rows are zero", "forward", "Dao-AILab/flash-attention#1778")
def b01(device, seed):
    return dict(**Gen(device, seed).qkv(1, 130, 33, 2, 2, 64), causal=True, return_attn_probs=True, _poison=True)


@case("B03", "paged causal prefill, more queries than keys: lse of empty rows must be -inf", "paged",
      "flashinfer-ai/flashinfer#4452", api=KV, needs=("paged",))
def b03(device, seed):
    g = Gen(device, seed)
    return dict(q=g.n(2, 5, 4, 64), **g.paged([3, 9], 16, 2, 64), causal=True, return_softmax_lse=True)


@case("B05", "first key tile masked, all other logits very negative: rows were zeroed", "forward",
      "Dao-AILab/flash-attention#2082")
def b05(device, seed):
    g = Gen(device, seed)
    return dict(q=g.n(1, 88, 14, 64, scale=0.5, mean=5.0), k=g.n(1, 448, 2, 64, scale=0.5, mean=-5.0),
                v=g.n(1, 448, 2, 64), causal=True, return_attn_probs=True)


@case("B07", "packed, max_seqlen_q 1 with an empty sequence and grouped heads: shape error", "varlen",
      "Dao-AILab/flash-attention#1537", api=VARLEN)
def b07(device, seed):
    return dict(**Gen(device, seed).packed([1, 0, 1], [3, 0, 5], 9, 3, 64), causal=True, softmax_scale=1.0,
                return_attn_probs=True)


@case("B09", "packed, no queries but some keys: dk and dv there must be zero, not left as found", "varlen",
      "Dao-AILab/flash-attention#1713", api=VARLEN)
def b09(device, seed):
    g = Gen(device, seed)
    d = g.packed([5, 0, 5], [4, 5, 4], 2, 2, 64)
    return dict(**d, _wrt=("q", "k", "v"), _dout=g.n(10, 2, 64), _poison=True)


@case("B11", "packed, empty key sequences: writes out of bounds, rows not set", "varlen",
      "Dao-AILab/flash-attention#1155", api=VARLEN)
def b11(device, seed):
    g = Gen(device, seed)
    d = g.packed([3, 7, 4], [0, 5, 0], 2, 2, 64)
    return dict(**d, return_attn_probs=True, _wrt=("q", "k", "v"), _dout=g.n(14, 2, 64), _poison=True)


@case("B13", "sliding window ends are inclusive: window (3, 0) is four keys", "forward",
      "huggingface/transformers#39408, vllm-project/vllm#3385", needs=("window",))
def b13(device, seed):
    v = torch.zeros(1, 9, 1, 16)
    v[0, torch.arange(9), 0, torch.arange(9)] = 1.0
    z = torch.zeros(1, 9, 1, 16)
    return dict(q=z.to(F16).to(device), k=z.to(F16).to(device), v=v.to(F16).to(device), causal=True,
                window_size=(3, 0), return_attn_probs=True)


@case("B15", "two-sided window with more queries than keys: which rows are zero", "forward",
      "Dao-AILab/flash-attention#2199", needs=("window",))
def b15(device, seed):
    return dict(**Gen(device, seed).qkv(1, 129, 32, 4, 2, 64), window_size=(32, 64), return_attn_probs=True)


@case("B17", "causal=True together with window (-1, 0): output was all zero", "forward",
      "NVIDIA/TransformerEngine#3528", needs=("window",))
def b17(device, seed):
    return dict(**Gen(device, seed).qkv(2, 200, 200, 4, 2, 128), causal=True, window_size=(-1, 0),
                return_attn_probs=True)


@case("B19", "causal with more queries than keys: an unsigned offset switched the mask off", "backward",
      "pytorch/pytorch#193632")
def b19(device, seed):
    g = Gen(device, seed)
    return dict(**g.qkv(2, 200, 72, 4, 2, 64), causal=True, return_attn_probs=True, _wrt=("q", "k", "v"),
                _dout=g.n(2, 200, 4, 64), _poison=True)


# --------------------------------------------------------------------------------------------
# cases: sizes
# --------------------------------------------------------------------------------------------


@case("B21", "heads over 65535", "forward", "Dao-AILab/flash-attention#1812, pytorch/pytorch#142228", big=True)
def b21(device, seed):
    return dict(**Gen(device, seed, BF16).qkv(1, 3, 3, 65537, 65537, 32), causal=True)


def _ref_seqlen_one(kw):
    z = torch.zeros_like(kw["q"])
    return {"out": kw["v"].clone(), "dq": z, "dk": z.clone(), "dv": kw["_dout"].clone()}


def _far_apart(g, n, page, Hk, D, step=2 ** 30):
    """n blocks of (page, Hk, D) keys and values whose starts lie `step` elements apart."""
    size = page * Hk * D
    base = torch.empty((n - 1) * step + 2 * size, dtype=g.dtype, device=g.device)
    shape, stride = (n, page, Hk, D), (step, Hk * D, D, 1)
    kc, vc = base.as_strided(shape, stride, 0), base.as_strided(shape, stride, size)
    kc.copy_(g.n(*shape))
    vc.copy_(g.n(*shape))
    return kc, vc


@case("B23", "cache with a batch stride of 2^30 elements", "decode", "Dao-AILab/flash-attention#772", api=KV, heavy=True)
def b23(device, seed):
    g = Gen(device, seed, F16)
    kc, vc = _far_apart(g, 3, 32, 2, 64)
    return dict(q=g.n(3, 1, 4, 64), k_cache=kc, v_cache=vc, cache_seqlens=g.i32([32, 20, 7]), causal=True)


@case("B25", "sequence over 32767", "forward", "facebookresearch/xformers#719")
def b25(device, seed):
    g = Gen(device, seed, F16)
    return dict(_variants=[g.qkv(1, 33000, 16, 1, 1, 64), g.qkv(1, 2, 33000, 1, 1, 64)])


# --------------------------------------------------------------------------------------------
# cases: softcap, ALiBi, scale, options that must reach the backward pass
# --------------------------------------------------------------------------------------------


@case("B27", "softcap in the packed backward: dq wrong, dense one hung", "varlen",
      "Dao-AILab/flash-attention#2544, #2466", api=VARLEN, needs=("softcap",))
def b27(device, seed):
    g = Gen(device, seed)
    return dict(**g.packed([40, 17], [40, 50], 4, 2, 64, scale=3.0), causal=True, softcap=15.0,
                _wrt=("q", "k", "v"), _dout=g.n(57, 4, 64))


@case("B29", "ALiBi for unequal lengths, slopes for each batch and head", "forward",
      "Dao-AILab/flash-attention#907, #1585", needs=("alibi",))
def b29(device, seed):
    g = Gen(device, seed)
    slopes = (torch.rand(2, 4, generator=g.g) * 0.5 + 0.05).to(device)
    return dict(**g.qkv(2, 7, 20, 4, 2, 64), alibi_slopes=slopes, return_attn_probs=True)


# --------------------------------------------------------------------------------------------
# cases: layouts
# --------------------------------------------------------------------------------------------


@case("B31", "out.sum().backward(): upstream gradient with all strides zero", "backward",
      "Dao-AILab/flash-attention#325, facebookresearch/xformers#282, NVIDIA/cudnn-frontend#100")
def b31(device, seed):
    return dict(**Gen(device, seed).qkv(1, 5, 5, 2, 2, 8), causal=True, _wrt=("q", "k", "v"), _dout="sum")


@case("B33", "keys and values stored head-major, one query", "forward",
      "pytorch/pytorch#112577, flagos-ai/FlagGems#5896")
def b33(device, seed):
    g = Gen(device, seed, F16)
    return dict(q=g.n(1, 1, 16, 128), k=g.n(1, 16, 21, 128).transpose(1, 2), v=g.n(1, 16, 21, 128).transpose(1, 2),
                return_attn_probs=True)


@case("B35", "k and v expanded over heads (stride 0), key length 1 past a tile", "forward", "pytorch/pytorch#191937")
def b35(device, seed):
    g = Gen(device, seed)
    q = g.n(1, 50, 8, 64)
    mk = lambda s: dict(k=g.n(1, s, 1, 64).expand(1, s, 8, 64), v=g.n(1, s, 1, 64).expand(1, s, 8, 64))  # noqa: E731
    return dict(q=q, return_attn_probs=True, _variants=[mk(33), mk(65), mk(129)])


@case("B37", "data starts 2 bytes off a 16-byte boundary", "forward",
      "flashinfer-ai/flashinfer#4543, pytorch/pytorch#170813")
def b37(device, seed):
    g = Gen(device, seed)

    def off(*shape):
        n = math.prod(shape)
        return g.n(n + 8)[1:n + 1].view(shape)
    return dict(q=off(2, 33, 4, 64), k=off(2, 40, 2, 64), v=off(2, 40, 2, 64), return_attn_probs=True,
                _or_error="(?i)align|contiguous|storage")


@case("B39", "head sizes that are no multiple of 8", "forward", "vllm-project/vllm#41257",
      needs=("any head size",))
def b39(device, seed):
    g = Gen(device, seed)
    return dict(causal=True, return_attn_probs=True, _variants=[g.qkv(1, 40, 40, 2, 1, 46), g.qkv(1, 40, 40, 2, 1, 20)],
                _or_error="(?i)head")


@case("B41", "head size 160 (not a multiple of 64) in backward", "backward",
      "Dao-AILab/flash-attention#2482, #498")
def b41(device, seed):
    g = Gen(device, seed)
    return dict(**g.qkv(1, 97, 97, 2, 2, 160), causal=True, _wrt=("q", "k", "v"), _dout=g.n(1, 97, 2, 160), _poison=True)


@case("B43", "head size 256, batch over 1, grouped heads, skewed activations: gradients far off", "backward",
      "NVIDIA/TransformerEngine#3216")
def b43(device, seed):
    g = Gen(device, seed)
    d = g.qkv(3, 70, 70, 8, 1, 256)
    d["q"] = (d["q"].float() ** 3 * 0.3 + 0.2).to(BF16)
    d["k"] = (d["k"].float() ** 3 * 0.3 - 0.1).to(BF16)
    return dict(**d, causal=True, _wrt=("q", "k", "v"), _dout=g.n(3, 70, 8, 256))


@case("B45", "paged cache, head sizes 192 and 128, page size other than the tile", "paged",
      "Dao-AILab/flash-attention#2367", api=KV, needs=("paged", "dv!=d"))
def b45(device, seed):
    g = Gen(device, seed)
    return dict(q=g.n(1, 100, 4, 192), **g.paged([100], 16, 4, 192, Dv=128), causal=True)
