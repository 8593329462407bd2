"""Cases: fp8, gradients, packed padding, scales, dropout."""
from __future__ import annotations

import torch

from .model import FUNC, KV, VARLEN, Gen, Tol, case, core
from .runner import unpack


# --------------------------------------------------------------------------------------------
# cases: fp8
# --------------------------------------------------------------------------------------------
def _fp8(g, *shape, scale=1.0):
    return g.n(*shape, scale=scale, dtype=torch.float32).to(torch.float8_e4m3fn)


@case("B79", "fp8 scales for each batch and key head were dropped", "forward", "vllm-project/vllm#51363",
      needs=("fp8",), sim=False, tol={"out": Tol(relmax=0.08), "lse": Tol(atol=0.05)})
def b79(device, seed):
    g = Gen(device, seed, torch.float32)
    ds = lambda: (torch.rand(2, 2, generator=g.g) * 1.5 + 0.3).to(device)    # noqa: E731
    return dict(q=_fp8(g, 2, 64, 4, 64), k=_fp8(g, 2, 70, 2, 64), v=_fp8(g, 2, 70, 2, 64), causal=True,
                q_descale=ds(), k_descale=ds(), v_descale=ds(), return_attn_probs=True)


@case("B81", "fp8 scales of the wrong shape must be refused", "error", "sgl-project/sglang#37785", needs=("fp8",),
      reference=lambda kw: r"(?i)descale|scale|shape")
def b81(device, seed):
    g = Gen(device, seed, torch.float32)
    return dict(q=_fp8(g, 2, 32, 4, 64), k=_fp8(g, 2, 32, 2, 64), v=_fp8(g, 2, 32, 2, 64),
                q_descale=torch.ones(3, 2, device=device), k_descale=torch.ones(2, 4, device=device),
                v_descale=torch.ones(2, 2, device=device))


# --------------------------------------------------------------------------------------------
# cases: gradients, packed padding, scales, dropout
# --------------------------------------------------------------------------------------------


@case("B83", "packed with gaps between sequences (padded offsets, seqused)", "varlen",
      "NVIDIA/cudnn-frontend#737, NVIDIA/TransformerEngine#2186, Dao-AILab/flash-attention#2167", api=VARLEN,
      needs=("seqused",))
def b83(device, seed):
    g = Gen(device, seed)
    d = g.packed([12, 8, 20], [16, 8, 24], 4, 2, 64)
    uq, uk = [9, 8, 1], [9, 3, 24]
    for n, cu, used in (("q", "cu_seqlens_q", uq), ("k", "cu_seqlens_k", uk), ("v", "cu_seqlens_k", uk)):
        c = d[cu].tolist()
        for b, u in enumerate(used):
            d[n][c[b] + u:c[b + 1]] = float("nan")
    return dict(**d, seqused_q=g.i32(uq), seqused_k=g.i32(uk), causal=True, _wrt=("q", "k", "v"),
                _dout=g.n(40, 4, 64), _poison=True)


@case("B85", "negative softmax scale: masked places must stay masked", "backward",
      "Dao-AILab/flash-attention#1461 (the same trap in a sister kernel)")
def b85(device, seed):
    g = Gen(device, seed)
    return dict(**g.qkv(1, 150, 170, 4, 2, 64, scale=2.0), causal=True, softmax_scale=-0.2, return_attn_probs=True,
                _wrt=("q", "k", "v"), _dout=g.n(1, 150, 4, 64))


def _run_rng(mod, case, kw):
    fn = getattr(mod, FUNC)
    args = {k: v for k, v in kw.items() if not k.startswith("_")}
    state = lambda: torch.cuda.get_rng_state(kw["q"].device)                 # noqa: E731
    a = state()
    fn(**args, dropout_p=0.0)
    b = state()
    assert torch.equal(a, b), "dropout_p=0 moved the generator"
    o1 = unpack(fn(**args, dropout_p=0.5))[0]
    assert not torch.equal(b, state()), "dropout did not move the generator"
    o2 = unpack(fn(**args, dropout_p=0.5))[0]
    assert not torch.equal(o1, o2), "two calls drew the same mask"
    torch.cuda.set_rng_state(b, kw["q"].device)
    assert torch.equal(o1, unpack(fn(**args, dropout_p=0.5))[0]), "the same seed gave another mask"
    return {}


@case("B87", "dropout 0 must leave the generator alone; dropout must move it", "integration",
      "PaddlePaddle/Paddle#70527, Dao-AILab/flash-attention#314", run=_run_rng, cuda_only=True, needs=("dropout",),
      reference=lambda kw: {})
def b87(device, seed):
    return dict(**Gen(device, seed).qkv(2, 64, 64, 4, 4, 64))


def _run_adjoint(mod, case, kw):
    """out is linear in v for a fixed mask, so <out, dout> = <v, dv> exactly if both used one mask."""
    v = kw["v"].detach().requires_grad_()
    out = unpack(getattr(mod, FUNC)(kw["q"], kw["k"], v, dropout_p=kw["dropout_p"], causal=True))[0]
    dv, = torch.autograd.grad(out, v, kw["_dout"])
    d = lambda a, b: (a.detach().double() * b.double()).flatten(1).sum(1)    # noqa: E731
    size = (out.detach().double().flatten(1).norm(dim=1) * kw["_dout"].double().flatten(1).norm(dim=1))
    return {"gap": (d(out, kw["_dout"]) - d(v, dv)) / size}


@case("B89", "q is a slice of a longer buffer: the batch stride is not seqlen * heads * size", "backward",
      "flashinfer-ai/flashinfer#3800")
def b89(device, seed):
    g = Gen(device, seed)
    return dict(q=g.n(3, 16, 4, 64)[:, 2:7], k=g.n(3, 40, 2, 64)[:, 3:33], v=g.n(3, 40, 2, 64)[:, 3:33], causal=True,
                _wrt=("q", "k", "v"), _dout=g.n(3, 9, 4, 64)[:, :5])


@case("B91", "decode with grouped heads: shape and order of lse", "decode", "vllm-project/flash-attention#34", api=KV)
def b91(device, seed):
    g = Gen(device, seed)
    return dict(q=g.n(3, 1, 8, 64), k_cache=g.n(3, 96, 2, 64), v_cache=g.n(3, 96, 2, 64),
                cache_seqlens=g.i32([96, 1, 50]), causal=True, return_softmax_lse=True)


@case("B93", "cu_seqlens is a slice with junk after it", "varlen", "Dao-AILab/flash-attention#2333", api=VARLEN)
def b93(device, seed):
    g = Gen(device, seed)
    d = g.packed([40, 3, 17], [40, 30, 17], 2, 2, 64)
    for n in ("cu_seqlens_q", "cu_seqlens_k"):
        d[n] = torch.cat([d[n].cpu(), torch.full((13,), 1 << 30, dtype=torch.int32)]).to(device)[:4]
    return dict(**d, causal=True, return_attn_probs=True, _wrt=("q", "k", "v"), _dout=g.n(60, 2, 64))


@case("B95", "tensors on the host: the right answer, or a plain refusal", "integration",
      "xorbitsai/inference#3739, ace-step/ACE-Step-1.5#105")
def b95(device, seed):
    return dict(**Gen("cpu", seed).qkv(1, 16, 16, 2, 2, 64), _or_error=r"(?i)cuda|gpu|device|backend")


def _run_nograd(mod, case, kw):
    fn = getattr(mod, FUNC)
    with torch.inference_mode():
        a = unpack(fn(kw["q"], kw["k"], kw["v"], causal=True))[0]
        assert not a.requires_grad
        a = a.clone()
    q = kw["q"].detach().requires_grad_()
    with torch.no_grad():
        b = unpack(fn(q, kw["k"], kw["v"], causal=True))[0]
    assert not b.requires_grad, "no_grad gave a result that wants a gradient"
    c = unpack(fn(q, kw["k"], kw["v"], causal=True))[0]
    assert c.requires_grad, "a result outside no_grad must carry the graph"
    g, = torch.autograd.grad(c, q, kw["_dout"])
    return {"out": a, "out_no_grad": b, "dq": g}


def _ref_nograd(kw, mode="ref"):
    r = core(kw["q"], kw["k"], kw["v"], causal=True, dout=kw["_dout"], mode=mode)
    return {"out": r["out"], "out_no_grad": r["out"], "dq": r["dq"]}


@case("B97", "dimensions of size 1 carry meaningless strides", "forward", "pytorch/pytorch#150408, #116333")
def b97(device, seed):
    g = Gen(device, seed)

    def odd(S, H, D):
        return g.n(S * H * D).as_strided((1, S, H, D), (1, H * D, 3 if H == 1 else D, 1))
    return dict(return_attn_probs=True, causal=True,
                _variants=[dict(q=odd(33, 4, 64), k=odd(40, 1, 64), v=odd(40, 1, 64)),
                           dict(q=odd(1, 8, 64), k=odd(40, 2, 64), v=odd(40, 2, 64))])
