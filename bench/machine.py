"""The machine: what it is, how fast its matrix products and copies are, how hot it runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .timing import Clock

PERIOD_SECONDS = 0.05


@dataclass(frozen=True)
class Reading:
    """One look at the GPU."""

    at: float  # time.perf_counter()
    clock_mhz: float
    power_w: float
    temperature_c: float


class Telemetry:
    """Reads SM clock, power and temperature in the background.

    By nvidia-ml-py where it is installed, else from one nvidia-smi process; without either, and on
    a CPU, there are no readings and `source` says why.
    """

    def __init__(self, device: torch.device) -> None:
        """Starts reading."""
        self.readings: list[Reading] = []
        self._stop = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self.source = "none: no GPU"
        if device.type != "cuda":
            return
        index = device.index or 0
        loop = self._start_nvml(index) or self._start_smi(index)
        if loop:
            self._thread = threading.Thread(target=loop, daemon=True)
            self._thread.start()

    def _start_nvml(self, index: int) -> Callable[[], None] | None:
        try:
            import pynvml

            pynvml.nvmlInit()
            # By UUID: CUDA's numbering and NVML's differ under CUDA_VISIBLE_DEVICES.
            uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            pynvml.nvmlDeviceGetPowerUsage(handle)
        except Exception:  # an absent module, driver or device: nvidia-smi is next
            return None
        self.source = "nvidia-ml-py"

        def loop() -> None:
            while not self._stop.wait(PERIOD_SECONDS):
                with contextlib.suppress(pynvml.NVMLError):
                    clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
                    power = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
                    heat = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
                    self.readings.append(Reading(time.perf_counter(), clock, power, heat))

        return loop

    def _start_smi(self, index: int) -> Callable[[], None] | None:
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        command = [
            "nvidia-smi",
            f"--id=GPU-{uuid}" if uuid else f"--id={index}",
            "--query-gpu=clocks.sm,power.draw,temperature.gpu",
            "--format=csv,noheader,nounits",
            f"--loop-ms={int(1000 * PERIOD_SECONDS)}",
        ]
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self.source = "none: neither nvidia-ml-py nor nvidia-smi"
            return None
        self.source = "nvidia-smi"
        lines = self._process.stdout
        assert lines is not None

        def loop() -> None:
            for line in lines:
                reading = parse_smi(line)
                if reading:
                    self.readings.append(reading)

        return loop

    def between(self, begin: float, end: float) -> dict[str, float] | None:
        """Means of the readings between two times of time.perf_counter(); the nearest if none."""
        readings = list(self.readings)
        if not readings:
            return None
        inside = [r for r in readings if begin <= r.at <= end]
        if not inside:
            inside = [min(readings, key=lambda r: abs(r.at - end))]
        names = ("clock_mhz", "power_w", "temperature_c")
        return {n: round(sum(getattr(r, n) for r in inside) / len(inside), 1) for n in names}

    def close(self) -> None:
        """Stops reading."""
        self._stop.set()
        if self._process:
            self._process.terminate()
            self._process.wait()
        if self._thread:
            self._thread.join(timeout=2)


def parse_smi(line: str) -> Reading | None:
    """A line of nvidia-smi's CSV, or None if a field is not a number ("[N/A]")."""
    try:
        clock, power, heat = (float(field) for field in line.split(","))
    except ValueError:
        return None
    return Reading(time.perf_counter(), clock, power, heat)


@dataclass
class Ceiling:
    """What the machine does at best at one moment."""

    when: str  # start, middle, end
    matmul_tflops: float
    copy_tbps: float  # read + written


def measure_ceiling(when: str, device: torch.device, clock: Clock) -> Ceiling:
    """A large matrix product and a large copy."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        n, repeats, copy_bytes = 8192, 20, min(1 << 30, free // 8)
        dtype = torch.bfloat16
    else:
        n, repeats, copy_bytes, dtype = 1024, 4, 1 << 26, torch.float32
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    source = torch.ones(copy_bytes // 4, device=device, dtype=torch.float32)
    target = torch.empty_like(source)

    def rate(call: Callable[[], Any], work: float) -> float:
        for _ in range(3):
            call()
        clock.synchronize()
        ms = clock.measure(lambda: [call() for _ in range(repeats)], 1.0) / repeats
        return work / ms / 1e9

    return Ceiling(
        when,
        rate(lambda: torch.mm(a, b), 2.0 * n**3),
        rate(lambda: target.copy_(source), 2.0 * copy_bytes),
    )


def card_name(device: torch.device) -> str:
    """A short name that can be a folder: "H200", "cpu"."""
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device)
    name = re.sub(r"NVIDIA|GeForce|Tesla|Graphics Device", "", name).strip()
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-") or "gpu"


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None if absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def command_output(*command: str) -> str | None:
    """First line that a command prints, None if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().split("\n")[0] or None


def describe(device: torch.device) -> dict[str, Any]:
    """Machine and versions, for JSON."""
    facts: dict[str, Any] = {
        "card": card_name(device),
        "date": time.strftime("%Y-%m-%d"),
        "time": time.strftime("%H:%M:%S"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flash_cuda": version_of("flash-cuda"),
        "commit": command_output("git", "rev-parse", "--short", "HEAD"),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "sm_count": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": command_output(
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
            ),
            "power_limit_w": command_output(
                "nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader,nounits"
            ),
        }
    return facts


def cpu_name() -> str:
    """The CPU's model."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def ceiling_dicts(ceilings: list[Ceiling]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(c) for c in ceilings]
