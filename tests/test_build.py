"""The logic of the build: architectures, jobs, compilers, messages, what is recompiled."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from build_tools import archs, build, fetch, jobs, plan, ptxas, runner, toolchain
from build_tools.messages import BuildError, duration
from build_tools.plan import ROOT, Toolchain, Unit
from build_tools.toolchain import Gxx, Nvcc, Torch

ALL = archs.CAPABILITIES


def script(path: Path, text: str) -> Path:
    """A program that prints a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)
    return path


# ---------------------------------------------------------------- FLASH_CUDA_ARCHS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", ALL),
        ("none", ()),
        ("native", None),
        (" ALL ", ALL),
        ("90", (90,)),
        ("9.0", (90,)),
        ("sm_90a", (90,)),
        ("90,80", (80, 90)),
        ("80;90 120", (80, 90, 120)),
        ("80, 80", (80,)),
    ],
)
def test_archs_are_read(text: str, expected: tuple[int, ...] | None) -> None:
    assert archs.parse(text) == expected


@pytest.mark.parametrize("text", ["75", "hopper", "90,none", "all 80", "", " , "])
def test_unknown_archs_are_refused(text: str) -> None:
    with pytest.raises(BuildError, match=r"FLASH_CUDA_ARCHS.*80, 86, 89, 90, 100, 103, 120"):
        archs.parse(text)


@pytest.mark.parametrize(
    ("gpus", "has_nvcc", "cuda_torch", "expected"),
    [
        ([90], True, True, (90,)),
        ([80, 89], False, False, (80, 89)),
        ([121], True, True, (120,)),  # same generation: runs sm_120's code
        ([87], True, True, (86,)),
        ([110], True, True, (80,)),  # by PTX
        ([], True, False, ALL),
        ([], False, True, ALL),
        ([], False, False, ()),
    ],
)
def test_default_archs(
    gpus: list[int], has_nvcc: bool, cuda_torch: bool, expected: tuple[int, ...]
) -> None:
    found, why = archs.requested(has_nvcc, cuda_torch, lambda: gpus, {})
    assert found == expected
    assert why


def test_named_archs_win_over_the_gpus() -> None:
    environ = {"FLASH_CUDA_ARCHS": "80"}
    assert archs.requested(True, True, lambda: [90], environ)[0] == (80,)


def test_native_without_a_gpu_is_refused() -> None:
    with pytest.raises(BuildError, match="native, but no GPU is visible"):
        archs.requested(True, True, lambda: [], {"FLASH_CUDA_ARCHS": "native"})


def test_cards_before_ampere_are_refused() -> None:
    with pytest.raises(BuildError, match=r"compute capability 7\.5; flash_cuda needs 8\.0"):
        archs.requested(True, True, lambda: [75], {})


def test_an_old_toolkit_builds_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert archs.limit_to_toolkit(ALL, (12, 8), named_by_user=False) == (80, 86, 89, 90, 100, 120)
    assert "left out: compute capability 10.3 needs nvcc 12.9" in capsys.readouterr().out
    assert archs.limit_to_toolkit(ALL, (13, 0), named_by_user=False) == ALL


def test_an_old_toolkit_refuses_what_was_asked_for() -> None:
    with pytest.raises(BuildError, match=r"10\.3 needs nvcc 12\.9, this is 12\.8"):
        archs.limit_to_toolkit((103,), (12, 8), named_by_user=True)
    with pytest.raises(BuildError, match=r"nvcc 11\.8 is too old; flash_cuda needs 12\.0"):
        archs.limit_to_toolkit((80,), (11, 8), named_by_user=False)


@pytest.mark.parametrize(
    ("folder", "wanted", "expected"),
    [
        ("sm80", (80, 86, 89), ["-gencode=arch=compute_80,code=[sm_80,compute_80]"]),
        ("sm80", (90,), ["-gencode=arch=compute_90,code=[sm_90,compute_90]"]),
        (
            "sm80",
            ALL,
            [
                "-gencode=arch=compute_80,code=[sm_80,compute_80]",
                "-gencode=arch=compute_90,code=[sm_90,sm_100,sm_103,sm_120]",
            ],
        ),
        (
            "common",
            ALL,
            ["-gencode=arch=compute_80,code=[sm_80,sm_90,sm_100,sm_103,sm_120,compute_80]"],
        ),
        ("sm90", ALL, ["-gencode=arch=compute_90a,code=sm_90a"]),
        ("sm90", (80,), []),
        (
            "sm100",
            ALL,
            [
                "-gencode=arch=compute_100a,code=sm_100a",
                "-gencode=arch=compute_103a,code=sm_103a",
            ],
        ),
        ("sm120", (120,), ["-gencode=arch=compute_120,code=sm_120"]),
    ],
)
def test_targets_of_a_folder(folder: str, wanted: tuple[int, ...], expected: list[str]) -> None:
    assert archs.gencode_flags(folder, wanted) == expected


def test_only_folders_with_kernels_are_built(tmp_path: Path) -> None:
    for folder in ("sm80", "sm90", "sm100"):
        (tmp_path / folder).mkdir()
    (tmp_path / "sm80/fwd.cu").touch()
    (tmp_path / "sm90/fwd.cu").touch()
    (tmp_path / "sm100/fwd.cuh").touch()
    assert archs.kernel_folders(tmp_path, ALL) == ["sm80", "sm90"]
    assert archs.kernel_folders(tmp_path, (80,)) == ["sm80"]
    assert archs.kernel_folders(tmp_path, ()) == []


# ---------------------------------------------------------------- jobs


@pytest.mark.parametrize(
    ("cores", "gib", "expected"), [(8, 64.0, 8), (64, 16.0, 15), (8, 2.0, 1), (1, 0.5, 1)]
)
def test_jobs_are_bounded_by_cores_and_memory(
    cores: int, gib: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert jobs.job_count(cores, gib) == expected


def test_max_jobs_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "3")
    assert jobs.job_count(64, 1.0) == 3
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(BuildError, match="MAX_JOBS must be a whole number from 1, got 'many'"):
        jobs.job_count()


def test_this_machine_has_cores_and_memory() -> None:
    assert 1 <= jobs.usable_cores() <= (os.cpu_count() or 1)
    assert 0 < jobs.available_gib() < 1e5


# ---------------------------------------------------------------- compilers and headers


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it but what the test puts there (and cat)."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "cat").symlink_to("/bin/cat")
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_missing_compiler(empty_path: Path) -> None:
    with pytest.raises(BuildError, match=r"^g\+\+ was not found.*apt install g\+\+$"):
        toolchain.find_gxx()


def test_old_compiler(empty_path: Path) -> None:
    script(empty_path / "g++", "7.5.0")
    with pytest.raises(BuildError, match=r"^g\+\+ 7\.5\.0 is too old; 9 or newer"):
        toolchain.find_gxx()


def test_compiler_newer_than_nvcc_accepts(empty_path: Path) -> None:
    script(empty_path / "g++", "15.1.0")
    assert toolchain.find_gxx().version == "15.1.0"
    with pytest.raises(BuildError, match=r"g\+\+ 15\.1\.0 is newer than this nvcc accepts"):
        toolchain.find_gxx(newest=13)
    script(empty_path / "g++-12", "12.2.0")
    assert toolchain.find_gxx(newest=13).command == ("g++-12",)


def test_cxx_may_have_a_wrapper(empty_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(empty_path / "ccache", "12.2.0")
    monkeypatch.setenv("CXX", "ccache g++-12")
    assert toolchain.find_gxx() == Gxx(("ccache", "g++-12"), "12.2.0")
    monkeypatch.setenv("CXX", "nowhere-g++")
    with pytest.raises(BuildError, match=r"^nowhere-g\+\+ was not found"):
        toolchain.find_gxx()


@pytest.mark.parametrize(
    ("toolkit", "newest"), [((12, 0), 12), ((12, 6), 13), ((12, 9), 14), ((13, 0), 15)]
)
def test_newest_host_compiler(toolkit: tuple[int, int], newest: int) -> None:
    assert toolchain.newest_gxx(toolkit) == newest
    assert toolchain.newest_gxx((99, 0)) is None


def fake_toolkit(root: Path, version: str = "12.9.86") -> Path:
    release = version.rpartition(".")[0]
    script(root / "bin/nvcc", f"Cuda compilation tools, release {release}, V{version}")
    (root / "include").mkdir()
    (root / "include/cuda_runtime.h").touch()
    (root / "lib64").mkdir()
    (root / "lib64/libcudart_static.a").touch()
    return root


def test_nvcc_of_cuda_home(
    empty_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = fake_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(home))
    nvcc = toolchain.find_nvcc()
    assert nvcc is not None
    assert (nvcc.found_by, nvcc.version, nvcc.toolkit) == ("CUDA_HOME", "12.9.86", (12, 9))
    assert nvcc.include == home / "include"
    assert nvcc.lib == home / "lib64"


def test_nvcc_of_path_and_of_wheels(
    empty_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "site_folders", lambda: [tmp_path / "site"])
    fake_toolkit(tmp_path / "site/nvidia/cu13", "13.0.88")
    only_ours = toolchain._nvcc_candidates

    def without_usr_local(fetched: Path | None) -> list[tuple[Path, str]]:
        return [found for found in only_ours(fetched) if found[1] != "/usr/local/cuda"]

    monkeypatch.setattr(toolchain, "_nvcc_candidates", without_usr_local)
    nvcc = toolchain.find_nvcc()
    assert nvcc is not None
    assert (nvcc.found_by, nvcc.version) == ("wheels", "13.0.88")
    fake_toolkit(tmp_path / "cuda")
    (empty_path / "nvcc").symlink_to(tmp_path / "cuda/bin/nvcc")
    nvcc = toolchain.find_nvcc()
    assert nvcc is not None
    assert (nvcc.found_by, nvcc.version) == ("PATH", "12.9.86")


def test_broken_toolkits_are_named(
    empty_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "gone"))
    with pytest.raises(BuildError, match=r"^CUDA_HOME is .*gone, but there is no bin/nvcc in it$"):
        toolchain.find_nvcc()
    home = fake_toolkit(tmp_path / "half")
    (home / "lib64/libcudart_static.a").unlink()
    monkeypatch.setenv("CUDA_HOME", str(home))
    with pytest.raises(BuildError, match=r"comes without libcudart_static\.a"):
        toolchain.find_nvcc()


def fake_torch(site: Path, version: str, cuda: str) -> None:
    header = site / "torch/include/torch/csrc/stable/library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    text = f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n"
    (site / "torch/version.py").write_text(text)


def test_torch_is_found_by_its_files(tmp_path: Path) -> None:
    fake_torch(tmp_path / "old", "2.9.1+cu128", "'12.8'")
    fake_torch(tmp_path / "cpu", "2.13.0+cpu", "None")
    fake_torch(tmp_path / "cuda", "2.11.0+cu130", "'13.0'")
    assert toolchain.find_torch([tmp_path / "old"]) is None
    found = toolchain.find_torch([tmp_path / "old", tmp_path / "cpu", tmp_path / "cuda"])
    lib, include = tmp_path / "cpu/torch/lib", tmp_path / "cpu/torch/include"
    assert found == Torch(include, lib, "2.13.0+cpu", None)
    found = toolchain.find_torch([tmp_path / "cuda"])
    assert found is not None
    assert found.cuda == "13.0"


def test_missing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "site_folders", list)
    with pytest.raises(BuildError, match=r"^torch >= 2\.10 was not found; pip install"):
        toolchain.require_torch()


@pytest.mark.parametrize(
    ("system", "machine", "text"),
    [
        ("win32", "AMD64", "builds on Linux; Windows is not supported"),
        ("darwin", "arm64", "builds on Linux; macOS is not supported"),
        ("linux", "riscv64", "not riscv64"),
    ],
)
def test_other_platforms(
    system: str, machine: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(BuildError, match=text):
        toolchain.check_platform()


def test_windows_gets_that_line_too() -> None:
    code = (
        "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None\nimport build_tools.build"
    )
    code += "\ntry: build_tools.build.build_library(None)"
    code += "\nexcept build_tools.build.BuildError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "flash_cuda builds on Linux; Windows is not supported\n"


def test_no_cuda_12_compiler_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"built for CUDA 12\.8: install a CUDA toolkit"):
        build._fetch_nvcc("12.8", tmp_path)


def test_downloads_are_announced_and_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thing.txt").write_text("thing==1.0\n")
    monkeypatch.setattr(fetch, "PINS", tmp_path)
    calls = tmp_path / "calls"
    installer = ["sh", "-c", f"echo $* >> {shlex.quote(str(calls))}", "install"]
    monkeypatch.setattr(fetch, "_installer", lambda: installer)
    for _ in range(2):
        folder = fetch.fetch("thing", 7, tmp_path / "build")
    assert calls.read_text() == f"--no-deps --target {folder} thing==1.0\n"
    assert capsys.readouterr().out.count(f"downloading 7 MB into {folder}: thing==1.0") == 1

    monkeypatch.setattr(fetch, "_installer", lambda: ["sh", "-c", "echo no network >&2; exit 1"])
    with pytest.raises(BuildError, match=r"^thing could not be downloaded \(no network\)$"):
        fetch.fetch("thing", 7, tmp_path / "other")


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (89, "89 s"), (100, "2 min"), (5400, "1 h 30 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"FLASH_CUDA_ARCHS": "75"}, "FLASH_CUDA_ARCHS: '75' is not known"),
        ({"FLASH_CUDA_ARCHS": "none", "CXX": "no-such-g++"}, "no-such-g++ was not found"),
        ({"FLASH_CUDA_ARCHS": "80", "CUDA_HOME": "/nowhere"}, "CUDA_HOME is /nowhere"),
    ],
)
def test_an_error_is_one_line(changes: dict[str, str], text: str, tmp_path: Path) -> None:
    environ = {**os.environ, **changes, "FLASH_CUDA_BUILD_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "build_tools"], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"flash_cuda: error: {text}")
    assert done.stderr.count("\n") == 1


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
    assert not plan.needs_cutlass(ALL)
    (csrc / "sm100").mkdir()
    (csrc / "sm100/fwd.cu").write_text('#include "sm100/fwd_kernel.cuh"\n')
    assert not plan.needs_cutlass(ALL)
    (csrc / "sm100/fwd_kernel.cuh").write_text("#include <cute/arch/mma_sm100_umma.hpp>\n")
    assert plan.needs_cutlass(ALL)
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
