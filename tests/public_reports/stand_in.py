"""A library in plain PyTorch, to try the cases themselves; `bug` breaks it on purpose."""
from __future__ import annotations

import torch

from .model import BF16, F16, INF, c_dense, c_kv, c_varlen


class Oracle:
    def __init__(self, bug=""):
        self.bug = bug

    def _call(self, comp, tensors_, kw):
        bug = self.bug

        class Fn(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *ts):
                k = {**kw, **dict(zip(tensors_, ts)), "return_attn_probs": True, "return_softmax_lse": True}
                r = comp(k, "sim")
                ctx.save_for_backward(*ts)
                out, lse = r["out"].to(kw["_out_dtype"]), r["lse"].float()
                if bug == "lse_posinf":
                    lse = torch.where(lse == -INF, torch.full_like(lse, INF), lse)
                if bug == "nan_rows":
                    m = (lse == -INF)
                    m = m.transpose(-1, -2)[..., None]
                    out = torch.where(m, torch.full_like(out, float("nan")), out)
                return out, lse

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, dout, dlse):
                ts = ctx.saved_tensors
                if bug == "ignore_dlse":
                    dlse = None
                if bug == "dense_dout":
                    dout = dout.as_strided(dout.shape, torch.empty(dout.shape).stride()) if dout.stride()[0] else dout
                k = {**kw, **dict(zip(tensors_, ts)), "_dout": dout, "_dlse": dlse, "_wrt": tensors_, "_views": {}}
                if bug == "drop_scale_in_bwd":
                    k.pop("softmax_scale", None)
                r = comp(k, "sim")
                gs = []
                for n, t in zip(tensors_, ts):
                    gr = r["dsink" if n == "learnable_sink" else "d" + n].to(t.dtype)
                    if bug == "gqa_first_head" and n in ("k", "v"):
                        gr = gr * 0.5
                    gs.append(gr)
                return tuple(gs)
        ts = [kw[n] for n in tensors_]
        if not all(t.is_floating_point() for t in ts):
            raise TypeError("dtype must be fp16 or bf16")
        return Fn.apply(*ts)

    def _prep(self, q, k, v, kw):
        if len({t.dtype for t in (q, k, v)}) > 1 or q.dtype not in (F16, BF16):
            raise RuntimeError("q, k, v must have the same dtype, fp16 or bf16")
        kw = {a: b for a, b in kw.items() if b is not None}
        b = self.bug
        w = kw.get("window_size", (-1, -1))
        if b == "window_exclusive" and w[0] > 0:
            kw["window_size"] = (w[0] - 1, w[1])
        if b == "window_right_clamp":
            sk = k.shape[-3]
            l, r = (w[0] if w[0] < sk else -1), (w[1] if w[1] < sk else -1)
            kw["window_size"] = (l, sk if (l >= 0 and r < 0) else r)
        if b == "causal_window_minus1" and kw.get("causal") and w == (-1, 0):
            kw["window_size"] = (0, 0)
            kw["causal"] = False
        if b == "scale_or_default" and not kw.get("softmax_scale"):
            kw.pop("softmax_scale", None)
        if b == "no_softcap":
            kw.pop("softcap", None)
        kw["_out_dtype"] = q.dtype
        return kw

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                        alibi_slopes=None, deterministic=False, return_attn_probs=False, learnable_sink=None):
        kw = self._prep(q, k, v, dict(q=q, k=k, v=v, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
                                      softcap=softcap, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink))
        names = ["q", "k", "v"] + (["learnable_sink"] if learnable_sink is not None else [])
        if self.bug == "drop_last_key" and k.shape[1] % 32 == 1:
            kw["k"], kw["v"] = k[:, :-1], v[:, :-1]
        if self.bug == "top_left" and causal:
            kw["causal"], kw["window_size"] = False, (kw["window_size"][0], q.shape[1] - k.shape[1])
            kw["window_size"] = (-1, max(q.shape[1] - k.shape[1], 0))
        out, lse = self._call(c_dense, names, kw)
        return (out, lse, None) if return_attn_probs else out

    def flash_attn_varlen_func(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                               softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                               deterministic=False, return_attn_probs=False, seqused_q=None, seqused_k=None):
        kw = self._prep(q, k, v, dict(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                                      softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
                                      alibi_slopes=alibi_slopes, seqused_q=seqused_q, seqused_k=seqused_k))
        out, lse = self._call(c_varlen, ["q", "k", "v"], kw)
        return (out, lse, None) if return_attn_probs else out

    def flash_attn_with_kvcache(self, q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, cache_batch_idx=None,
                                block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                alibi_slopes=None, num_splits=0, return_softmax_lse=False):
        if k is not None and isinstance(cache_seqlens, int) and cache_seqlens + k.shape[1] > k_cache.shape[1]:
            raise ValueError("new keys do not fit in the cache")
        kw = self._prep(q, k_cache, v_cache, dict(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, softmax_scale=softmax_scale,
                                                  cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
                                                  block_table=block_table, causal=causal, window_size=window_size,
                                                  softcap=softcap, alibi_slopes=alibi_slopes))
        if self.bug == "sorted_pages" and block_table is not None:
            kw["block_table"] = block_table.sort(1).values
        if self.bug == "nan_tail" and cache_seqlens is not None and block_table is None and k is None:
            r = c_kv({**kw, "return_softmax_lse": True}, "sim")
            r["out"] = r["out"] + 0 * v_cache.float().sum((1, 2, 3))[:, None, None, None]
        else:
            r = c_kv({**kw, "return_softmax_lse": True}, "sim")
        if self.bug == "stale_rows" and torch.is_tensor(cache_seqlens):
            r["out"][cache_seqlens == 0] = 1.0
        if k is not None:
            k_cache.copy_(r["k_cache"])
            v_cache.copy_(r["v_cache"])
        out = r["out"].to(q.dtype)
        return (out, r["lse"].float()) if return_softmax_lse else out


# which planted bug must be caught by which case
MUTANTS = {"top_left": ("B01", "B19"), "lse_posinf": ("B01", "B11", "B65"), "nan_rows": ("B01", "B15", "B75"),
           "window_exclusive": ("B13", "B61"), "window_right_clamp": ("B18",), "causal_window_minus1": ("B17",),
           "scale_or_default": ("B86",), "no_softcap": ("B26", "B27"), "ignore_dlse": ("B64",), "dense_dout": ("B30",),
           "drop_scale_in_bwd": ("B28", "B85"), "gqa_first_head": ("B82",), "sorted_pages": ("B57",),
           "nan_tail": ("B46",), "drop_last_key": ("B35",), "stale_rows": ("B50",)}
