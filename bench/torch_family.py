"""torch's own attention."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from .backend import HALF, Abilities, Backend, Forward
from .cases import Case
from .inputs import Inputs


@contextlib.contextmanager
def deterministic_torch(on: bool) -> Iterator[None]:
    """torch.use_deterministic_algorithms for a while.

    Not warn_only: under that FlashAttention's backward keeps to any order. Filling new tensors
    with NaN would be timed, too.
    """
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills


class Sdpa(Backend):
    """torch's scaled_dot_product_attention, one of its backends forced."""

    def __init__(self, suffix: str, choice: SDPBackend, abilities: Abilities) -> None:
        """Names it sdpa_<suffix>."""
        self.name, self.choice, self.abilities = f"sdpa_{suffix}", choice, abilities

    @contextlib.contextmanager
    def scope(self, case: Case) -> Iterator[None]:
        """Forces the backend."""
        with sdpa_kernel(self.choice), deterministic_torch(case.deterministic):
            yield

    def setup(self, case: Case, x: Inputs) -> Forward:
        """Heads before rows, as views of the same tensors."""
        # One query against a full cache sees every key: no mask.
        is_causal = case.causal and case.seqlen_q > 1
        grouped, mask = case.heads != case.kv_heads, None
        if is_causal and case.seqlen_q != case.seqlen_kv:
            # is_causal alone would align the diagonal with the first key.
            is_causal, mask = False, causal_lower_right(case.seqlen_q, case.seqlen_kv)

        def call() -> Tensor:
            out = F.scaled_dot_product_attention(
                x.q.transpose(1, 2),
                x.k.transpose(1, 2),
                x.v.transpose(1, 2),
                attn_mask=mask,
                is_causal=is_causal,
                enable_gqa=grouped,
            )
            return out.transpose(1, 2)

        return call


SDPA_ABILITIES = Abilities(
    kinds=frozenset({"dense", "decode"}),
    window=False,
    softcap=False,
    bottom_right=False,
    uneven_cache=False,
    paged=False,
)


def sdpa_backends() -> list[Backend]:
    """SDPA's four backends."""
    base = vars(SDPA_ABILITIES)
    on_cpu = {"dtypes": HALF | {"float32"}, "devices": frozenset({"cuda", "cpu"})}
    return [
        Sdpa("cudnn", SDPBackend.CUDNN_ATTENTION, Abilities(**base | {"other_head_dim_v": True})),
        Sdpa(
            "flash",
            SDPBackend.FLASH_ATTENTION,
            Abilities(**base | on_cpu | {"bottom_right": torch.cuda.is_available()}),
        ),
        Sdpa(
            "efficient",
            SDPBackend.EFFICIENT_ATTENTION,
            Abilities(**base | {"dtypes": HALF | {"float32"}, "grouped_heads": False}),
        ),
        Sdpa(
            "math",
            SDPBackend.MATH,
            Abilities(**base | on_cpu | {"materialises": True, "other_head_dim_v": True}),
        ),
    ]


class TorchVarlen(Backend):
    """torch.nn.attention.varlen.varlen_attn."""

    name = "torch_varlen"
    abilities = Abilities(kinds=frozenset({"varlen"}), softcap=False, deterministic=False)

    def load(self) -> None:
        """Imports it: torch 2.10 and newer."""
        self.module = importlib.import_module("torch.nn.attention.varlen")
        self.parameters = inspect.signature(self.module.varlen_attn).parameters

    def refuses(self, case: Case) -> str | None:
        """Windows came after torch 2.10."""
        if case.has_window and "window_size" not in self.parameters:
            return "no window"
        return super().refuses(case)

    def setup(self, case: Case, x: Inputs) -> Forward:
        """Causal is is_causal in torch 2.10 and window_size later."""
        options: dict[str, Any] = {}
        if "window_size" in self.parameters:
            options["window_size"] = (case.window_left, 0 if case.causal else case.window_right)
        elif case.causal:
            options["is_causal"] = True
        if case.heads != case.kv_heads and "enable_gqa" in self.parameters:
            options["enable_gqa"] = True
        longest = max(case.lengths)
        return lambda: self.module.varlen_attn(
            x.q, x.k, x.v, x.cu_seqlens, x.cu_seqlens, longest, longest, **options
        )


class Flex(Backend):
    """Compiled FlexAttention, with a block mask for causal and windows."""

    name = "flex"
    abilities = Abilities(
        kinds=frozenset({"dense"}), deterministic=False, paged=False, other_head_dim_v=True
    )

    def load(self) -> None:
        """Compiles lazily; Triton must be there."""
        importlib.import_module("triton")
        self.module = importlib.import_module("torch.nn.attention.flex_attention")
        # A graph a shape and mask; beyond the limit FlexAttention would run without a kernel.
        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        # A graph of which only the backward is timed is kept, and with it what it would reuse.
        importlib.import_module("torch._functorch.config").donated_buffer = False
        self.attend = torch.compile(self.module.flex_attention, dynamic=False)

    def setup(self, case: Case, x: Inputs) -> Forward:
        """Builds the block mask once: it depends on the shape alone."""
        offset, left = case.seqlen_kv - case.seqlen_q, case.window_left
        right, cap = 0 if case.causal else case.window_right, case.softcap

        def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            seen = key >= 0
            if right >= 0:
                seen = seen & (key <= row + offset + right)
            if left >= 0:
                seen = seen & (key >= row + offset - left)
            return seen

        def bend(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        mask = None
        if right >= 0 or left >= 0:
            mask = self.module.create_block_mask(
                visible, None, None, case.seqlen_q, case.seqlen_kv, device=str(x.q.device)
            )
        q, k, v = (t.transpose(1, 2) for t in x.leaves)
        options = {"block_mask": mask, "enable_gqa": case.heads != case.kv_heads}
        if cap:
            options["score_mod"] = bend
        return lambda: self.attend(q, k, v, **options).transpose(1, 2)
