"""Cases: determinism, streams, devices, graphs, compile."""
from __future__ import annotations

import torch

from .model import FUNC, KV, Gen, Tol, case, variants
from .runner import default_run, tensors, unpack


def _run_det(mod, case, kw):
    rs = [default_run(mod, case, kw) for _ in range(4)]
    for r in rs[1:]:
        for n in r:
            assert torch.equal(r[n], rs[0][n]), f"{n} differs between runs with deterministic=True"
    return rs[0]


def _run_stream(mod, case, kw):
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    kw = dict(kw)
    names = [n for n in ("q", "k", "v") if n in kw]
    src = {n: kw[n].clone() for n in names}
    for n in names:
        kw[n] = torch.full_like(src[n], float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(s):
        torch.cuda._sleep(100_000_000)           # a kernel on any other stream reads NaN
        for n in names:
            kw[n].copy_(src[n])
        r = default_run(mod, case, kw)
        r = {n: t.clone() for n, t in r.items()}
    s.synchronize()
    return r


@case("B67", "kernels must go to the current stream", "integration",
      "Dao-AILab/flash-attention#2505, NVIDIA/cudnn-frontend#483, huggingface/candle#3596", run=_run_stream,
      cuda_only=True)
def b67(device, seed):
    g = Gen(device, seed)
    return dict(**g.qkv(2, 100, 100, 4, 2, 64), causal=True, _wrt=("q", "k", "v"), _dout=g.n(2, 100, 4, 64))


def _run_device(mod, case, kw):
    with torch.cuda.device(0):
        return default_run(mod, case, kw)


def _capture(fn, warm=2):
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(warm):
            fn()
    torch.cuda.current_stream().wait_stream(s)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        out = fn()
    return g, out


def _run_graph_dropout(mod, case, kw):
    fn = getattr(mod, FUNC)
    args = {k: v for k, v in kw.items() if not k.startswith("_")}
    g, out = _capture(lambda: unpack(fn(**args))[0])
    got = []
    for _ in range(3):
        g.replay()
        torch.cuda.synchronize()
        got.append(out.clone())
    assert not torch.equal(got[0], got[1]) and not torch.equal(got[1], got[2]), "the same dropout mask in every replay"
    return {"mean": torch.stack([x.float().mean() for x in got]).mean().reshape(1)}


@case("B69", "graph capture with dropout: must capture, and draw a new mask at each replay", "integration",
      "Dao-AILab/flash-attention#379, #165, pytorch/pytorch#99905", run=_run_graph_dropout, cuda_only=True,
      needs=("dropout", "graph"), reference=lambda kw: {"mean": torch.ones(1, dtype=torch.float64)},
      tol={"mean": Tol(atol=0.05)})
def b69(device, seed):
    g = Gen(device, seed)
    d = g.qkv(2, 128, 128, 4, 4, 64)
    d["v"] = torch.ones_like(d["v"])
    return dict(**d, dropout_p=0.3)


def _run_graph_kv(mod, case, kw):
    fn = getattr(mod, KV)
    args = {k: v for k, v in kw.items() if not k.startswith("_")}
    args["cache_seqlens"] = kw["_capture_lens"].clone()
    g, ret = _capture(lambda: fn(**args))
    args["cache_seqlens"].copy_(kw["cache_seqlens"])
    g.replay()
    torch.cuda.synchronize()
    o, l = unpack(ret)
    return {"out": o.clone(), "lse": l.clone()}


def _run_compile(mod, case, kw):
    fn = getattr(mod, FUNC)
    return default_run(mod, case, kw, fn=torch.compile(lambda **a: fn(**a), fullgraph=True))


@case("B71", "torch.compile(fullgraph) forward and backward, length off the tile", "integration",
      "SandAI-org/MagiAttention#137, Comfy-Org/ComfyUI#15044, huggingface/transformers#35588", run=_run_compile,
      cuda_only=True, needs=("compile",))
def b71(device, seed):
    g = Gen(device, seed)
    mk = lambda s: dict(**g.qkv(1, s, s, 8, 2, 64), _dout=g.n(1, s, 8, 64))             # noqa: E731
    return dict(causal=True, _wrt=("q", "k", "v"), _variants=[mk(128), mk(196), mk(257)])


def _run_fake(mod, case, kw):
    from torch._subclasses.fake_tensor import FakeTensorMode
    fn = getattr(mod, case.api)
    for tag, k in variants(kw):
        args = {n: t for n, t in k.items() if not n.startswith("_")}
        real = fn(**args)
        with FakeTensorMode() as m:
            fake = fn(**{n: m.from_tensor(t) if torch.is_tensor(t) else t for n, t in args.items()})
        for i, (a, b) in enumerate(zip(tensors(real), tensors(fake))):
            sig = lambda t: (tuple(t.shape), tuple(t.stride()), t.dtype, t.device.type)  # noqa: E731
            assert sig(a) == sig(b), f"result {i}{tag}: fake {sig(b)} is not real {sig(a)}"
    return {}


@case("B73", "q and k in float32, v in bfloat16 (norm layers under autocast)", "error",
      "huggingface/diffusers#14104",
      reference=lambda kw: r"(?i)dtype|data type|same type|fp16|bf16|bfloat16|float16|half")
def b73(device, seed):
    g = Gen(device, seed)
    d = g.qkv(1, 16, 16, 2, 2, 64)
    return dict(q=d["q"].float(), k=d["k"].float(), v=d["v"])


@case("B75", "no keys at all: output zero, lse -inf, dq zero", "backward", "Dao-AILab/flash-attention#2470")
def b75(device, seed):
    g = Gen(device, seed)
    return dict(**g.qkv(2, 33, 0, 4, 2, 64), return_attn_probs=True, _wrt=("q", "k", "v"), _dout=g.n(2, 33, 4, 64),
                _poison=True, _variants=[dict(), dict(causal=True)])


def _run_double(mod, case, kw):
    q = kw["q"].detach().requires_grad_()
    out = unpack(getattr(mod, FUNC)(q, kw["k"], kw["v"], causal=True))[0]
    g, = torch.autograd.grad(out, q, kw["_dout"], create_graph=True)
    g.float().pow(2).sum().backward()
    return {}


@case("B77", "only one of the inputs wants a gradient", "backward",
      "pytorch/pytorch#148476, pytorch/xla#8685")
def b77(device, seed):
    g = Gen(device, seed)
    return dict(**g.qkv(2, 40, 60, 4, 2, 64), causal=True, _dout=g.n(2, 40, 4, 64),
                _variants=[dict(_wrt=("k",)), dict(_wrt=("v",)), dict(_wrt=("q",))])
