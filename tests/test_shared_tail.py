"""Long full calls whose last round of tiles is partial: its tiles are cut into parts (Hopper, head
dims 64 and 96), and every part comes from another thread block."""

from __future__ import annotations

import pytest
import torch

import flash_cuda

from .cases import AttentionCase, grid
from .check import Backend, check, with_cases

# One tile more than an emulated device of four SMs has, or half as many; half a round and one and a
# half on a GPU. More heads of so few rows would leave out warpgroups instead.
FEW = AttentionCase(rows=(3,), keys=(1900,))
MANY = AttentionCase(keys=(2100,), heads=70, heads_kv=70)


@with_cases(
    grid(FEW, heads__heads_kv=[(5, 5), (2, 1)], head_dim=(64, 96)),
    grid(FEW, heads=(5,), heads_kv=(5,), dtype=("float16",), spread=(20.0,), sink=(False, True)),
    grid(MANY, head_dim=(64, 96), rows=((150,),), dtype=("bfloat16", "float16")),
    grid(MANY, heads=(35,), heads_kv=(35,), head_dim=(64, 96), rows=((300,),)),
    grid(MANY, head_dim=(64, 96), rows=((150,),), spread=(20.0,), sink=(True,)),
    grid(MANY, heads=(200,), heads_kv=(50,), head_dim=(64, 96), rows=((150,),)),
)
def test_parts_of_tiles(case: AttentionCase, backend: Backend) -> None:
    if backend.is_engine:
        pytest.skip("the engine has no thread blocks")
    check(case, backend)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 96])
def test_same_bits(head_dim: int) -> None:
    """Parts are added in the order of the keys, whichever is there last."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper shares the tail")
    torch.manual_seed(0)
    q = torch.randn(1, 150, 70, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 3000, 70, head_dim, device="cuda").bfloat16() for _ in range(2))
    assert flash_cuda.explain(q, k, v).workspace_bytes > 0
    first = flash_cuda.attention(q, k, v)
    for _ in range(20):
        assert torch.equal(flash_cuda.attention(q, k, v), first)
