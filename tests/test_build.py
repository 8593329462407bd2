"""The logic of the build: architectures, jobs, compilers, messages, what is recompiled."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import archs, build, fetch, jobs, toolchain
from build_tools.messages import BuildError, duration
from build_tools.plan import ROOT
from build_tools.toolchain import Gxx, Torch

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
