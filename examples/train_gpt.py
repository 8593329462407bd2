#!/usr/bin/env python3
"""Trains a small GPT on the Python standard library's own sources with flash_cuda's attention.

The model has rotary positions, grouped query heads and causal attention over packed documents
(`cu_seqlens`). It is trained twice from the same seed on the same batches, once with flash_cuda
and once with a reference (PyTorch's math attention, unless others are named), and the loss curves
are compared: the script fails if they part.

    python examples/train_gpt.py                     # CPU: under two minutes; GPU: a larger model
    python examples/train_gpt.py --pack rows --seqlen 4096 --tokens 16384 \\
        --reference sdpa_cudnn,sdpa_flash

With `--reference none --json FILE` it is a benchmark of one training step.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

MAX_BYTES = 2_000_000
MIN_PIECE = 16  # bytes; less is hardly a text
LOSSES_COMPARED = 20
LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
LAST_LOSS_TOLERANCE = 0.02
# Modules that are one file in every CPython from 3.10 to 3.14: what is read does not depend on
# what else is installed, so a run repeats on the same Python.
STDLIB_FILES = """
argparse ast base64 bdb bisect calendar cmd code codecs codeop colorsys compileall configparser
contextlib contextvars copy copyreg csv dataclasses datetime decimal difflib dis doctest enum
filecmp fileinput fnmatch fractions ftplib functools genericpath getopt getpass gettext glob
graphlib gzip hashlib heapq hmac imaplib inspect io ipaddress keyword linecache locale lzma
mailbox mimetypes modulefinder netrc ntpath numbers opcode operator optparse os pdb pickle
pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats pty py_compile pyclbr
pydoc queue quopri random reprlib rlcompleter runpy sched secrets selectors shelve shlex shutil
""".split()  # noqa: SIM905


# ---- data ------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Packed documents: tokens and targets are (total,), cu_seqlens is (documents + 1,) int32."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor  # (total,), place of a token in its document
    cu_seqlens: Tensor
    bounds: list[int]  # cu_seqlens on the host

    @property
    def longest(self) -> int:
        """Length of the longest document."""
        return max(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))

    @property
    def is_dense(self) -> bool:
        """Whether all documents have one length, so that they form a (batch, seqlen) tensor."""
        step = self.bounds[1]
        return self.bounds == list(range(0, self.bounds[-1] + 1, step))

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        moved = (t.to(device) for t in (self.tokens, self.targets, self.positions, self.cu_seqlens))
        return Batch(*moved, self.bounds)


def read_files() -> list[bytes]:
    """The sources of the standard library, sorted by name, MAX_BYTES at most."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files, room = [], MAX_BYTES
    for name in sorted(STDLIB_FILES):
        path = folder / f"{name}.py"
        if path.is_file() and room > 0:
            files.append(path.read_bytes()[:room])
            room -= len(files[-1])
    if not files:
        raise SystemExit(f"no standard library sources in {folder}; install Python's sources")
    return files


def cut_pieces(files: list[bytes], seqlen: int, pack: str) -> list[bytes]:
    """Pieces of at most seqlen + 1 bytes (inputs and the last target).

    `documents` makes a document of every function, method and class head, so lengths differ much;
    `rows` joins all text and keeps full rows only.
    """
    if pack == "rows":
        text = b"".join(files)
        return [text[i : i + seqlen + 1] for i in range(0, len(text) - seqlen, seqlen)]
    heads = re.compile(rb"\n(?=[ \t]*(?:async def|def|class) )")
    documents = [part for text in files for part in heads.split(text)]
    pieces = [d[i : i + seqlen + 1] for d in documents for i in range(0, len(d) - 1, seqlen)]
    return [piece for piece in pieces if len(piece) > MIN_PIECE]


def make_batches(pieces: list[bytes], tokens: int, steps: int, seed: int) -> Iterator[Batch]:
    """Yields `steps` batches of `tokens` tokens; a piece that does not fit is cut."""
    generator = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    for _ in range(steps):
        inputs, targets, positions, bounds = [], [], [], [0]
        while bounds[-1] < tokens:
            if not queue:
                queue = torch.randperm(len(pieces), generator=generator).tolist()
            piece = torch.frombuffer(bytearray(pieces[queue.pop()]), dtype=torch.uint8).long()
            length = min(len(piece) - 1, tokens - bounds[-1])
            inputs.append(piece[:length])
            targets.append(piece[1 : length + 1])
            positions.append(torch.arange(length))
            bounds.append(bounds[-1] + length)
        joined = (torch.cat(part) for part in (inputs, targets, positions))
        yield Batch(*joined, torch.tensor(bounds, dtype=torch.int32), bounds)


# ---- attention -------------------------------------------------------------------------------

# (q, k, v, batch) -> out; q and out are (total, heads, head_dim), k and v (total, kv_heads, ...).
Attention = Callable[[Tensor, Tensor, Tensor, Batch], Tensor]


def flash_cuda_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """Attention by torch.ops.flash_cuda.fwd, its gradients by torch.ops.flash_cuda.bwd."""
    import flash_cuda

    if batch.is_dense:
        return flash_cuda.attention(*as_rows(batch, q, k, v), causal=True).flatten(0, 1)
    return flash_cuda.attention_varlen(q, k, v, causal=True, **packing(batch))


def as_rows(batch: Batch, *tensors: Tensor) -> list[Tensor]:
    """(total, heads, head_dim) as (documents, seqlen, heads, head_dim); all have one length."""
    return [t.unflatten(0, (len(batch.bounds) - 1, -1)) for t in tensors]


def packing(batch: Batch) -> dict[str, Any]:
    """How attention_varlen is told where documents begin."""
    return {
        "cu_seqlens_q": batch.cu_seqlens,
        "cu_seqlens_k": batch.cu_seqlens,
        "max_seqlen_q": batch.longest,
        "max_seqlen_k": batch.longest,
    }


def sdpa_attention(backend: SDPBackend) -> Attention:
    """PyTorch's attention: one call for rows of one length, one call a document otherwise."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[-3] != k.shape[-3]
        ).transpose(-2, -3)

    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        with sdpa_kernel(backend):
            if batch.is_dense:
                return call(*as_rows(batch, q, k, v)).flatten(0, 1)
            spans = zip(batch.bounds, batch.bounds[1:], strict=False)
            return torch.cat([call(*(t[None, a:b] for t in (q, k, v)))[0] for a, b in spans])

    return attend


ATTENTIONS: dict[str, Attention] = {
    "flash_cuda": flash_cuda_attention,
    "math": sdpa_attention(SDPBackend.MATH),
    "sdpa_cudnn": sdpa_attention(SDPBackend.CUDNN_ATTENTION),
    "sdpa_flash": sdpa_attention(SDPBackend.FLASH_ATTENTION),
}


def serving_kernel(name: str, config: Config, batch: Batch, device: torch.device) -> str:
    """Which kernel serves the model's attention calls, in flash_cuda's own words."""
    if name != "flash_cuda":
        return f"  torch scaled_dot_product_attention, {name}"
    import flash_cuda

    heads = (config.heads, config.kv_heads, config.kv_heads)
    batch = batch.to(device)
    shapes = [(len(batch.tokens), h, config.head_dim) for h in heads]
    tensors = [torch.empty(shape, device=device, dtype=config.dtype) for shape in shapes]
    q, k, v = as_rows(batch, *tensors) if batch.is_dense else tensors
    call = {"causal": True} | ({} if batch.is_dense else packing(batch))
    passes = (flash_cuda.explain(q, k, v, backward=backward, **call) for backward in (False, True))
    return "\n".join(
        f"  {name}: {text}" for name, text in zip(("forward", "backward"), passes, strict=True)
    )


# ---- model -----------------------------------------------------------------------------------


@dataclass
class Config:
    """Sizes of the model and of a run."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    seqlen: int  # longest document; longer files are cut
    tokens: int  # of one step
    steps: int
    learning_rate: float
    dtype: torch.dtype

    @property
    def head_dim(self) -> int:
        """Columns of one head."""
        return self.width // self.heads


CPU_CONFIG = Config(4, 128, 4, 2, 512, 2048, 80, 2e-3, torch.float32)
GPU_CONFIG = Config(8, 768, 12, 4, 1024, 8192, 200, 6e-4, torch.bfloat16)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of (total, heads, head_dim), halves paired, in float32."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = (positions[:, None] * frequencies)[:, None, :]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, config: Config, attend: Attention) -> None:
        """Builds the layer's weights."""
        super().__init__()
        self.config, self.attend = config, attend
        width, kv_width = config.width, config.kv_heads * config.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, width + 2 * kv_width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Maps (total, width) to (total, width)."""
        config = self.config
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.heads, config.kv_heads, config.kv_heads], dim=1)
        q, k = rotate(q, batch.positions), rotate(k, batch.positions)
        x = x + self.project(self.attend(q, k, v, batch).flatten(1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A byte-level GPT."""

    def __init__(self, config: Config, attend: Attention) -> None:
        """Builds the weights; the caller seeds torch."""
        super().__init__()
        self.embed = nn.Embedding(256, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:
            for layer in (block.project, block.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, batch: Batch) -> Tensor:
        """Mean cross entropy of the next byte."""
        x = self.embed(batch.tokens)
        for block in self.blocks:
            x = block(x, batch)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.float(), batch.targets)


# ---- training --------------------------------------------------------------------------------


class MemoryPeak:
    """Highest memory since the start: the allocator's on a GPU, resident pages on a CPU."""

    def __init__(self, device: torch.device) -> None:
        """Starts counting."""
        self.device, self.base = device, 0
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return
        # Pages that an earlier run freed but the allocator kept would hide this run's.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.base = self._status("VmRSS")

    @staticmethod
    def _status(key: str) -> int:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return 0
        return next((int(s.split()[1]) * 1024 for s in lines if s.startswith(key + ":")), 0)

    def bytes(self) -> int:
        """Peak in bytes; on a CPU what came on top of the memory held at the start."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, self._status("VmHWM") - self.base)


@dataclass
class Run:
    """What one training run measured."""

    attention: str
    kernel: str
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    peak_bytes: int = 0


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gradient_step(model: Gpt, batch: Batch, config: Config) -> Tensor:
    """Forward and backward; returns the loss."""
    kind, low = batch.tokens.device.type, config.dtype != torch.float32
    with torch.autocast(kind, config.dtype, enabled=low):
        loss = model(batch)
    loss.backward()
    return loss.detach()


def train(
    name: str,
    config: Config,
    pieces: list[bytes],
    device: torch.device,
    seed: int,
    beside: Run | None,
) -> Run:
    """Trains the model with one attention and prints the loss every few steps.

    Args:
        name: a key of ATTENTIONS.
        config: sizes.
        pieces: the text, from cut_pieces().
        device: where to train.
        seed: of the weights and of the batches.
        beside: an earlier run whose losses are printed beside this one's.
    """
    batches = list(make_batches(pieces, config.tokens, config.steps, seed))
    run = Run(name, serving_kernel(name, config, batches[0], device))
    print(f"\n{name}\n{run.kernel}")
    # What libraries load at their first use must not count as this run's memory or time.
    gradient_step(Gpt(config, ATTENTIONS[name]).to(device), batches[0].to(device), config)
    peak = MemoryPeak(device)
    torch.manual_seed(seed)
    model = Gpt(config, ATTENTIONS[name]).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    log_every = max(1, config.steps // 12)
    for step, host_batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = config.learning_rate * min(1.0, (step + 1) / 20)
        batch = host_batch.to(device)
        synchronize(device)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = gradient_step(model, batch, config)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        synchronize(device)
        run.step_seconds.append(time.perf_counter() - start)
        run.losses.append(loss.item())
        if step % log_every == 0 or step == config.steps - 1:
            print_step(step, config, run, beside)
    # The first steps allocate, tune and load; they would say little about training.
    steady = run.step_seconds[min(5, len(run.step_seconds) - 1) :]
    run.tokens_per_second = config.tokens / statistics.median(steady)
    run.peak_bytes = peak.bytes()
    return run


def print_step(step: int, config: Config, run: Run, beside: Run | None) -> None:
    """One line of progress."""
    left = statistics.median(run.step_seconds) * (config.steps - step - 1)
    line = f"  step {step:4d}  loss {run.losses[-1]:.5f}"
    if beside:
        there = beside.losses[step]
        line += f"  {beside.attention} {there:.5f}  difference {run.losses[-1] - there:+.1e}"
    print(f"{line}  {1e3 * run.step_seconds[-1]:.0f} ms  {left:.0f} s left", flush=True)


def steps_to_compare(references: list[Run], dtype: torch.dtype) -> int:
    """How many first losses tell a wrong gradient from rounding.

    A loss that jumps blows up what is in the last bit of a gradient, so two right
    implementations part there. From the step on where references differ from each other by a
    quarter of the tolerance, nothing is compared but the last loss.
    """
    for step in range(min(LOSSES_COMPARED, *(len(r.losses) for r in references))):
        losses = [r.losses[step] for r in references]
        if max(losses) - min(losses) > LOSS_TOLERANCE[dtype] / 4:
            return step
    return LOSSES_COMPARED


def compare(
    run: Run, reference: Run, dtype: torch.dtype, steps: int = LOSSES_COMPARED
) -> list[str]:
    """What is wrong with the first `steps` losses and the last; empty if the runs agree."""
    faults = []
    tolerance = LOSS_TOLERANCE[dtype]
    pairs = list(zip(run.losses, reference.losses, strict=True))
    worst = max((abs(a - b) for a, b in pairs[:steps]), default=0.0)
    # `not <=` also catches a NaN.
    if not worst <= tolerance or any(math.isnan(a) for a, _ in pairs):
        faults.append(
            f"the first {min(steps, len(pairs))} losses differ by up to {worst:.2e}, "
            f"allowed {tolerance:.0e}"
        )
    last, expected = pairs[-1]
    if not abs(last - expected) <= LAST_LOSS_TOLERANCE * expected:
        faults.append(f"the last loss is {last:.4f}, the reference's {expected:.4f}, allowed 2 %")
    return faults


# ---- output ----------------------------------------------------------------------------------


def plot(runs: list[Run], path: Path) -> str:
    """Draws the loss curves; says what happened."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "no curve: matplotlib is not installed (pip install matplotlib)"
    figure, axes = plt.subplots(figsize=(7, 4))
    for run in runs:
        style = {"linewidth": 3, "alpha": 0.5} if run is runs[0] else {"linewidth": 1}
        axes.plot(
            run.losses, label=f"{run.attention}, {run.tokens_per_second:,.0f} tokens/s", **style
        )
    axes.set(
        xlabel="step", ylabel="loss (nats a byte)", title="GPT on the standard library's sources"
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return f"curve: {path}"


def print_summary(runs: list[Run]) -> None:
    """Tokens/s, memory and loss of the runs, one line each."""
    print(f"\n{'attention':12} {'tokens/s':>12} {'ms/step':>9} {'peak MiB':>9} {'last loss':>10}")
    for run in runs:
        step = 1e3 * statistics.median(run.step_seconds)
        mib = run.peak_bytes / 2**20
        print(
            f"{run.attention:12} {run.tokens_per_second:12,.0f} {step:9.1f} {mib:9,.0f} "
            f"{run.losses[-1]:10.4f}"
        )


def reference_names(text: str) -> list[str]:
    """Keys of ATTENTIONS, from a list with commas; empty for `none`."""
    names = [] if text == "none" else text.split(",")
    unknown = [name for name in names if name not in ATTENTIONS]
    if unknown:
        known = ", ".join(ATTENTIONS)
        raise argparse.ArgumentTypeError(f"unknown {unknown}; there are {known} and none")
    return names


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--attention", choices=ATTENTIONS, default="flash_cuda")
    parser.add_argument(
        "--reference",
        type=reference_names,
        default=["math"],
        metavar="NAMES",
        help=f"with commas, of {', '.join(ATTENTIONS)}; or none (default: math)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: by device")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--heads", type=int, help="query heads")
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--seqlen", type=int, help="longest document, in bytes")
    parser.add_argument("--tokens", type=int, help="tokens of one step")
    parser.add_argument("--steps", type=int)
    parser.add_argument(
        "--pack",
        choices=["documents", "rows"],
        default="documents",
        help="documents of their own lengths, or full rows of --seqlen (dense for PyTorch)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write losses, tokens/s and memory here")
    parser.add_argument("--plot", type=Path, default=Path("train_gpt.png"))
    return parser.parse_args(argv)


def make_config(args: argparse.Namespace) -> Config:
    """The device's default sizes with what the command line changed."""
    base = GPU_CONFIG if torch.device(args.device).type == "cuda" else CPU_CONFIG
    values: dict[str, Any] = {
        key: base_value if getattr(args, key, None) is None else getattr(args, key)
        for key, base_value in asdict(base).items()
    }
    if args.dtype:
        values["dtype"] = getattr(torch, args.dtype)
    config = Config(**values)
    if config.width % config.heads or config.head_dim % 2 or config.heads % config.kv_heads:
        raise SystemExit(
            f"--width {config.width} must be a multiple of 2 * --heads {config.heads}, "
            f"and --heads a multiple of --kv-heads {config.kv_heads}"
        )
    if args.pack == "rows" and config.tokens % config.seqlen:
        raise SystemExit(
            f"--tokens {config.tokens} must be a multiple of --seqlen {config.seqlen} "
            "with --pack rows"
        )
    return config


def main(argv: list[str] | None = None) -> int:
    """Trains, compares, reports; the exit code is 1 if the losses part."""
    args = parse_args(argv)
    config, device = make_config(args), torch.device(args.device)
    files = read_files()
    pieces = cut_pieces(files, config.seqlen, args.pack)
    size = sum(map(len, files))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{len(files)} files of the standard library, {size / 1e6:.2f} MB, in {len(pieces)} "
        f"{args.pack} of at most {config.seqlen} bytes\n"
        f"{config.layers} layers of width {config.width}, {config.heads} query heads on "
        f"{config.kv_heads}, head dim {config.head_dim}, {config.tokens} tokens a step, "
        f"{str(config.dtype).removeprefix('torch.')} on {where}"
    )
    runs: list[Run] = []
    for name in dict.fromkeys((args.attention, *args.reference)):
        runs.append(train(name, config, pieces, device, args.seed, runs[0] if runs else None))
    print_summary(runs)
    steps = steps_to_compare(runs[1:], config.dtype) if len(runs) > 1 else 0
    faults = [
        f"{runs[0].attention} beside {other.attention}: {text}"
        for other in runs[1:]
        for text in compare(runs[0], other, config.dtype, steps)
    ]
    print(plot(runs, args.plot))
    if args.json:
        settings = asdict(config) | {"dtype": str(config.dtype), "device": where, "pack": args.pack}
        report = {"config": settings, "runs": [asdict(run) for run in runs], "faults": faults}
        args.json.write_text(json.dumps(report, indent=1))
    for fault in faults:
        print(f"FAILED: {fault}")
    if len(runs) > 1 and steps < min(LOSSES_COMPARED, config.steps):
        print(f"the references part at step {steps}: compared up to there, and the last loss")
    if len(runs) > 1 and not faults:
        print(f"passed: the losses of {' and '.join(run.attention for run in runs)} agree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
