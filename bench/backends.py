"""The contestants. A backend says what it can do as data and gives one forward function.

Gradients are always taken by autograd through that function, so `bwd` is what training runs.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cases import Case
from .cost import score_bytes
from .inputs import Inputs, pages_of_sequence
from .machine import version_of

Forward = Callable[[], Tensor]
ROOT = Path(__file__).resolve().parent.parent
HALF = frozenset({"bfloat16", "float16"})
FA4_CACHE = Path(tempfile.gettempdir()) / "flash_cuda_bench_fa4"


@dataclass(frozen=True)
class Abilities:
    """What a backend can do; `Backend.refuses` turns it into reasons."""

    kinds: frozenset[str] = frozenset({"dense", "varlen", "decode"})
    dtypes: frozenset[str] = HALF
    devices: frozenset[str] = frozenset({"cuda"})
    backward: bool = True
    window: bool = True
    softcap: bool = True
    softcap_backward: bool = True
    grouped_heads: bool = True
    bottom_right: bool = True  # causal with fewer queries than keys
    deterministic: bool = True
    uneven_cache: bool = True
    paged: bool = True
    page_multiple: int = 1
    other_head_dim_v: bool = False
    max_head_dim: int = 256
    materialises: bool = False  # keeps the score matrix in memory


class Backend:
    """One implementation of attention."""

    name = ""
    distribution: str | None = None  # for the version
    is_peer = True
    abilities = Abilities()

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here at all, None if it can."""
        if device.type not in self.abilities.devices:
            return f"needs {' or '.join(sorted(self.abilities.devices))}, this is {device.type}"
        try:
            self.load()
        except Exception as error:  # a broken peer must not end the run
            return first_line(error)
        return None

    def load(self) -> None:
        """Imports what it needs; raises if that is absent."""

    def version(self) -> str:
        """For the report."""
        found = version_of(self.distribution) if self.distribution else None
        return found or f"torch {torch.__version__}"

    def scope(self, case: Case) -> contextlib.AbstractContextManager[Any]:
        """What must be in force while it runs."""
        return contextlib.nullcontext()

    def setup(self, case: Case, x: Inputs) -> Forward:
        """The forward function for one set of inputs: (batch, rows, heads, columns) or packed."""
        raise NotImplementedError

    def refuses(self, case: Case) -> str | None:
        """Why it does not run this case, None if it does."""
        can = self.abilities
        if case.kind not in can.kinds:
            return f"no {case.kind}"
        if case.dtype not in can.dtypes:
            return f"no {case.dtype}"
        is_causal_cut = case.causal and any(q != kv for q, kv in case.spans)
        limits = {
            "no backward": case.needs_backward and not can.backward,
            "no window": case.has_window and not can.window,
            "no softcap": case.softcap and not can.softcap,
            "no backward with softcap": case.softcap
            and case.needs_backward
            and not can.softcap_backward,
            "no grouped heads": case.heads != case.kv_heads and not can.grouped_heads,
            "no bottom-right causal": is_causal_cut and not can.bottom_right,
            "no deterministic backward": case.deterministic and not can.deterministic,
            "no cache lengths": case.kind == "decode" and case.lengths and not can.uneven_cache,
            "no pages": case.page_size and not can.paged,
            f"page size must be a multiple of {can.page_multiple}": case.page_size
            % can.page_multiple,
            "head_dim_v must equal head_dim": case.head_dim != case.head_dim_v
            and not can.other_head_dim_v,
            f"head_dim up to {can.max_head_dim}": case.head_dim > can.max_head_dim,
        }
        for reason, holds in limits.items():
            if holds:
                return reason
        if can.materialises and torch.cuda.is_available():
            # Scores, probabilities and their gradients in float32; `bwd` keeps three sets of them.
            sets = 3 if "bwd" in case.passes else 1
            need, free = 8 * sets * score_bytes(case), torch.cuda.mem_get_info()[0]
            if need > free / 2:
                return f"its scores need {need / 2**30:.0f} GiB"
        return None


def first_line(error: BaseException) -> str:
    """The first line of an error, with its type."""
    text = str(error).strip().split("\n")[0][:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def ends(case: Case, unlimited: int | None) -> tuple[int | None, int | None]:
    """The window as FlashAttention's functions take it, beside causal."""
    right = 0 if case.causal and case.window_left >= 0 else case.window_right
    return tuple(unlimited if end < 0 else end for end in (case.window_left, right))


# ---- the FlashAttention family: one set of names, which flash_cuda has too --------------------


class FlashAttn2(Backend):
    """The functions of FlashAttention-2: flash_attn_func, _varlen_func, _with_kvcache."""

    name = "fa2"
    distribution = "flash-attn"
    module: ModuleType
    page_argument = "block_table"
    unlimited: int | None = -1
    abilities = Abilities(page_multiple=256, softcap_backward=True)

    def load(self) -> None:
        """Imports flash_attn, which FlashAttention-4 alone also provides, without functions."""
        module = importlib.import_module("flash_attn")
        if not hasattr(module, "flash_attn_func"):
            raise ImportError("flash_attn has no flash_attn_func (FlashAttention-2 is absent)")
        self.module = module

    def options(self, case: Case) -> dict[str, Any]:
        """Keywords that all functions share."""
        options: dict[str, Any] = {
            "causal": case.causal,
            "window_size": ends(case, self.unlimited),
        }
        if case.softcap:
            options["softcap"] = case.softcap
        return options

    def setup(self, case: Case, x: Inputs) -> Forward:
        """The function that fits the kind of case."""
        options = self.options(case)
        if case.kind == "decode":
            if x.block_table is not None:
                options[self.page_argument] = x.block_table
            return lambda: first(
                self.module.flash_attn_with_kvcache(
                    x.q, x.k, x.v, cache_seqlens=x.cache_seqlens, **options
                )
            )
        if case.deterministic:
            options["deterministic"] = True
        if case.kind == "varlen":
            longest = max(case.lengths)
            return lambda: first(
                self.module.flash_attn_varlen_func(
                    x.q,
                    x.k,
                    x.v,
                    cu_seqlens_q=x.cu_seqlens,
                    cu_seqlens_k=x.cu_seqlens,
                    max_seqlen_q=longest,
                    max_seqlen_k=longest,
                    **options,
                )
            )
        return lambda: first(self.module.flash_attn_func(x.q, x.k, x.v, **options))


def first(result: Any) -> Tensor:
    """The output, of functions that return it alone or before others."""
    return result[0] if isinstance(result, tuple) else result


class FlashCuda(FlashAttn2):
    """This package; `kernel` forces a path, None lets it choose."""

    distribution = "flash-cuda"
    is_peer = False
    abilities = Abilities(
        dtypes=frozenset({"bfloat16", "float16", "float32", "float8_e4m3fn"}),
        devices=frozenset({"cuda", "cpu"}),
        other_head_dim_v=True,
    )

    def __init__(self, kernel: str | None = None) -> None:
        """Names the path."""
        self.kernel = kernel
        self.name = f"flash_cuda:{kernel}" if kernel else "flash_cuda"

    def load(self) -> None:
        """Imports flash_cuda: this folder's if it is built here, else the installed one."""
        if any((ROOT / "flash_cuda").glob("_C*.so")):
            self.module = importlib.import_module("flash_cuda")
            return
        # `python -m` puts the current folder first, where sources without kernels would hide it.
        before = list(sys.path)
        sys.path[:] = [entry for entry in before if Path(entry or ".").resolve() != ROOT]
        try:
            self.module = importlib.import_module("flash_cuda")
        finally:
            sys.path[:] = before

    def refuses(self, case: Case) -> str | None:
        """As its abilities, with float32 and float8 where they are served."""
        if case.dtype == "float8_e4m3fn" and case.needs_backward:
            return "no float8 backward"
        return super().refuses(case)

    def scope(self, case: Case) -> contextlib.AbstractContextManager[Any]:
        """Forces the path."""
        if self.kernel is None:
            return contextlib.nullcontext()
        return self.module.use_kernel(self.kernel)


class FlashAttn3(FlashAttn2):
    """FlashAttention-3."""

    name = "fa3"
    distribution = "flash-attn-3"
    page_argument = "page_table"
    abilities = Abilities(
        dtypes=HALF | {"float8_e4m3fn"}, other_head_dim_v=True, softcap_backward=True
    )

    def load(self) -> None:
        """Imports it under either of its names."""
        try:
            self.module = importlib.import_module("flash_attn_interface")
        except ImportError:
            self.module = importlib.import_module("flash_attn_3.flash_attn_interface")

    def refuses(self, case: Case) -> str | None:
        """It is for Hopper alone."""
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
            return "Hopper only"
        if case.dtype == "float8_e4m3fn" and case.needs_backward:
            return "no float8 backward"
        return super().refuses(case)


class FlashAttn4(Backend):
    """FlashAttention-4, `flash_attn.cute`; compiles a kernel at its first call."""

    name = "fa4"
    distribution = "flash-attn-4"
    abilities = Abilities(kinds=frozenset({"dense", "varlen", "decode"}), other_head_dim_v=True)

    def load(self) -> None:
        """Imports it, with the disk cache on: `bench.warm` fills it from several processes."""
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(FA4_CACHE))
        self.module = importlib.import_module("flash_attn.cute")

    def options(self, case: Case) -> dict[str, Any]:
        """Keywords that both functions share."""
        options: dict[str, Any] = {"causal": case.causal}
        if case.has_window:
            options["window_size"] = ends(case, None)
            options["causal"] = case.causal and case.window_left < 0
        if case.softcap:
            options["softcap"] = case.softcap
        if case.deterministic:
            options["deterministic"] = True
        return options

    def setup(self, case: Case, x: Inputs) -> Forward:
        """flash_attn_func, or flash_attn_varlen_func for packed sequences and caches."""
        options = self.options(case)
        if case.kind == "decode":
            options |= {"seqused_k": x.cache_seqlens, "page_table": x.block_table}
            options["max_seqlen_k"] = case.seqlen_kv
            options["num_splits"] = 0
        if case.kind == "varlen":
            longest = max(case.lengths)
            options |= {"cu_seqlens_q": x.cu_seqlens, "cu_seqlens_k": x.cu_seqlens}
            options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        if case.kind == "dense":
            return lambda: first(self.module.flash_attn_func(x.q, x.k, x.v, **options))
        return lambda: first(self.module.flash_attn_varlen_func(x.q, x.k, x.v, **options))


# ---- torch ------------------------------------------------------------------------------------


@contextlib.contextmanager
def deterministic_torch(on: bool) -> Iterator[None]:
    """torch.use_deterministic_algorithms for a while."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


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
        grouped = case.heads != case.kv_heads

        def call() -> Tensor:
            out = F.scaled_dot_product_attention(
                x.q.transpose(1, 2),
                x.k.transpose(1, 2),
                x.v.transpose(1, 2),
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
        Sdpa("flash", SDPBackend.FLASH_ATTENTION, Abilities(**base | on_cpu)),
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
    abilities = Abilities(
        kinds=frozenset({"varlen"}), window=False, softcap=False, deterministic=False
    )

    def load(self) -> None:
        """Imports it: torch 2.10 and newer."""
        self.module = importlib.import_module("torch.nn.attention.varlen")

    def setup(self, case: Case, x: Inputs) -> Forward:
        """Causal is is_causal in torch 2.10 and window_size later."""
        import inspect

        names = inspect.signature(self.module.varlen_attn).parameters
        options: dict[str, Any] = {}
        if case.causal:
            options = {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}
        if case.heads != case.kv_heads and "enable_gqa" in names:
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


# ---- others -----------------------------------------------------------------------------------


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


def all_backends() -> dict[str, Backend]:
    """Every backend, by name."""
    paths = ("sm80", "sm90", "sm100", "cpu")
    backends: list[Backend] = [FlashCuda(), *(FlashCuda(path) for path in paths)]
    backends += [*sdpa_backends(), TorchVarlen(), Flex()]
    backends += [FlashAttn2(), FlashAttn3(), FlashAttn4(), FlashInfer(), Xformers()]
    return {backend.name: backend for backend in backends}
