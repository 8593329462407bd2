"""What a case is, the right answers in float64, and inputs."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch

FUNC, VARLEN, KV = "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"
KINDS = ("forward", "backward", "varlen", "decode", "paged", "error", "integration")
F16, BF16 = torch.float16, torch.bfloat16
INF = float("inf")
# one unit in the last place at the largest value, by type
ULP = {F16: 2.0 ** -10, BF16: 2.0 ** -7, torch.float32: 2.0 ** -20, torch.float64: 1e-9}


# --------------------------------------------------------------------------------------------
# what a case is
# --------------------------------------------------------------------------------------------
@dataclass
class Tol:
    """bound = factor * max|sim - ref| + ulps * ulp(dtype) * max|ref| + relmax * max|ref| + atol.

    `sim` is the same computation in float32 with P, dS and the results rounded to the input type,
    i.e. what a kernel without faults does.  exact: bitwise equality."""
    factor: float = 3.0
    ulps: float = 1.0
    atol: float = 1e-6
    relmax: float = 0.0
    exact: bool = False

    def bound(self, ref: torch.Tensor, sim: Optional[torch.Tensor], dtype: torch.dtype) -> float:
        fin = ref[torch.isfinite(ref)]
        top = float(fin.abs().max()) if fin.numel() else 0.0
        b = self.atol + (self.relmax + self.ulps * ULP.get(dtype, 0.0)) * top
        if sim is not None and fin.numel():
            d = (sim.to(torch.float64) - ref.to(torch.float64))[torch.isfinite(ref)]
            b += self.factor * float(d.abs().max())
        return b


LSE_TOL = Tol(factor=0.0, ulps=0.0, relmax=1e-5, atol=2e-3)
GRAD_TOL = Tol(factor=4.0, ulps=1.0)
EXACT = Tol(exact=True)


def default_tol(name: str) -> Tol:
    base = name.split("#")[0]
    if base == "lse":
        return LSE_TOL
    if base in ("k_cache", "v_cache"):
        return EXACT
    return GRAD_TOL if base.startswith("d") else Tol()


@dataclass
class Case:
    id: str
    title: str
    kind: str
    source: str
    build: Callable[[str, int], dict]
    reference: Callable[[dict], Any]            # dict of expected tensors, or an error regex
    api: str = FUNC
    tol: dict = field(default_factory=dict)     # name -> Tol, over default_tol
    needs: tuple = ()                           # capabilities past plain forward and backward
    sim: Optional[Callable[[dict], dict]] = None
    run: Optional[Callable[..., dict]] = None   # run(mod, case, kw) -> dict of results
    heavy: bool = False                         # wants over 4 GB of device memory
    big: bool = False                           # slow on a CPU: the self-check runs its reference only
    cuda_only: bool = False
    min_gpus: int = 0

    def tolerance(self, name: str) -> Tol:
        return self.tol.get(name, self.tol.get(name.split("#")[0], default_tol(name)))


CASES: list[Case] = []


def case(id: str, title: str, kind: str, source: str, api: str = FUNC, compute=None, reference=None,
         sim: bool = True, **kw):
    """Register a case.  `compute(kw, mode)` gives results for mode 'ref' (float64) and 'sim'."""
    assert kind in KINDS, kind

    def deco(build):
        comp = compute or {FUNC: c_dense, VARLEN: c_varlen, KV: c_kv}[api]
        ref = reference or (lambda k: over_variants(comp, k, "ref"))
        s = (lambda k: over_variants(comp, k, "sim")) if (sim and reference is None) else None
        CASES.append(Case(id=id, title=title, kind=kind, source=source, api=api, build=build,
                          reference=ref, sim=s, **kw))
        return build
    return deco


# --------------------------------------------------------------------------------------------
# the reference: one dense attention with explicit gradients, exact in float64
# --------------------------------------------------------------------------------------------
def allowed(sq: int, sk: int, causal: bool, window, device) -> torch.Tensor:
    """(sq, sk) bool: may row i look at column j?  Bottom-right aligned, ends inclusive."""
    left, right = window
    if causal:
        right = 0
    i = torch.arange(sq, device=device)[:, None] + (sk - sq)
    j = torch.arange(sk, device=device)[None, :]
    ok = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if left is not None and left >= 0:
        ok &= j >= i - left
    if right is not None and right >= 0:
        ok &= j <= i + right
    return ok


def core(q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
         alibi_slopes=None, learnable_sink=None, dout=None, dlse=None, mode="ref",
         q_descale=None, k_descale=None, v_descale=None):
    """Dense attention, (B, S, H, D).  Returns out, lse and, given dout or dlse, gradients."""
    f = torch.float64 if mode == "ref" else torch.float32
    low = q.dtype

    def rd(x):                                   # round as a kernel would (simulation only)
        return x if mode == "ref" else x.to(low).to(f)

    B, Sq, H, D = q.shape
    Sk, Hk, Dv = k.shape[1], k.shape[2], v.shape[-1]
    assert H % Hk == 0 and v.shape[:3] == k.shape[:3] and k.shape[-1] == D
    g = H // Hk
    scale = D ** -0.5 if softmax_scale is None else float(softmax_scale)
    qf, kf, vf = q.to(f), k.to(f), v.to(f)
    if q_descale is not None:
        qf = qf * q_descale.to(f).repeat_interleave(g, 1)[:, None, :, None]
    if k_descale is not None:
        kf = kf * k_descale.to(f)[:, None, :, None]
    if v_descale is not None:
        vf = vf * v_descale.to(f)[:, None, :, None]
    ke, ve = (kf, vf) if g == 1 else (kf.repeat_interleave(g, 2), vf.repeat_interleave(g, 2))
    tiny = B * H > 4096                          # very many very small problems: no batched products

    def dots(a, b):                              # (B,I,H,D), (B,J,H,D) -> (B,H,I,J)
        if tiny:
            return (a.transpose(1, 2)[:, :, :, None] * b.transpose(1, 2)[:, :, None]).sum(-1)
        return torch.einsum("bihd,bjhd->bhij", a, b)

    def mix(p, b):                               # (B,H,I,J), (B,J,H,D) -> (B,I,H,D)
        if tiny:
            return (p[..., None] * b.transpose(1, 2)[:, :, None]).sum(3).transpose(1, 2)
        return torch.einsum("bhij,bjhd->bihd", p, b)

    s = dots(qf, ke) * scale
    dtanh = None
    if softcap and softcap > 0:
        t = torch.tanh(s / softcap)
        dtanh = 1 - t * t
        s = softcap * t
    if alibi_slopes is not None:
        sl = alibi_slopes.to(f)
        sl = sl.expand(B, H) if sl.dim() == 1 else sl
        i = torch.arange(Sq, device=q.device)[:, None] + (Sk - Sq)
        j = torch.arange(Sk, device=q.device)[None, :]
        s = s - sl[:, :, None, None] * (i - j).abs().to(f)
    ok = allowed(Sq, Sk, causal, window_size, q.device)
    s = s.masked_fill(~ok, -INF)
    m = s.amax(-1) if Sk else torch.full((B, H, Sq), -INF, dtype=f, device=q.device)
    if learnable_sink is not None:
        sink = learnable_sink.to(f)[None, :, None]
        m = torch.maximum(m, sink.expand(B, H, Sq))
    m0 = torch.where(torch.isinf(m), torch.zeros_like(m), m)
    e = torch.exp(s - m0[..., None])
    den = e.sum(-1)
    if learnable_sink is not None:
        den = den + torch.exp(sink - m0)
    empty = den == 0
    lse = torch.where(empty, torch.full_like(den, -INF), m0 + torch.log(den))
    p = e / torch.where(empty, torch.ones_like(den), den)[..., None]
    pr = rd(p)
    out = rd(mix(pr, ve))
    res = {"out": out, "lse": lse}
    if dout is None and dlse is None:
        return res
    do = torch.zeros(B, Sq, H, Dv, dtype=f, device=q.device) if dout is None else dout.to(f)
    dp = dots(do, ve)
    delta = (do * out).sum(-1).transpose(1, 2)                       # (B, H, Sq)
    if dlse is not None:
        delta = delta - torch.where(empty, torch.zeros_like(lse), dlse.to(f))
    ds = p * (dp - delta[..., None])
    if learnable_sink is not None:
        ps = torch.where(empty, torch.zeros_like(lse), torch.exp(sink - lse))
        res["dsink"] = -(ps * delta).sum((0, 2))
    if dtanh is not None:
        ds = ds * dtanh
    ds = rd(ds)
    res["dq"] = rd(mix(ds, ke) * scale)
    dk = mix(ds.transpose(2, 3), qf) * scale
    dv = mix(pr.transpose(2, 3), do)
    res["dk"] = rd(dk.reshape(B, Sk, Hk, g, D).sum(3))
    res["dv"] = rd(dv.reshape(B, Sk, Hk, g, Dv).sum(3))
    return res


OPTS = ("softmax_scale", "causal", "window_size", "softcap", "learnable_sink")


def _opts(kw):
    return {n: kw[n] for n in OPTS if n in kw}


def _pick(res, kw):
    """Keep what the call will hand back: out, lse if asked for, gradients of _wrt (through _views)."""
    want = {"out": res["out"]}
    if kw.get("return_attn_probs") or kw.get("return_softmax_lse") or kw.get("_dlse") is not None:
        want["lse"] = res["lse"]
    for n in kw.get("_wrt", ()):
        key = "dsink" if n == "learnable_sink" else "d" + n
        gr = res[key]
        if n in kw.get("_views", {}):            # gradient of the leaf behind the view
            leaf, fn = kw["_views"][n]
            z = torch.zeros(leaf.shape, dtype=gr.dtype, device=gr.device, requires_grad=True)
            gr, = torch.autograd.grad(fn(z), z, gr)
        want[key] = gr
    return want


def c_dense(kw, mode):
    q, k, v = kw["q"], kw["k"], kw["v"]
    dout = kw.get("_dout")
    if isinstance(dout, str):
        dout = torch.ones(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    if kw.get("_wrt") and dout is None and kw.get("_dlse") is None:
        raise AssertionError("a gradient case without an upstream gradient")
    res = core(q, k, v, alibi_slopes=kw.get("alibi_slopes"), dout=dout, dlse=kw.get("_dlse"), mode=mode,
               **{n: kw[n] for n in ("q_descale", "k_descale", "v_descale") if n in kw}, **_opts(kw))
    return _pick(res, kw)


def c_varlen(kw, mode):
    q, k, v = kw["q"], kw["k"], kw["v"]
    cq, ck = kw["cu_seqlens_q"].tolist(), kw["cu_seqlens_k"].tolist()
    uq, uk = kw.get("seqused_q"), kw.get("seqused_k")
    H, Dv = q.shape[1], v.shape[-1]
    f = torch.float64 if mode == "ref" else torch.float32
    dev = q.device
    z = lambda *s: torch.zeros(*s, dtype=f, device=dev)                     # noqa: E731
    full = {"out": z(q.shape[0], H, Dv), "lse": torch.full((H, q.shape[0]), -INF, dtype=f, device=dev),
            "dq": z(*q.shape), "dk": z(*k.shape), "dv": z(*v.shape)}
    covered = torch.zeros(q.shape[0], dtype=torch.bool, device=dev)
    dout, dlse = kw.get("_dout"), kw.get("_dlse")
    if isinstance(dout, str):
        dout = torch.ones(q.shape[0], H, Dv, dtype=q.dtype, device=dev)
    sinks = None
    for b in range(len(cq) - 1):
        nq = int(uq[b]) if uq is not None else cq[b + 1] - cq[b]
        nk = int(uk[b]) if uk is not None else ck[b + 1] - ck[b]
        a, c = slice(cq[b], cq[b] + nq), slice(ck[b], ck[b] + nk)
        covered[a] = True
        if nq == 0:
            continue
        sl = kw.get("alibi_slopes")
        if sl is not None and sl.dim() == 2:
            sl = sl[b]
        r = core(q[a][None], k[c][None], v[c][None], alibi_slopes=sl, mode=mode,
                 dout=None if dout is None else dout[a][None],
                 dlse=None if dlse is None else dlse[:, a][None], **_opts(kw))
        full["out"][a], full["lse"][:, a] = r["out"][0], r["lse"][0]
        if "dq" in r:
            full["dq"][a], full["dk"][c], full["dv"][c] = r["dq"][0], r["dk"][0], r["dv"][0]
            if "dsink" in r:
                sinks = r["dsink"] if sinks is None else sinks + r["dsink"]
    if sinks is not None:
        full["dsink"] = sinks
    want = _pick(full, kw)
    if not bool(covered.all()):
        want["_unspecified"] = {"out": ~covered, "lse": ~covered}
    return want


def c_kv(kw, mode):
    q, kc, vc = kw["q"], kw["k_cache"], kw["v_cache"]
    B, Sq, H, _ = q.shape
    lens = kw.get("cache_seqlens")
    if lens is None:
        lens = [kc.shape[1]] * B
    elif isinstance(lens, int):
        lens = [lens] * B
    else:
        lens = lens.tolist()
    bt, cbi = kw.get("block_table"), kw.get("cache_batch_idx")
    kn, vn = kw.get("k"), kw.get("v")
    outs, lses = [], []
    want = {}
    if kn is not None:
        want["k_cache"], want["v_cache"] = kc.clone(), vc.clone()
    for b in range(B):
        n = lens[b]
        if bt is not None:
            ps = kc.shape[1]
            idx = bt[b, : -(-n // ps)].long()
            K, V = kc[idx].flatten(0, 1)[:n], vc[idx].flatten(0, 1)[:n]
        else:
            slot = int(cbi[b]) if cbi is not None else b
            K, V = kc[slot, :n], vc[slot, :n]
            if kn is not None:
                want["k_cache"][slot, n:n + kn.shape[1]] = kn[b]
                want["v_cache"][slot, n:n + kn.shape[1]] = vn[b]
        if kn is not None:
            K, V = torch.cat([K, kn[b]]), torch.cat([V, vn[b]])
        sl = kw.get("alibi_slopes")
        if sl is not None and sl.dim() == 2:
            sl = sl[b]
        r = core(q[b][None], K[None], V[None], alibi_slopes=sl, mode=mode, **_opts(kw))
        outs.append(r["out"])
        lses.append(r["lse"])
    want["out"] = torch.cat(outs)
    if kw.get("return_softmax_lse"):
        want["lse"] = torch.cat(lses)
    return want


def variants(kw):
    """The calls a case makes: one, or one for each override in _variants (names get '#i')."""
    vs = kw.get("_variants")
    if not vs:
        return [("", kw)]
    base = {k: v for k, v in kw.items() if k != "_variants"}
    return [(f"#{i}", {**base, **o}) for i, o in enumerate(vs)]


def over_variants(comp, kw, mode):
    want = {}
    for tag, k in variants(kw):
        w = comp(k, mode)
        for name, t in w.items():
            if name == "_unspecified":
                want.setdefault("_unspecified", {}).update({n + tag: m for n, m in t.items()})
            else:
                want[name + tag] = t
    return want


# --------------------------------------------------------------------------------------------
# helpers for inputs
# --------------------------------------------------------------------------------------------
class Gen:
    """Seeded on the CPU, so the same values on every device."""

    def __init__(self, device, seed, dtype=BF16):
        self.g = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype

    def n(self, *shape, scale=1.0, mean=0.0, dtype=None):
        x = torch.randn(*shape, generator=self.g) * scale + mean
        return x.to(dtype or self.dtype).to(self.device)

    def ints(self, lo, hi, *shape):
        return torch.randint(lo, hi, shape, generator=self.g)

    def perm(self, n):
        return torch.randperm(n, generator=self.g)

    def qkv(self, B, Sq, Sk, H, Hk, D, Dv=None, **s):
        return dict(q=self.n(B, Sq, H, D, **s), k=self.n(B, Sk, Hk, D, **s), v=self.n(B, Sk, Hk, Dv or D))

    def packed(self, lq, lk, H, Hk, D, Dv=None, **s):
        cu = lambda x: torch.tensor([0] + list(torch.tensor(x).cumsum(0)), dtype=torch.int32,   # noqa: E731
                                    device=self.device)
        return dict(q=self.n(sum(lq), H, D, **s), k=self.n(sum(lk), Hk, D, **s), v=self.n(sum(lk), Hk, Dv or D),
                    cu_seqlens_q=cu(lq), cu_seqlens_k=cu(lk), max_seqlen_q=max(lq), max_seqlen_k=max(lk))

    def i32(self, x):
        return torch.tensor(x, dtype=torch.int32, device=self.device)

    def paged(self, lens, page, Hk, D, Dv=None, spare=3, fill=None):
        """A cache of pages in shuffled order; slots past a length hold `fill` (None: random)."""
        need = [-(-n // page) for n in lens]
        total, width = sum(need) + spare, max(max(need), 1)
        kc, vc = self.n(total, page, Hk, D), self.n(total, page, Hk, Dv or D)
        perm = self.perm(total).tolist()
        bt = torch.zeros(len(lens), width, dtype=torch.int32)
        used = 0
        for b, c in enumerate(need):
            bt[b, :c] = torch.tensor(perm[used:used + c], dtype=torch.int32)
            used += c
        if fill is not None:
            keep = torch.zeros(total, page, dtype=torch.bool)
            for b, n in enumerate(lens):
                for t in range(n):
                    keep[bt[b, t // page], t % page] = True
            kc[~keep.to(kc.device)] = fill
            vc[~keep.to(kc.device)] = fill
        return dict(k_cache=kc, v_cache=vc, block_table=bt.to(self.device), cache_seqlens=self.i32(lens))
