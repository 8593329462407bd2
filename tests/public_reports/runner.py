"""Runs a case with a library and compares."""
from __future__ import annotations

import re

import torch

from .model import BF16, F16, KV, variants


def tensors(ret):
    return [t for t in (ret if isinstance(ret, (tuple, list)) else (ret,)) if torch.is_tensor(t)]


def unpack(ret):
    ts = tensors(ret)
    return ts[0], (ts[1] if len(ts) > 1 else None)


def poison(device):
    """Leave 0xFF bytes (NaN, -1) in memory that the allocator will hand out next."""
    if not str(device).startswith("cuda"):
        return
    held = [torch.full((1 << p,), 255, dtype=torch.uint8, device=device) for p in range(9, 28) for _ in range(3)]
    torch.cuda.synchronize()
    del held


def default_run(mod, case, kw, fn=None):
    fn = fn or getattr(mod, case.api)
    got = {}
    for tag, k in variants(kw):
        args = {n: t for n, t in k.items() if not n.startswith("_")}
        wrt, views = k.get("_wrt", ()), k.get("_views", {})
        leaves = []
        for n in wrt:
            leaf, view = views.get(n, (args[n], None))
            leaf = leaf.detach().requires_grad_()
            leaves.append(leaf)
            args[n] = view(leaf) if view else leaf
        if k.get("_poison"):
            poison(k["q"].device)
        out, lse = unpack(fn(**args))
        got["out" + tag] = out
        if k.get("return_attn_probs") or k.get("return_softmax_lse"):
            got["lse" + tag] = lse
        if k.get("k") is not None and case.api == KV:
            got["k_cache" + tag], got["v_cache" + tag] = args["k_cache"], args["v_cache"]
        if wrt:
            if k.get("_poison"):
                poison(k["q"].device)
            if isinstance(k["_dout"], str):
                grads = torch.autograd.grad(out.sum(), leaves)
            elif k.get("_dlse") is not None:
                grads = torch.autograd.grad([out, lse], leaves, [k["_dout"], k["_dlse"]])
            else:
                grads = torch.autograd.grad(out, leaves, k["_dout"])
            for n, gr in zip(wrt, grads):
                got[("dsink" if n == "learnable_sink" else "d" + n) + tag] = gr
    return got


def compare(case, kw, got, want, sim):
    """A list of complaints; empty means right."""
    bad = []
    unspec = want.get("_unspecified", {})
    q = kw.get("q", (kw.get("_variants") or [{}])[0].get("q"))
    for name, w in want.items():
        if name == "_unspecified":
            continue
        if name not in got or got[name] is None:
            bad.append(f"{name}: missing")
            continue
        g, t = got[name].detach(), case.tolerance(name)
        if tuple(g.shape) != tuple(w.shape):
            bad.append(f"{name}: shape {tuple(g.shape)}, should be {tuple(w.shape)}")
            continue
        dtype = g.dtype
        if name.split("#")[0] == "lse" and dtype != torch.float32:
            bad.append(f"{name}: type {dtype}, should be float32")
        base = name.split("#")[0]
        if base in ("out", "dq", "dk", "dv") and q is not None and q.dtype in (F16, BF16) and dtype != q.dtype:
            bad.append(f"{name}: type {dtype}, should be {q.dtype}")
        if t.exact:
            if not torch.equal(torch.nan_to_num(g.double(), 1e30), torch.nan_to_num(w.double(), 1e30).to(g.device)):
                bad.append(f"{name}: not identical")
            continue
        g, w = g.to(torch.float64), w.to(torch.float64).to(g.device)
        if name in unspec:
            skip = unspec[name].to(g.device)
            skip = skip[:, None, None].expand_as(w) if base == "out" else skip[None].expand_as(w)
            g, w = torch.where(skip, torch.zeros_like(w), g), torch.where(skip, torch.zeros_like(w), w)
        hard = torch.isinf(w)
        if not torch.equal(g[hard], w[hard]):
            bad.append(f"{name}: {int((g[hard] != w[hard]).sum())} of {int(hard.sum())} rows without keys are not {w[hard][0]}")
        soft = ~hard
        if not bool(torch.isfinite(g[soft]).all()):
            bad.append(f"{name}: {int((~torch.isfinite(g[soft])).sum())} values are not finite")
            continue
        if g[soft].numel():
            s = sim.get(name) if sim else None
            b = t.bound(w, s.to(w.device) if s is not None else None, dtype)
            err = float((g - w)[soft].abs().max())
            if err > b:
                bad.append(f"{name}: off by {err:.3g}, bound {b:.3g}, largest right value {float(w[soft].abs().max()):.3g}")
    return bad


STICKY = re.compile(r"(?i)illegal memory|misaligned address|illegal instruction|unspecified launch|device-side assert|"
                    r"invalid configuration|illegal address")


def run_case(case, mod, device="cuda", seed=0):
    """(verdict, details): PASS, REFUSED (a clean error where one is also right), UNSUPPORTED, SKIP, FAIL."""
    cuda = str(device).startswith("cuda")
    if case.cuda_only and not cuda:
        return "SKIP", ["needs a CUDA device"]
    if case.min_gpus > (torch.cuda.device_count() if cuda else 0):
        return "SKIP", [f"needs {case.min_gpus} devices"]
    kw = case.build(device, seed)
    want = case.reference(kw)
    sim = case.sim(kw) if case.sim else None
    runner = case.run or default_run

    def settle():
        if cuda:
            torch.cuda.synchronize()
    try:
        got = runner(mod, case, kw)
        settle()
    except AssertionError as e:
        return "FAIL", [str(e) or "assertion"]
    except Exception as e:                                                   # noqa: BLE001
        text = f"{type(e).__name__}: {e}".strip().splitlines()[0][:300]
        if STICKY.search(str(e)):
            return "FAIL", ["device fault: " + text]
        try:
            settle()
        except Exception as e2:                                              # noqa: BLE001
            return "FAIL", ["device fault after an error: " + str(e2).splitlines()[0]]
        if isinstance(e, TypeError) and "unexpected keyword" in str(e) or isinstance(e, AttributeError) and case.api in str(e):
            return "UNSUPPORTED", [text]
        if isinstance(want, str):
            return ("PASS", [text]) if re.search(want, str(e)) else ("FAIL", [f"error does not say why ({want}): {text}"])
        if kw.get("_or_error") and re.search(kw["_or_error"], str(e)):
            return "REFUSED", [text]
        if isinstance(e, NotImplementedError) and case.needs:
            return "UNSUPPORTED", [text]
        return "FAIL", [text]
    if isinstance(want, str):
        return "FAIL", [f"no error was raised (expected one like {want})"]
    bad = compare(case, kw, got, want, sim)
    return ("FAIL", bad) if bad else ("PASS", [])
