"""Shapes and float64 tensors of the tests of the public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

B, S, T, H, HK, D = 2, 6, 9, 4, 2, 16


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return (
        rand(B, S, H, D, dtype=dtype),
        rand(B, T, HK, D, dtype=dtype),
        rand(B, T, HK, D, dtype=dtype),
    )


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b)
