"""What is compiled, what is compiled again, and what is read off the compilers."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from build_tools import archs, build, plan, ptxas, runner, toolchain
from build_tools.messages import BuildError
from build_tools.plan import Toolchain, Unit
from build_tools.toolchain import Gxx, Nvcc, Torch

# ---------------------------------------------------------------- the plan


def tools(tmp_path: Path, wanted: tuple[int, ...] = ()) -> Toolchain:
    torch = Torch(tmp_path / "torch/include", tmp_path / "torch/lib", "2.13.0+cpu", None)
    cuda = tmp_path / "cuda"
    nvcc = Nvcc(cuda / "bin/nvcc", "PATH", "13.0.88", cuda / "include", cuda / "lib64")
    gxx = Gxx(("ccache", "g++"), "12.2.0")
    python = Path("/usr/include/python3.11")
    return Toolchain(gxx, torch, python, nvcc if wanted else None, wanted)


@pytest.fixture
def csrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with one file of each kind."""
    root = tmp_path / "csrc"
    for name in (
        "torch_binding.cpp",
        "module.cpp",
        "api/dispatch.cpp",
        "common/combine.cu",
        "common/tensor_map.cpp",
        "sm80/fwd.cu",
        "sm80/table.cpp",
        "sm90/fwd.cu",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    monkeypatch.setattr(plan, "CSRC", root)
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    return root


def words(whole: plan.Plan, name: str) -> tuple[str, ...]:
    return next(unit.command for unit in whole.units if unit.source.name == name)


def test_without_kernels_only_the_host_sources_are_compiled(csrc: Path, tmp_path: Path) -> None:
    whole = plan.make_plan(tools(tmp_path), tmp_path / "build")
    assert {unit.source.name for unit in whole.units} == {
        "torch_binding.cpp",
        "module.cpp",
        "dispatch.cpp",
        "commit.cpp",
    }
    assert not any("cudart" in flag for flag in whole.link_flags)
    assert not any("WITH_SM" in word for unit in whole.units for word in unit.command)


def test_kernels_and_what_tells_of_them(csrc: Path, tmp_path: Path) -> None:
    whole = plan.make_plan(tools(tmp_path, (80, 90)), tmp_path / "build")
    assert len(whole.units) == 9
    dispatch = words(whole, "dispatch.cpp")
    assert "-DFLASH_CUDA_WITH_SM80" in dispatch
    assert "-DFLASH_CUDA_WITH_SM90" in dispatch
    assert "-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]" in words(whole, "combine.cu")
    assert "-lcudart_static" in whole.link_flags
    only_ampere = plan.make_plan(tools(tmp_path, (86,)), tmp_path / "build")
    assert "-DFLASH_CUDA_WITH_SM90" not in words(only_ampere, "dispatch.cpp")
    assert len(only_ampere.units) == 8


def test_torch_is_the_bindings_alone(csrc: Path, tmp_path: Path) -> None:
    whole = plan.make_plan(tools(tmp_path, (80,)), tmp_path / "build")
    for unit in whole.units:
        has_torch = any("torch/include" in word for word in unit.command)
        assert has_torch == (unit.source.name in ("torch_binding.cpp", "module.cpp"))
        # torch's copy of pybind11 refuses to be compiled for the stable ABI.
        stable = any("TORCH_TARGET_VERSION" in word for word in unit.command)
        assert stable == (unit.source.name == "torch_binding.cpp")
    assert not any("rpath" in flag for flag in whole.link_flags)


def test_cutlass_is_asked_for_by_who_includes_it(csrc: Path) -> None:
    assert not plan.needs_cutlass(archs.CAPABILITIES)
    (csrc / "sm100").mkdir()
    (csrc / "sm100/fwd.cu").write_text('#include "sm100/fwd_kernel.cuh"\n')
    assert not plan.needs_cutlass(archs.CAPABILITIES)
    (csrc / "sm100/fwd_kernel.cuh").write_text("#include <cute/arch/mma_sm100_umma.hpp>\n")
    assert plan.needs_cutlass(archs.CAPABILITIES)
    assert not plan.needs_cutlass((90,))


def test_a_new_commit_leaves_the_build_info_as_it_is(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tools(tmp_path, (80, 90))
    whole = plan.make_plan(found, tmp_path)
    header, commit = tmp_path / "generated/build_info.h", tmp_path / plan.COMMIT_SOURCE
    build.write_build_info(found, whole, tmp_path)
    text = header.read_text()
    assert '#define FLASH_CUDA_BUILD_ARCHS "80,90"' in text
    assert '#define FLASH_CUDA_BUILD_CODES "sm80:sm_80,sm80:sm_90,sm90:sm_90a"' in text
    assert '#define FLASH_CUDA_BUILD_NVCC "13.0.88"' in text
    before = header.stat().st_mtime_ns
    for name in ("0123456789ab", "ba9876543210"):
        monkeypatch.setattr(build, "commit", lambda name=name: name)
        build.write_build_info(found, whole, tmp_path)
        assert f'"{name}"' in commit.read_text()
    assert header.stat().st_mtime_ns == before


# ---------------------------------------------------------------- what is recompiled


@pytest.fixture
def unit(tmp_path: Path) -> Unit:
    """A real source file with a header, to be compiled by the real g++."""
    (tmp_path / "a.h").write_text("inline int one() { return 1; }\n")
    source = tmp_path / "a.cpp"
    source.write_text('#include "a.h"\nint two() { return one() + one(); }\n')
    obj = tmp_path / "obj/a.o"
    command = ("g++", "-fPIC", "-MMD", "-MF", str(obj.with_suffix(".d")), "-c", str(source))
    return Unit(source, obj, (*command, "-o", str(obj)), "g++ 1", 1.0)


def test_an_unchanged_file_is_not_compiled_again(unit: Unit, tmp_path: Path) -> None:
    assert not runner.is_current(unit)
    runner.compile_all([unit], 1)
    assert runner.is_current(unit)
    other_compiler = Unit(unit.source, unit.object, unit.command, "g++ 2", 1.0)
    assert not runner.is_current(other_compiler)
    time.sleep(0.01)
    (tmp_path / "a.h").touch()
    assert not runner.is_current(unit)
    runner.compile_all([unit], 1)
    assert runner.is_current(unit)
    (tmp_path / "a.h").unlink()
    assert not runner.is_current(unit)


def test_progress_and_times(unit: Unit, capsys: pytest.CaptureFixture[str]) -> None:
    runner.compile_all([unit], 1)
    assert re.search(r"\[1/1\] .*a\.cpp \d+\.\d s$", capsys.readouterr().out, re.M)
    stamp = runner.read_stamp(unit)
    assert stamp is not None
    assert stamp.size == unit.object.stat().st_size
    assert runner.expected_seconds(unit) == stamp.seconds


def test_a_failure_shows_the_compilers_words(unit: Unit) -> None:
    unit.source.write_text("int two() { return nothing_of_that_name; }\n")
    with pytest.raises(BuildError, match=r"a\.cpp does not compile\n.*\n?.*nothing_of_that_name"):
        runner.compile_all([unit, unit], 1)
    assert not runner.is_current(unit)


def test_warnings_end_a_strict_build_and_no_other(
    unit: Unit, capsys: pytest.CaptureFixture[str]
) -> None:
    unit.source.write_text("int unset() { int x; return x; }\n")
    warned = Unit(unit.source, unit.object, (*unit.command, "-Wall", "-O2"), "g++", 1.0)
    runner.compile_all([warned], 1)
    assert runner.is_current(warned)
    build._check_logs([warned], strict=False)
    assert re.search(
        r"not clean: .*a\.cpp:1:\d+: warning: .*uninitialized", capsys.readouterr().out
    )
    with pytest.raises(BuildError, match=r"FLASH_CUDA_STRICT=1:\n.*uninitialized"):
        build._check_logs([warned], strict=True)


def test_the_link_is_redone_if_something_changed(unit: Unit, tmp_path: Path) -> None:
    runner.compile_all([unit], 1)
    out = tmp_path / "lib/a.so"
    assert runner.link([unit.object], ["g++"], ["-shared"], out)
    assert not runner.link([unit.object], ["g++"], ["-shared"], out)
    assert runner.link([unit.object], ["g++"], ["-shared", "-ldl"], out)
    time.sleep(0.01)
    runner.compile_all([unit], 1)
    assert runner.link([unit.object], ["g++"], ["-shared", "-ldl"], out)


def test_a_symbol_that_nobody_defines_is_named(unit: Unit, tmp_path: Path) -> None:
    unit.source.write_text("namespace flash_cuda { int gone(); int here() { return gone(); } }\n")
    runner.compile_all([unit], 1)
    with pytest.raises(BuildError, match=r"defined nowhere: flash_cuda::gone\(\)"):
        runner.link([unit.object], ["g++"], ["-shared"], tmp_path / "lib/a.so")


# ---------------------------------------------------------------- ptxas

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN10flash_cuda4sm808spillingEv' for 'sm_80'
ptxas info    : Function properties for _ZN10flash_cuda4sm808spillingEv
    16 bytes stack frame, 12 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem, 360 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN10flash_cuda4sm805cleanEv' for 'sm_90a'
ptxas info    : Function properties for _ZN10flash_cuda4sm805cleanEv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def test_ptxas_report_is_read() -> None:
    spilling, clean = ptxas.parse(LOG)
    assert spilling == ptxas.Kernel(
        "_ZN10flash_cuda4sm808spillingEv", "sm_80", 255, 16, 12, 24, 1024
    )
    assert (clean.code, clean.registers, clean.spill_stores) == ("sm_90a", 8, 0)
    assert ptxas.demangle([spilling.name]) == ["flash_cuda::sm80::spilling"]


@pytest.mark.parametrize(
    ("declared", "faults"),
    [
        ("", 1),
        ("// build: spills allowed in spilling up to 24 bytes: seldom run\n", 0),
        ("// build: spills allowed in spilling up to 16 bytes: seldom run\n", 1),
        ("// build: spills allowed in other up to 24 bytes: seldom run\n", 1),
        ("// build: spills allowed in spilling up to 24 bytes: \n", 1),  # no reason
    ],
)
def test_spills_must_be_declared(declared: str, faults: int, tmp_path: Path) -> None:
    source = tmp_path / "fwd.cu"
    source.write_text(declared)
    found = ptxas.faults(source, LOG)
    assert len(found) == faults
    if found:
        assert found == ["fwd.cu: flash_cuda::sm80::spilling spills 24 bytes for sm_80"]


def test_serialized_wgmma_is_a_fault(tmp_path: Path) -> None:
    line = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are seri"
    source = tmp_path / "fwd.cu"
    source.touch()
    assert ptxas.faults(source, f"{line}\n") == [f"fwd.cu: {line}"]


def test_nvcc_keeps_ptx_and_reports_kernels(tmp_path: Path, csrc: Path) -> None:
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    source = csrc / "sm80/fwd.cu"
    source.write_text("__global__ void scale(float* x) { x[threadIdx.x] *= 2.0f; }\n")
    gxx = toolchain.find_gxx(toolchain.newest_gxx(nvcc.toolkit))
    torch = Torch(tmp_path, tmp_path, "2.13.0", None)
    found = Toolchain(gxx, torch, tmp_path, nvcc, (80, 90))
    whole = plan.make_plan(found, tmp_path / "build")
    kernel = next(unit for unit in whole.units if unit.source == source)
    runner.compile_all([kernel], 1)
    assert runner.is_current(kernel)
    for base in ("80", "90"):
        ptx = kernel.object.with_suffix(f".compute_{base}.ptx").read_text()
        assert f".target sm_{base}" in ptx
    stamp = runner.read_stamp(kernel)
    assert stamp is not None
    assert [k.code for k in ptxas.parse(stamp.log)] == ["sm_80", "sm_90"]
    assert ptxas.faults(source, stamp.log) == []
