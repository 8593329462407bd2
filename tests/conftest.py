"""Backends, markers, seeds and threads of the tests.

`--backend` chooses where the shared cases run: cpu, cuda, emulated (every architecture that has
kernels) or emulated:sm90; several are separated by commas. By default: cpu, and cuda where there
is a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from .cases import AttentionCase
from .check import Backend

ROOT = Path(__file__).resolve().parent.parent
KERNEL_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default="auto",
        help="cpu, cuda, emulated, emulated:ARCH, or several of them with commas",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: one case of each kind; -m smoke takes a minute")
    chosen_backends(config)  # a wrong name is one line here, not an error in every file
    # The cases are small: more threads would mostly wait for each other.
    torch.set_num_threads(int(os.environ.get("FLASH_CUDA_TEST_THREADS", "1")))


def pytest_report_header(config: pytest.Config) -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    backends = ", ".join(b.name for b in chosen_backends(config))
    return f"backends: {backends}; GPU: {gpu}; torch {torch.__version__}"


def chosen_backends(config: pytest.Config) -> list[Backend]:
    """The backends that --backend names."""
    option = str(config.getoption("--backend"))
    names = ["cpu", "cuda"] if option == "auto" else option.split(",")
    backends = []
    for name in names:
        if name == "emulated":
            folders = sorted(p.parent.name for p in (ROOT / "csrc").glob("sm*/table.cpp"))
            backends += [Backend(f"emulated:{folder}") for folder in folders]
        elif name in ("cpu", "cuda") or name.startswith("emulated:"):
            backends.append(Backend(name))
        else:
            raise pytest.UsageError(
                f"--backend must be cpu, cuda, emulated or emulated:ARCH, got {name!r}"
            )
    return backends


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    params = []
    for backend in chosen_backends(metafunc.config):
        marks = [pytest.mark.gpu] if backend.name == "cuda" else []
        params.append(pytest.param(backend, id=backend.name, marks=marks))
    metafunc.parametrize("backend", params)


def _runs_there(case: AttentionCase, backend: Backend) -> bool:
    """Whether a case is meant for a backend at all."""
    if backend.is_emulated:
        return case.small
    return backend.is_engine or case.dtype in KERNEL_DTYPES


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a GPU, and torch sees none")
    kept, dropped = [], []
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        callspec = getattr(item, "callspec", None)
        params = callspec.params if callspec is not None else {}
        case, backend = params.get("case"), params.get("backend")
        if isinstance(case, AttentionCase) and isinstance(backend, Backend):
            (kept if _runs_there(case, backend) else dropped).append(item)
        else:
            kept.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
