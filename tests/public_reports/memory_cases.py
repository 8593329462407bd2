"""Cases: memory that is not ours, split keys, pages, sinks, lse."""
from __future__ import annotations

import torch

from .model import EXACT, F16, FUNC, INF, KV, Gen, Tol, case, core
from .runner import unpack


# --------------------------------------------------------------------------------------------
# cases: memory that is not ours to read
# --------------------------------------------------------------------------------------------


@case("B47", "latent attention, last page partly filled and the rest NaN; v is a view of k", "paged",
      "flashinfer-ai/flashinfer#941, #942", api=KV, needs=("paged", "mla"))
def b47(device, seed):
    g = Gen(device, seed)
    d = g.paged([13, 64], 64, 1, 576, fill=float("nan"))
    d["v_cache"] = d["k_cache"][..., :512]
    return dict(q=g.n(2, 1, 16, 576), **d, softmax_scale=192 ** -0.5, causal=True)


@case("B49", "backward with a length off the tile: NaN", "backward", "NVIDIA/cudnn-frontend#160")
def b49(device, seed):
    g = Gen(device, seed)
    return dict(**g.qkv(2, 97, 97, 2, 2, 64), _wrt=("q", "k", "v"), _dout=g.n(2, 97, 2, 64), _poison=True,
                _variants=[dict(), dict(causal=True)])


@case("B51", "prefill at step 0 through the cache call: length 0 and new keys", "decode",
      "Dao-AILab/flash-attention#731", api=KV)
def b51(device, seed):
    g = Gen(device, seed)
    return dict(q=g.n(2, 33, 4, 64), k=g.n(2, 33, 2, 64), v=g.n(2, 33, 2, 64), k_cache=g.n(2, 64, 2, 64),
                v_cache=g.n(2, 64, 2, 64), cache_seqlens=g.i32([0, 0]), causal=True)


@case("B53", "new keys do not fit in the cache: other tensors were overwritten", "error",
      "Dao-AILab/flash-attention#638", api=KV,
      reference=lambda kw: r"(?i)cache|seqlen|capacity|exceed|too (long|large)|large enough")
def b53(device, seed):
    g = Gen(device, seed, F16)
    return dict(q=g.n(1, 4, 4, 128), k=g.n(1, 4, 4, 128), v=g.n(1, 4, 4, 128), k_cache=g.n(1, 10, 4, 128),
                v_cache=g.n(1, 10, 4, 128), cache_seqlens=10, causal=True)


# --------------------------------------------------------------------------------------------
# cases: split keys, pages, decode
# --------------------------------------------------------------------------------------------


@case("B55", "several query rows and batches through the split path: rows written in the wrong place", "decode",
      "flagos-ai/FlagGems#5235, vllm-project/flash-attention#176", api=KV)
def b55(device, seed):
    g = Gen(device, seed)
    return dict(q=g.n(3, 3, 4, 64), k_cache=g.n(3, 320, 4, 64), v_cache=g.n(3, 320, 4, 64), causal=True,
                cache_seqlens=g.i32([300, 17, 129]), return_softmax_lse=True, _poison=True,
                _variants=[dict(num_splits=4), dict(num_splits=0)])


@case("B57", "pages in scattered order gave zeros", "paged", "flashinfer-ai/flashinfer#3219", api=KV, needs=("paged",))
def b57(device, seed):
    g = Gen(device, seed)
    return dict(q=g.n(3, 1, 8, 64), **g.paged([70, 5, 33], 16, 2, 64, spare=11), causal=True, return_softmax_lse=True)


@case("B59", "fewer than 16 keys in all, prefix in the cache, grouped heads 14 to 2", "paged",
      "flashinfer-ai/flashinfer#3106", api=KV, needs=("paged",))
def b59(device, seed):
    g = Gen(device, seed, F16)
    return dict(q=g.n(1, 8, 14, 64), **g.paged([9], 16, 2, 64), causal=True)


@case("B61", "sliding window, 8 query rows against a longer cache", "paged", "flashinfer-ai/flashinfer#3864",
      api=KV, needs=("paged", "window"))
def b61(device, seed):
    g = Gen(device, seed)
    return dict(q=g.n(2, 8, 4, 128), **g.paged([300, 131], 16, 2, 128), causal=True, window_size=(127, 0),
                return_softmax_lse=True)


# --------------------------------------------------------------------------------------------
# cases: sinks, lse
# --------------------------------------------------------------------------------------------


@case("B63", "gradient of the sink, with gradient of lse, with rows that have no key", "backward",
      "Dao-AILab/flash-attention#2706, #1973", needs=("sink", "dlse"),
      tol={"dsink": Tol(factor=4, ulps=1, relmax=0.01)})
def b63(device, seed):
    g = Gen(device, seed)
    return dict(**g.qkv(2, 50, 40, 4, 2, 64), causal=True, learnable_sink=g.n(4), return_attn_probs=True,
                _wrt=("q", "k", "v", "learnable_sink"), _dout=g.n(2, 50, 4, 64), _dlse=g.n(2, 4, 50, dtype=torch.float32))


def _run_merge(mod, case, kw):
    fn = getattr(mod, FUNC)
    outs, lses = [], []
    for a, b in kw["_parts"]:
        o, l = unpack(fn(kw["q"], kw["k"][:, a:b], kw["v"][:, a:b], return_attn_probs=True))
        outs.append(o.double())
        lses.append(l.double())
    lse = torch.logsumexp(torch.stack(lses), 0)
    w = [torch.exp(x - lse).transpose(1, 2)[..., None] for x in lses]
    return {"out": sum(a * b for a, b in zip(w, outs)).to(kw["q"].dtype), "lse": lse.float(), "lse_empty": lses[0]}


def _ref_merge(kw):
    r = core(kw["q"], kw["k"], kw["v"])
    return {"out": r["out"], "lse": r["lse"], "lse_empty": torch.full_like(r["lse"], -INF)}


@case("B65", "partial results merged by lse, one part without keys: +inf there gives NaN", "integration",
      "Dao-AILab/flash-attention#978, vllm-project/vllm#39148", run=_run_merge, reference=_ref_merge,
      tol={"out": Tol(relmax=0.02), "lse_empty": EXACT})
def b65(device, seed):
    return dict(**Gen(device, seed).qkv(2, 20, 60, 4, 2, 64), _parts=[(0, 0), (0, 37), (37, 60)])
