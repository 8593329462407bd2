"""explain(), supported(), python -m flash_cuda and the support table."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import flash_cuda
from flash_cuda import _C, _support

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ((2, 128, 8, 64), (2, 256, 2, 64), (2, 256, 2, 64))
FOLDERS = _C.build_info()["folders"]
no_kernels = pytest.mark.skipif(bool(FOLDERS), reason="this build has kernels")
kernels = pytest.mark.skipif(not FOLDERS, reason="this build has no CUDA kernels")


def feature_table() -> ModuleType:
    path = ROOT / "tools" / "feature_table.py"
    spec = importlib.util.spec_from_file_location("feature_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cpu_tensors_are_served_by_the_engine() -> None:
    tensors = [torch.randn(*shape) for shape in SHAPES]
    answer = flash_cuda.explain(*tensors, causal=True)
    assert answer.served
    assert answer.kernel == "cpu"
    assert "engine" in str(answer)
    assert flash_cuda.explain(*tensors, backward=True).served
    assert flash_cuda.supported(*SHAPES, device="cpu", dtype=torch.float64, dropout_p=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": (1, 8, 128, 256), "sink": (8,), "alibi_slopes": (2, 8), "softcap": 3.0},
        {"cache_seqlens": 100},
        {"cache_seqlens": (2,), "leftpad_k": (2,), "num_splits": 3},
        {"seqused_q": (2,), "window": (3, None), "return_lse": True, "pack_gqa": True},
        {"window_size": (-1, 0), "learnable_sink": torch.zeros(8)},
        {"qv": (2, 128, 8, 64)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_may_be_shapes(options: dict[str, Any]) -> None:
    assert flash_cuda.supported(*SHAPES, device="cpu", **options), flash_cuda.explain(
        *SHAPES, device="cpu", **options
    )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_packed_shapes_are_served_like_packed_tensors(head_dim: int, backward: bool) -> None:
    """By the kernel that serves the dense call: an unread length is not an absent one."""
    shapes = [(*shape[:3], head_dim) for shape in SHAPES]
    call = {"dtype": torch.bfloat16, "device": "H100", "backward": backward}
    dense = flash_cuda.explain(*shapes, **call)
    if not dense.served:
        pytest.skip(dense.reason)
    packed = flash_cuda.explain(
        *((shape[0] * shape[1], *shape[2:]) for shape in shapes),
        **call,
        cu_seqlens_q=(SHAPES[0][0] + 1,),
        cu_seqlens_k=(SHAPES[0][0] + 1,),
    )
    assert packed.kernel == dense.kernel


def test_packed_and_paged_shapes() -> None:
    q, k = (300, 8, 64), (400, 2, 64)
    cu = torch.tensor([0, 100, 300], dtype=torch.int32)
    for cu_seqlens in (cu, (3,)):
        assert flash_cuda.supported(
            q, k, k, device="cpu", backward=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens
        )
    pages = (9, 16, 2, 64)
    options = {"cu_seqlens_q": cu, "block_table": (2, 4), "cache_seqlens": 60}
    assert flash_cuda.supported(q, pages, pages, device="cpu", **options)
    answer = flash_cuda.explain(q, pages, pages, device="cpu", backward=True, **options)
    assert not answer.served
    assert "block_table" in answer.reason


@pytest.mark.parametrize(
    ("text", "shapes", "options"),
    [
        ("multiple", (SHAPES[0], (2, 256, 3, 64), (2, 256, 3, 64)), {}),
        ("window", SHAPES, {"window": (-3, 0)}),
        ("sink", SHAPES, {"sink": (7,)}),
        ("int32", SHAPES, {"dtype": torch.int32}),
        ("float8", SHAPES, {"dtype": torch.float8_e4m3fn, "backward": True}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "H100"])
def test_a_wrong_call_is_explained(
    device: str, text: str, shapes: Any, options: dict[str, Any]
) -> None:
    """With the very text that the call would raise."""
    if text == "float8" and device != "cpu":
        pytest.skip("depends on the kernels of the build")
    answer = flash_cuda.explain(*shapes, device=device, **options)
    assert not answer.served
    assert text in answer.reason
    assert not flash_cuda.supported(*shapes, device=device, **options)


def test_the_reason_is_the_text_of_the_error() -> None:
    tensors = [torch.randn(*shape) for shape in (SHAPES[0], (2, 256, 3, 64), (2, 256, 3, 64))]
    with pytest.raises(ValueError, match="heads") as error:
        flash_cuda.attention(*tensors)
    assert flash_cuda.explain(*tensors).reason == str(error.value)


@pytest.mark.parametrize("device", ["tpu", "sm", "12.0.1.0", 5, 9.0, []])
def test_unknown_devices(device: Any) -> None:
    with pytest.raises(ValueError, match="device"):
        flash_cuda.explain(*SHAPES, device=device)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"softcap": "x"}, "softcap must be a number, got 'x' (str)"),
        ({"num_splits": 1.5}, "num_splits must be an integer, got 1.5 (float)"),
        ({"num_splits": 999}, "num_splits must be 0 (automatic) to 256, got 999"),
        ({"pack_gqa": 3}, "pack_gqa must be -1 (automatic), 0 or 1, got 3"),
        ({"split_size": -3}, "split_size must be at least 0 (0: not fixed), got -3"),
        ({"bias": 3}, "bias must be a tensor or a shape, got 3 (int)"),
        ({"seqused_k": 4.5}, "seqused_k must be a tensor or a shape, got 4.5 (float)"),
        ({"dtype": "x"}, "dtype must be one of torch's, got 'x'"),
        ({"q": None}, "q must be a tensor or a shape, got None (NoneType)"),
        ({"k": (2, 1.5, 2, 8)}, "k must be a tensor or a shape, got (2, 1.5, 2, 8) (tuple)"),
        ({"q": (2, -1, 2, 8)}, "q must have sizes of at least 0 and under 2**62, got"),
        ({"q": (2**64, 1, 2, 8)}, "q must have sizes of at least 0 and under 2**62, got"),
    ],
    ids=str,
)
def test_odd_values_are_reasons(wrong: dict[str, Any], reason: str, backward: bool) -> None:
    """Also options that only the forward has, when the gradient is asked for."""
    call: dict[str, Any] = {"q": (2, 8, 2, 8), "k": (2, 8, 2, 8), "v": (2, 8, 2, 8)} | wrong
    answer = flash_cuda.explain(**call, device="h100", backward=backward)
    assert not answer.served
    assert answer.reason.startswith(reason)


def test_one_length_for_packed_queries_of_a_shape() -> None:
    q, cache = (100, 4, 64), (3, 128, 4, 64)
    options = {"cu_seqlens_q": (4,), "cache_seqlens": 9}
    assert flash_cuda.supported(q, cache, cache, device="cpu", **options)


def test_meta_tensors_are_shapes() -> None:
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in SHAPES]
    assert flash_cuda.explain(*tensors, causal=True) == flash_cuda.explain(*SHAPES, causal=True)
    assert flash_cuda.explain(*tensors, device="cpu").kernel == "cpu"


def test_unknown_options() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        flash_cuda.explain(*SHAPES, device="cpu", nonsense=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_here_is_asked_for_by_name() -> None:
    with pytest.raises(ValueError, match=r"(?i)h100"):
        flash_cuda.explain(*SHAPES, device="cuda")


@no_kernels
def test_a_build_without_kernels_says_how_to_get_them() -> None:
    answer = flash_cuda.explain(*SHAPES, device="H200")
    assert not answer.served
    assert "FLASH_CUDA_ARCHS" in answer.reason


@kernels
@pytest.mark.parametrize("device", ["H200", "sm90", "sm_90", "9.0", 90])
def test_a_named_device(device: Any) -> None:
    answer = flash_cuda.explain(*SHAPES, device=device, causal=True)
    assert answer.served, answer
    assert answer.kernel in str(answer)
    assert answer.block_q > 0
    assert answer.threads > 0


# On 132 SMs: heads, heads of K, rows, head dim, causal; the tile and how many blocks share K and V.
@kernels
@pytest.mark.parametrize(
    ("call", "tile"),
    [
        ((16, 16, 512, 128, False), (128, 128, 1)),
        ((16, 16, 1024, 128, False), (192, 64, 2)),
        # Eleven tiles would be twelve in pairs.
        ((16, 16, 2048, 128, False), (192, 64, 1)),
        ((16, 2, 2048, 128, False), (192, 64, 2)),
        ((16, 16, 512, 128, True), (192, 64, 1)),
        ((16, 16, 4096, 128, True), (192, 64, 1)),
        ((16, 16, 16384, 128, True), (192, 64, 2)),
        ((16, 2, 2048, 128, True), (192, 64, 2)),
        ((8, 8, 512, 256, False), (128, 64, 1)),
        ((8, 8, 4096, 256, False), (128, 64, 2)),
        ((8, 8, 4096, 256, True), (128, 64, 1)),
        ((32, 32, 4096, 64, False), (256, 64, 1)),
    ],
    ids=str,
)
def test_the_tile_is_that_of_the_call(
    call: tuple[int, int, int, int, bool], tile: tuple[int, int, int]
) -> None:
    if 90 not in [row["arch"] for row in _C.kernel_table()]:
        pytest.skip("this build lacks the kernels of sm90")
    heads, heads_k, rows, head_dim, causal = call
    q = (16384 // rows, rows, heads, head_dim)
    k = (16384 // rows, rows, heads_k, head_dim)
    answer = flash_cuda.explain(q, k, k, device="h100", causal=causal)
    assert (answer.block_q, answer.block_kv, answer.cluster) == tile
    assert f"tiles of {tile[0]} queries x {tile[1]} keys" in str(answer)
    assert ("clusters of 2 blocks" in str(answer)) == (answer.cluster == 2)


@kernels
def test_every_kernel_is_reached() -> None:
    """The table has no row that dispatch cannot choose, for its own folder and head size."""
    for row in _C.kernel_table():
        if row["op"] != "fwd":
            continue
        dims = (row["head_dim"], row["head_dim"], row["head_dim_v"])
        shapes = [(*s[:3], d) for s, d in zip(SHAPES, dims, strict=True)]
        dtype = getattr(torch, row["dtype"])
        with flash_cuda.use_kernel(f"sm{row['arch']}"):
            answer = flash_cuda.explain(*shapes, device=row["arch"], dtype=dtype, num_splits=1)
        assert answer.kernel == row["name"], answer


def test_explaining_allocates_nothing() -> None:
    huge = (1 << 10, 1 << 20, 64, 128)
    assert flash_cuda.explain(huge, huge, huge, device="cpu").served


def test_command_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flash_cuda"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    for text in (
        f"flash_cuda {flash_cuda.__version__}", f"torch      {torch.__version__}", "driver",
        "compiled kernels", "head_dim 128", "dropout",
    ):  # fmt: skip
        assert text in result.stdout


def test_the_stub_lists_what_the_module_has() -> None:
    stub = (ROOT / "flash_cuda" / "_C.pyi").read_text()
    functions = set(re.findall(r"^def (\w+)\(", stub, re.MULTILINE))
    assert functions == {name for name in dir(_C) if not name.startswith("_")}
    returned = {"BuildInfo": _C.build_info()}
    if not FOLDERS or torch.cuda.is_available():  # with kernels it asks the driver
        returned["DeviceInfo"] = _C.device_info(0)
    for name, fields in returned.items():
        block = re.search(rf"class {name}\(TypedDict\):\n((?:    .*\n)+)", stub)
        assert block is not None
        assert set(re.findall(r"^    (\w+):", block[1], re.MULTILINE)) == set(fields)


def test_support_table_says_what_explain_says() -> None:
    heading, *body = _support.rows([("CPU", "cpu")])
    assert heading == ["", "CPU"]
    cells = dict(body)
    assert cells["head_dim 128"] == "cpu"
    assert cells["pages"] == "cpu, -"  # a cache has no gradient
    assert len(cells) == len(_support.CALLS)


def test_readme_has_the_table_of_this_build() -> None:
    table = feature_table()
    missing = _support.missing_folders(table.folders())
    if missing or not table.folders():
        pytest.skip(f"this build lacks the kernels of {', '.join(missing) or 'every folder'}")
    text = table.README.read_text()
    assert table.replaced(text) == text, "run python tools/feature_table.py"


def test_feature_table_replaces_between_its_markers() -> None:
    table = feature_table()
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    new = table.replaced(text)
    assert new.startswith(f"before\n{table.BEGIN}\n| ")
    assert new.endswith(f"{table.END}\nafter\n")
    assert table.replaced(new) == new
    with pytest.raises(ValueError, match="support table"):
        table.replaced("no markers")
