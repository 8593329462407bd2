"""The checks of the sources: layers, and the sizes of the build report."""

from __future__ import annotations

import pytest

from build_tools.plan import ROOT
from tools import build_report, check_layers


def breaches(path: str, text: str) -> list[str]:
    return [f"{line}: {what}" for line, what in check_layers.cpp_breaches(path, text)]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("api/check.cpp", '#include "common/params.h"\n#include <string>\n'),
        ("sm90/fwd_kernel.cuh", '#include "ptx/wgmma.h"\n#include "common/mask.h"\n'),
        ("sm120/fwd_hdim64.cu", '#include "sm80/fwd_launch.cuh"\n'),
        ("ptx/mma.h", '#include "common/params.h"\nasm volatile("mma;");\n'),
        ("module.cpp", "#include <pybind11/pybind11.h>\n"),
        ("torch_binding.cpp", "#include <torch/csrc/stable/library.h>\n"),
        ("sm100/fwd_kernel.cuh", "#include <cute/arch/mma_sm100_umma.hpp>\n"),
        ("sm80/fwd.cu", '// #include "api/check.h", and asm("x") in a comment\n'),
        ("module.cpp", '#include "build_info.h"\n'),
    ],
)
def test_what_the_layers_allow(path: str, text: str) -> None:
    assert breaches(path, text) == []


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("sm80/fwd.cu", '\n#include "api/check.h"\n', "2: api/check.h: sm80 may include"),
        ("sm90/fwd.cu", '#include "sm80/fwd.h"\n', "1: sm80/fwd.h: sm90 may include"),
        ("common/mask.h", '#include "sm80/fwd.h"\n', "1: sm80/fwd.h: common may include"),
        ("ptx/mma.h", '#include "common/mask.h"\n', "1: common/mask.h: ptx may include"),
        ("api/check.cpp", "#include <torch/all.h>\n", "1: torch/all.h: torch and Python"),
        ("sm90/fwd.cu", "#include <cute/tensor.hpp>\n", "1: cute/tensor.hpp: CUTLASS headers"),
        ("sm80/fwd.cu", 'asm volatile("nop;");\n', "1: asm belongs into csrc/ptx"),
        ("sm80/fwd.cu", "\n\n#if __CUDA_ARCH__ >= 900\n", "3: __CUDA_ARCH__"),
        ("sm75/fwd.cu", '#include "common/mask.h"\n', "1: csrc/sm75 is no layer"),
    ],
)
def test_breaches_of_the_layers(path: str, text: str, expected: str) -> None:
    found = breaches(path, text)
    assert len(found) == 1
    assert found[0].startswith(expected)


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("flash_cuda/interface.py", "import torch\nfrom . import _ops\n", 0),
        ("flash_cuda/interface.py", "from bench.cost import flops\n", 1),
        ("flash_cuda/reference/forward.py", "from ..interface import attention\n", 1),
        ("flash_cuda/reference/forward.py", "from .problem import Problem\n", 0),
        ("tests/oracle.py", "import flash_cuda\n", 1),
        ("tests/oracle.py", "import torch\n", 0),
    ],
)
def test_layers_of_the_python_files(path: str, text: str, count: int) -> None:
    assert len(list(check_layers.python_breaches(path, text))) == count


def test_the_tree_keeps_to_its_layers() -> None:
    assert list(check_layers.breaches()) == []


CODE = """\
namespace a {
// A comment with { braces.
template <class Tile, int kStages, class Pair = Map<int, int>>
__global__ void kernel(const Params params) {
  if (x) {
    for (int i = 0; i < 3; ++i) {
      call("}");
    }
  }
}
struct S {
  int get() const { return 1; }
};
}  // namespace a
"""


def test_functions_are_measured() -> None:
    assert list(build_report.functions(CODE)) == [("kernel", 4, 7, 2), ("get", 12, 1, 0)]
    assert list(build_report.template_parameters(CODE)) == [(3, 3)]


def test_the_report_covers_the_sources() -> None:
    found = build_report.source_findings()
    assert len(found["lines of a file (500)"]) == len(build_report.source_files()) > 0
    assert all(findings for findings in found.values())
    assert (ROOT / "csrc/common/mask.h") in build_report.source_files()


def test_kernels_are_reported_by_their_short_names() -> None:
    name = "void flash_cuda::sm80::fwd_kernel<flash_cuda::sm80::Tile>"
    assert build_report.short(name) == "fwd_kernel<Tile>"
    kernel = {"name": "_ZN1a1kEv", "code": "sm_80", "registers": 255, "spill_stores": 4}
    entry = {"file": "csrc/sm80/fwd.cu", "seconds": 3.0, "bytes": 5000, "kernels": [kernel]}
    found = build_report.build_findings([entry])
    assert found["registers"] == [build_report.Finding(255, "sm_80 csrc/sm80/fwd.cu: k")]
    assert found["bytes spilled"][0].value == 4
