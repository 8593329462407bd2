"""FlashInfer and xFormers."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor

from .backend import Abilities, Backend, Forward
from .cases import Case
from .inputs import Inputs, pages_of_sequence


class FlashInfer(Backend):
    """FlashInfer's batched prefill and decode; its plan() is made outside the timing."""

    name = "flashinfer"
    distribution = "flashinfer-python"
    abilities = Abilities(backward=False, other_head_dim_v=True)

    def load(self) -> None:
        """Imports flashinfer."""
        self.module = importlib.import_module("flashinfer")

    def setup(self, case: Case, x: Inputs) -> Forward:
        """A planned wrapper."""
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=x.q.device)
        options: dict[str, Any] = {"q_data_type": x.q.dtype, "kv_data_type": x.k.dtype}
        if case.window_left >= 0:
            options["window_left"] = case.window_left
        if case.softcap:
            options["logits_soft_cap"] = case.softcap
        if case.kind == "decode":
            return self._decode(case, x, workspace, options)
        wrapper = self.module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        bounds_q, bounds_kv = (
            torch.tensor([0, *(span[i] for span in case.spans)], dtype=torch.int32).cumsum(
                0, dtype=torch.int32
            )
            for i in (0, 1)
        )
        wrapper.plan(
            bounds_q.to(x.q.device),
            bounds_kv.to(x.q.device),
            case.heads,
            case.kv_heads,
            case.head_dim,
            head_dim_vo=case.head_dim_v,
            causal=case.causal,
            **options,
        )
        q, k, v = (t.detach().flatten(0, -3) for t in x.leaves)
        shape = (*x.q.shape[:-1], case.head_dim_v)
        return lambda: wrapper.run(q, k, v).view(shape)

    def _decode(self, case: Case, x: Inputs, workspace: Tensor, options: dict[str, Any]) -> Forward:
        """A dense cache is shown as pages of 64 rows."""
        page = case.page_size or math.gcd(64, case.seqlen_kv)
        k, v = (t if case.page_size else t.reshape(-1, page, *t.shape[2:]) for t in (x.k, x.v))
        pages = case.seqlen_kv // page if not case.page_size else pages_of_sequence(case)
        table = torch.arange(case.batch * pages).view(case.batch, pages)
        if x.block_table is not None:
            table = x.block_table.cpu()
        used = [math.ceil(n / page) for _, n in case.spans]
        indices = torch.cat([table[i, :n] for i, n in enumerate(used)]).int()
        bounds = torch.tensor([0, *used]).cumsum(0).int()
        last = torch.tensor([(n - 1) % page + 1 for _, n in case.spans], dtype=torch.int32)
        wrapper = self.module.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=case.heads >= 4 * case.kv_heads
        )
        device = x.q.device
        wrapper.plan(
            bounds.to(device),
            indices.to(device),
            last.to(device),
            case.heads,
            case.kv_heads,
            case.head_dim,
            page,
            **options,
        )
        return lambda: wrapper.run(x.q[:, 0], (k, v))[:, None]

    def refuses(self, case: Case) -> str | None:
        """Its decode wrapper takes one query a sequence."""
        if case.kind == "decode" and case.seqlen_q > 1:
            return "one query a sequence in decode"
        if case.window_right > 0 and not case.causal:
            return "no window to the right"
        return super().refuses(case)


class Xformers(Backend):
    """xFormers' memory_efficient_attention."""

    name = "xformers"
    distribution = "xformers"
    abilities = Abilities(
        kinds=frozenset({"dense", "varlen"}),
        softcap=False,
        deterministic=False,
        other_head_dim_v=True,
    )

    def load(self) -> None:
        """Imports xformers.ops."""
        self.module = importlib.import_module("xformers.ops")

    def mask(self, case: Case) -> Any:
        """One of its bias objects."""
        bias = importlib.import_module("xformers.ops.fmha.attn_bias")
        if case.kind == "varlen":
            mask = bias.BlockDiagonalMask.from_seqlens(list(case.lengths))
            return mask.make_causal() if case.causal else mask
        if case.window_left >= 0:
            return bias.LowerTriangularFromBottomRightLocalAttentionMask(case.window_left + 1)
        return bias.LowerTriangularFromBottomRightMask() if case.causal else None

    def setup(self, case: Case, x: Inputs) -> Forward:
        """Groups of heads as a fifth dimension."""
        mask, group = self.mask(case), case.heads // case.kv_heads

        def call() -> Tensor:
            q, k, v = (t[None] if case.kind == "varlen" else t for t in x.leaves)
            if group > 1:
                q = q.unflatten(2, (case.kv_heads, group))
                k, v = (t.unsqueeze(3).expand(-1, -1, -1, group, -1) for t in (k, v))
            out = self.module.memory_efficient_attention(q, k, v, attn_bias=mask)
            out = out.flatten(2, 3) if group > 1 else out
            return out[0] if case.kind == "varlen" else out

        return call

    def refuses(self, case: Case) -> str | None:
        """Windows are causal and dense."""
        if case.has_window and (not case.causal or case.kind == "varlen"):
            return "no window of this kind"
        return super().refuses(case)
