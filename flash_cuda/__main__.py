"""``python -m flash_cuda``: what is installed, what is here, and what serves which call."""

from __future__ import annotations

import platform

import torch

import flash_cuda
from flash_cuda import _C, _support


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return ["no CUDA device that torch can use"]
    lines = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index} {p.name}, compute capability {p.major}.{p.minor}, "
            f"{p.multi_processor_count} multiprocessors, {p.total_memory >> 20} MiB"
        )
    return lines


def _kernels() -> list[str]:
    table = _C.kernel_table()
    if not table:
        return [
            "none: CUDA tensors are refused. Build them with FLASH_CUDA_ARCHS=native "
            "pip install --no-build-isolation --no-deps --force-reinstall . in the source folder"
        ]
    return [
        f"{row['name']:<28} {row['op']:<7} {row['dtype']:<14} head_dim <= {row['head_dim']}, "
        f"values <= {row['head_dim_v']}, tiles of {row['block_q']} x {row['block_kv']}, "
        f"{row['threads']} threads"
        for row in table
    ]


def report() -> str:
    """Returns what the command prints."""
    build = _C.build_info()
    built = build["codes"] or build["archs"] or "no architecture"
    override = _C.override_name()
    parts = [
        f"flash_cuda {flash_cuda.__version__}"
        + (f" (commit {build['commit']})" if build["commit"] else ""),
        f"python     {platform.python_version()}, {platform.machine()}",
        f"torch      {torch.__version__}, its CUDA {torch.version.cuda or 'none'}; "
        f"built against {build['torch'] or 'unknown'}",
        f"built for  {built}"
        + (f", nvcc {build['nvcc']}, runtime {build['cudart']}" if build["nvcc"] else ""),
        f"driver     CUDA {_cuda_version(build['driver'])}",
        *(f"device     {line}" for line in _devices()),
    ]
    if override:
        parts.append(f"override   FLASH_CUDA_KERNEL={override}")
    parts += ["", "compiled kernels:", *(f"  {line}" for line in _kernels())]
    parts += [
        "",
        "what serves a call, forward and backward where they differ (sm80 is the folder csrc/sm80; "
        "- is refused):",
        _support.plain(),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    print(report())
