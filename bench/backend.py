"""What a contestant is: what it can do, as data, and one forward function.

Gradients are always taken by autograd through that function, so `bwd` is what training runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .cost import score_bytes
from .inputs import Inputs
from .machine import version_of

Forward = Callable[[], Tensor]
HALF = frozenset({"bfloat16", "float16"})


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
