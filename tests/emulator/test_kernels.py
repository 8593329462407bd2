"""The kernels of csrc on shapes that straddle their tiles: three policies, seeds, the race check.

The features are tested by `pytest --backend emulated`; here it is the schedule that varies.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import emulator

flash_cuda = pytest.importorskip("flash_cuda")

POLICIES = ("eager", "lazy", "random")
SEEDS = (1, 2)
HEAD_DIMS = (64, 128)
# Query and key lengths around the edges of tiles of 64 to 192.
LENGTHS = ((1, 1), (65, 127), (129, 193), (200, 300))
ARCHS = emulator.architectures()


@pytest.fixture(params=ARCHS)
def arch(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        emulator.load(request.param)
    except emulator.EmulatorBuildError as e:
        if "needs nvcc" in str(e):
            pytest.skip(str(e))
        raise
    yield request.param
    emulator.configure(request.param, "policy=random,seed=1,sms=4,race=0")
    assert emulator.take_warnings(request.param) == ""


def reference(q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
    """In float64, bottom-right aligned; rows without keys give zeros."""
    rows, keys = q.shape[1], k.shape[1]
    mask = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        mask = mask.tril(keys - rows)
    out = F.scaled_dot_product_attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), attn_mask=mask
    )
    return torch.nan_to_num(out.transpose(1, 2), 0.0)


def inputs(lengths: tuple[int, int], head_dim: int, heads_kv: int = 1) -> list[torch.Tensor]:
    shapes = [
        (1, lengths[0], 2, head_dim),
        (1, lengths[1], heads_kv, head_dim),
        (1, lengths[1], heads_kv, head_dim),
    ]
    return [torch.randn(s).bfloat16() for s in shapes]


def check_forward(
    arch: str,
    lengths: tuple[int, int],
    head_dim: int,
    causal: bool,
    heads_kv: int = 1,
    cluster: int = 1,
) -> None:
    q, k, v = inputs(lengths, head_dim, heads_kv)
    with flash_cuda.use_kernel(f"emulated:{arch}"):
        assert flash_cuda.explain(q, k, v, causal=causal).cluster == cluster
        out = flash_cuda.attention(q, k, v, causal=causal)
    wide = [x.repeat_interleave(2 // heads_kv, 2) for x in (k, v)]
    expected = reference(q, *wide, causal)
    ordinary = reference(q, *wide, causal).bfloat16().double()
    bound = 2 * (ordinary - expected).abs().max() + 1e-2
    error = (out.double() - expected).abs().max()
    assert error <= bound, f"error {error}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_forward(
    arch: str, policy: str, lengths: tuple[int, int], head_dim: int, causal: bool
) -> None:
    for seed in SEEDS:
        emulator.configure(arch, f"policy={policy},seed={seed},sms={1 + seed}")
        check_forward(arch, lengths, head_dim, causal)


# So many keys, that two Hopper blocks copy K and V together: of two query heads, or of neighbours.
# Head dim, lengths, causal, KV heads of two query heads.
PAIRS = [
    (256, (600, 1030), False, 1),
    (256, (250, 1030), False, 2),
    (256, (250, 2100), True, 1),
    (256, (130, 6200), True, 2),
    (192, (250, 2050), False, 2),
    (192, (250, 4100), True, 1),
    # Tiles of 192 rows, and of 128 or 64 at the end of a head, or at its begin below a diagonal.
    (128, (768, 1030), False, 1),
    (128, (1020, 1030), False, 2),
    (128, (1000, 2100), True, 1),
    (128, (1000, 6200), True, 2),
]


@pytest.mark.parametrize(("head_dim", "lengths", "causal", "heads_kv"), PAIRS, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_pairs_of_blocks(
    arch: str, policy: str, head_dim: int, lengths: tuple[int, int], causal: bool, heads_kv: int
) -> None:
    if arch != "sm90":
        pytest.skip("only Hopper's forward has them")
    emulator.configure(arch, f"policy={policy},seed=1,sms=4,race={int(policy == 'random')}")
    check_forward(arch, lengths, head_dim, causal, heads_kv, cluster=2)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_forward_is_free_of_races(arch: str, head_dim: int) -> None:
    for policy in POLICIES:
        emulator.configure(arch, f"policy={policy},seed=3,race=1")
        check_forward(arch, (130, 200), head_dim, True)


def backward(arch: str, lengths: tuple[int, int], head_dim: int) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(lengths, head_dim))
    weight = torch.randn(1, lengths[0], 2, head_dim).bfloat16()
    try:
        with flash_cuda.use_kernel(f"emulated:{arch}"):
            out = flash_cuda.attention(q, k, v, causal=True)
            got = torch.autograd.grad(out, (q, k, v), weight)
    except NotImplementedError as e:
        pytest.skip(str(e))
    copies = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wide = [x.repeat_interleave(2, 2) for x in copies[1:]]
    expected = torch.autograd.grad(reference(copies[0], *wide, True), copies, weight.double())
    for g, e in zip(got, expected, strict=True):
        assert (g.double() - e).abs().max() <= 2e-2 * (1 + e.abs().max())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_backward(arch: str, policy: str, head_dim: int) -> None:
    for seed in SEEDS:
        emulator.configure(arch, f"policy={policy},seed={seed},sms={1 + seed}")
        backward(arch, (129, 193), head_dim)


def test_backward_is_free_of_races(arch: str) -> None:
    emulator.configure(arch, "policy=random,seed=3,race=1")
    backward(arch, (100, 130), 64)


def test_speed(arch: str) -> None:
    """512 x 512 x 128, 2 heads: under 5 seconds of a core, in the best of three runs."""
    emulator.configure(arch, "policy=random,seed=1")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 512, 2, 128).bfloat16() for _ in range(3))
    seconds = []
    with flash_cuda.use_kernel(f"emulated:{arch}"):
        for _ in range(3):
            before = time.thread_time()
            flash_cuda.attention(q, k, v)
            seconds.append(time.thread_time() - before)
    assert min(seconds) < 5, seconds
