"""Tries every reference and convention, and the cases on the stand-in."""
from __future__ import annotations

import re
import time

import torch

from .model import BF16, CASES, INF, KINDS, allowed, core
from .runner import run_case
from .stand_in import MUTANTS, Oracle


def check_core():
    """The explicit formulas against F.scaled_dot_product_attention and autograd, in float64."""
    import torch.nn.functional as F
    g = torch.Generator().manual_seed(1)
    for (sq, sk, causal, window, cap, alibi, sink) in [
            (13, 13, True, (-1, -1), 0, False, False), (9, 17, True, (-1, -1), 0, False, False),
            (17, 9, True, (-1, -1), 0, False, False), (17, 20, False, (3, 2), 0, False, False),
            (20, 7, False, (4, 5), 0, True, False), (11, 12, True, (-1, -1), 2.0, False, True),
            (12, 6, True, (2, 0), 3.0, True, True)]:
        B, H, Hk, D, Dv = 2, 4, 2, 8, 6
        q, k = (torch.randn(B, s, h, D, generator=g, dtype=torch.float64) for s, h in ((sq, H), (sk, Hk)))
        v = torch.randn(B, sk, Hk, Dv, generator=g, dtype=torch.float64)
        dout = torch.randn(B, sq, H, Dv, generator=g, dtype=torch.float64)
        dlse = torch.randn(B, H, sq, generator=g, dtype=torch.float64)
        slopes = torch.rand(H, generator=g, dtype=torch.float64) if alibi else None
        snk = torch.randn(H, generator=g, dtype=torch.float64) if sink else None
        r = core(q, k, v, causal=causal, window_size=window, softcap=cap, alibi_slopes=slopes, learnable_sink=snk,
                 dout=dout, dlse=dlse)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)] + ([snk.clone().requires_grad_()] if sink else [])
        Q, K, V = leaves[:3]
        # written out the slow way: one row at a time
        outs, lses = [], []
        for b in range(B):
            for h in range(H):
                for i in range(sq):
                    cols = [j for j in range(sk)
                            if (not (causal or window[1] >= 0) or j <= i + sk - sq + (0 if causal else window[1]))
                            and (window[0] < 0 or j >= i + sk - sq - window[0])]
                    lg = torch.stack([(Q[b, i, h] @ K[b, j, h // 2]) * D ** -0.5 for j in cols]) if cols else Q.new_zeros(0)
                    if cap:
                        lg = cap * torch.tanh(lg / cap)
                    if alibi:
                        lg = lg - slopes[h] * Q.new_tensor([abs(i + sk - sq - j) for j in cols])
                    all_ = torch.cat([lg, leaves[3][h:h + 1]]) if sink else lg
                    lse = torch.logsumexp(all_, 0) if len(all_) else None
                    lses.append(lse)
                    outs.append((torch.exp(lg - lse)[:, None] * V[b, cols, h // 2]).sum(0) if cols else Q.new_zeros(Dv))
        out = torch.stack(outs).view(B, H, sq, Dv).transpose(1, 2)
        loss = (out * dout).sum() + sum(l * d for l, d in zip(lses, dlse.flatten()) if l is not None)
        gr = torch.autograd.grad(loss, leaves)
        assert torch.allclose(out, r["out"], atol=1e-11)
        for l, x in zip(lses, r["lse"].flatten()):
            assert (x == -INF) if l is None else abs(float((l - x).detach())) < 1e-11
        for n, t in zip(("dq", "dk", "dv", "dsink"), gr):
            assert torch.allclose(t, r[n], atol=1e-10), n
        if not cap and not alibi and not sink:
            m = allowed(sq, sk, causal, window, "cpu")
            live = m.any(1)
            e = lambda t: t.repeat_interleave(H // Hk, 2).transpose(1, 2)    # noqa: E731
            o = F.scaled_dot_product_attention(q.transpose(1, 2), e(k), e(v), attn_mask=m)
            assert torch.allclose(o.transpose(1, 2)[:, live], r["out"][:, live], atol=1e-11)


def convention(name, t, want):
    """Complaints about one expected tensor: finite, or -inf lse on a row whose output is zero."""
    base, tag = name.split("#")[0], name[len(name.split("#")[0]):]
    if base != "lse" and not name.startswith("lse_"):
        return [] if bool(torch.isfinite(t.double()).all()) else [f"{name} is not finite"]
    bad = []
    if bool(torch.isnan(t).any()) or bool((t == INF).any()):
        bad.append(f"{name} holds NaN or +inf")
    out = want.get("out" + tag)
    if out is not None and base == "lse" and bool((t == -INF).any()):
        rows = (t == -INF).transpose(-1, -2)                     # (B, Sq, H) or (total_q, H)
        if bool((out[rows] != 0).any()):
            bad.append(f"{name}: -inf but the output there is not zero")
    return bad


def self_check(verbose=False):
    torch.set_num_threads(1)
    t0 = time.time()
    check_core()
    print("formulas agree with the slow ones, with autograd and with SDPA in float64")
    ids = [c.id for c in CASES]
    assert len(ids) == len(set(ids)) and all(c.kind in KINDS for c in CASES)
    bad, empty_rows, slow = [], 0, []
    verdicts: dict[str, list[str]] = {}
    for c in CASES:
        t1 = time.time()
        kw = c.build("cpu", 0)
        want = c.reference(kw)
        if isinstance(want, str):
            re.compile(want)
        else:
            for name, t in want.items():
                if name == "_unspecified":
                    continue
                bad += [f"{c.id} {m}" for m in convention(name, t, want)]
                if name.startswith("lse"):
                    empty_rows += int((t == -INF).sum())
            if c.sim:
                s = c.sim(kw)
                for name, t in want.items():
                    if name != "_unspecified" and not c.tolerance(name).exact:
                        b = c.tolerance(name).bound(t.double(), s[name].double(), BF16)
                        if not (0 < b < INF):
                            bad.append(f"{c.id} {name}: bound {b}")
        two = kw if c.heavy or c.big else c.build("cpu", 0)       # the same seed gives the same input
        for n, t in kw.items():
            if torch.is_tensor(t) and not (c.heavy or c.big):
                assert torch.equal(torch.nan_to_num(t.float()), torch.nan_to_num(two[n].float())), (c.id, n)
        del two
        if not (c.heavy or c.big):
            v, why = run_case(c, Oracle(), "cpu")
            verdicts.setdefault(v, []).append(c.id)
            if v == "FAIL":
                bad.append(f"{c.id} fails on the stand-in: {why}")
            if verbose:
                print(f"  {c.id} {v:12s} {time.time() - t1:6.2f} s  {c.title} {why if v != 'PASS' else ''}")
        if time.time() - t1 > 5:
            slow.append(f"{c.id} {time.time() - t1:.1f}s")
    planted = [(bug, c) for bug, hit in MUTANTS.items() for c in CASES if c.id in hit]
    for bug, c in planted:
        if run_case(c, Oracle(bug), "cpu")[0] != "FAIL":
            bad.append(f"{c.id} does not notice the planted bug {bug}")
    by = {k: sum(c.kind == k for c in CASES) for k in KINDS}
    print(f"{len(CASES)} cases {by}; heavy {sum(c.heavy for c in CASES)}")
    print(f"rows without keys over all references: {empty_rows}, all with lse -inf and output 0")
    print("stand-in library: " + ", ".join(f"{k} {len(v)}" for k, v in sorted(verdicts.items()))
          + (f"  (unsupported: {' '.join(verdicts['UNSUPPORTED'])})" if "UNSUPPORTED" in verdicts else ""))
    print(f"planted bugs: {len(planted)} checks over {len({b for b, _ in planted})} bugs")
    if slow:
        print("slow: " + ", ".join(slow))
    for m in bad:
        print("BAD " + m)
    print(f"self-check {'FAILED' if bad else 'ok'} in {time.time() - t0:.0f} s")
    return not bad
