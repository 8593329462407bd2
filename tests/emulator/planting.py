"""Plants mistakes at the synchronising instructions of kernels, in a process of its own.

    python -m tests.emulator.planting sm90 [--every-site]

The emulator leaves an instruction out, or does it wrong, at one site at a time; nothing is compiled
anew. A mistake counts as caught if a schedule stops the kernel or makes the numbers wrong, or if
the race check names it. Each site gives a line of JSON: the mistake, its source line, and what was
noticed, "" for nothing. A planted mistake may write anywhere: what runs this gives it a time limit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

import emulator
import flash_cuda

from .test_kernels import inputs, reference

# What finds most comes first.
SCHEDULES = (
    "policy=random,seed=1,race=1",
    "policy=eager,seed=1,race=0",
    "policy=lazy,seed=1,race=1",
    "policy=random,seed=2,race=0",
)
SITES_OF_A_KIND = 2  # of cases that are not tried at every site

Run = Callable[[str], bool]  # settings of what is tested -> whether the numbers are right


@dataclass(frozen=True)
class Case:
    """A call with ragged lengths on one SM, or a cluster's, so that a block reuses its buffers.

    The first lengths are those whose sites are tried; what they do not show, the others may: a ring
    that goes round, tiles that end before another role has looked.
    """

    arch: str
    head_dim: int
    lengths: tuple[tuple[int, int], ...]
    backward: bool = False
    every_site: bool = False
    causal: bool = True
    sms: int = 1

    @property
    def name(self) -> str:
        return f"{'backward' if self.backward else 'forward'}, head dim {self.head_dim}"


LENGTHS = ((300, 500), (600, 100), (300, 1500))
CASES = {
    "sm80": [Case("sm80", 64, LENGTHS[:2], every_site=True)],
    "sm90": [
        Case("sm90", 64, LENGTHS, every_site=True),
        # A round of tiles and a third of one, which is shared. With more keys the loader, whose
        # ring has eight stages, falls behind.
        Case("sm90", 64, ((300, 1500), (300, 3000)), sms=3, causal=False),
        Case("sm90", 96, ((300, 1100), (600, 1030), (300, 1500))),
        Case("sm90", 128, LENGTHS),
        # Two query heads of one KV head, each in a block of a pair.
        Case("sm90", 256, ((600, 1030),), sms=2, causal=False),
        Case("sm90", 128, ((576, 1030),), sms=2, causal=False),
    ],
    "sm100": [Case("sm100", 64, LENGTHS, every_site=True), Case("sm100", 256, LENGTHS)],
}
# Of Blackwell, test_sm100_bwd_mistakes.py has mistakes of other kinds, too.
for _arch, _head_dims in (("sm80", (64,)), ("sm90", (64, 128)), ("sm100", (64, 128, 256))):
    # In Hopper's tasks of one step the buffer of K comes back at once.
    _lengths = ((130, 200), *([(60, 700)] if _arch == "sm90" else []), (300, 300))
    for _head_dim in _head_dims:
        CASES[_arch].append(Case(_arch, _head_dim, _lengths, backward=True))


def forward(case: Case, lengths: tuple[int, int]) -> Run:
    torch.manual_seed(0)
    q, k, v = inputs(lengths, case.head_dim)
    expected = reference(q, *(x.repeat_interleave(2, 2) for x in (k, v)), case.causal)

    def run(settings: str) -> bool:
        emulator.configure(case.arch, settings)
        with flash_cuda.use_kernel(f"emulated:{case.arch}"):
            out = flash_cuda.attention(q, k, v, causal=case.causal)
        return bool((out.double() - expected).abs().max() <= 3e-2)

    return run


def backward(case: Case, lengths: tuple[int, int], wants_dq: bool = True) -> Run:
    """The mistake is planted in the backward kernels alone."""
    torch.manual_seed(0)
    tensors = inputs(lengths, case.head_dim)
    weight = torch.randn_like(tensors[0])
    q, k, v = tensors
    wanted = [x.requires_grad_() for x in (tensors if wants_dq else tensors[1:])]
    copies = [x.detach().double().requires_grad_() for x in tensors]
    wide = [x.repeat_interleave(2, 2) for x in copies[1:]]
    out = reference(copies[0], *wide, True)
    expected = torch.autograd.grad(out, copies[-len(wanted) :], weight.double())

    def run(settings: str) -> bool:
        emulator.configure(case.arch, "policy=random,seed=1,race=0,sms=4,plant=nothing")
        with flash_cuda.use_kernel(f"emulated:{case.arch}"):
            out = flash_cuda.attention(q, k, v, causal=True)
            emulator.configure(case.arch, settings)
            got = torch.autograd.grad(out, wanted, weight)
        return all(
            bool((g.double() - e).abs().max() <= 3e-2 * (1 + e.abs().max()))
            for g, e in zip(got, expected, strict=True)
        )

    return run


def noticed(case: Case, run: Run, settings: str) -> str:
    """ "" if nothing is noticed, else the first line of what is."""
    try:
        right = run(f"{settings},sms={case.sms}")
    except RuntimeError as e:
        return str(e).splitlines()[0]
    finally:
        warnings = emulator.take_warnings(case.arch)
    return warnings.splitlines()[0] if warnings else "" if right else "wrong numbers"


def chosen(sites: dict[str, str], every_site: bool) -> dict[str, str]:
    """All sites, or some of each kind, spread over the kernel."""
    if every_site:
        return sites
    out = {}
    for _, group in groupby(sites, key=lambda site: site.split(":")[0]):
        kind = list(group)
        step = max(1, len(kind) // SITES_OF_A_KIND)
        out.update({site: sites[site] for site in kind[step // 2 :: step][:SITES_OF_A_KIND]})
    return out


def plant(case: Case, every_site: bool) -> Iterator[dict[str, str]]:
    """Tries the sites of a case.

    Raises:
        AssertionError: something is noticed without a mistake.
    """
    runs = [(backward if case.backward else forward)(case, lengths) for lengths in case.lengths]
    if case.backward:  # nothing waits for dQ
        runs.append(backward(case, case.lengths[-1], wants_dq=False))

    def is_sound() -> None:
        for run in runs:
            for schedule in SCHEDULES:
                text = noticed(case, run, f"{schedule},plant=nothing")
                assert not text, f"{case.arch}, {case.name}, {schedule}: {text}"

    is_sound()
    noticed(case, runs[0], "policy=random,seed=1,race=0,plant=observe")
    for site, source in chosen(
        emulator.plantable(case.arch), every_site or case.every_site
    ).items():
        tries = (
            noticed(case, run, f"{schedule},plant={site}") for run in runs for schedule in SCHEDULES
        )
        text = next(filter(None, tries), "")
        yield {"case": case.name, "site": site, "source": source, "noticed": text}
    is_sound()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", choices=sorted(CASES))
    parser.add_argument("--every-site", action="store_true")
    parser.add_argument("--case", default="", help="only cases whose name starts so")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES[arguments.arch]:
        if not case.name.startswith(arguments.case):
            continue
        # Launches are planned for as few SMs, too, so that a persistent block takes every tile.
        emulator.load(case.arch, num_sms=case.sms)
        try:
            for line in plant(case, arguments.every_site):
                print(json.dumps(line), flush=True)
        except NotImplementedError as e:
            print(json.dumps({"case": case.name, "skipped": str(e).splitlines()[0]}), flush=True)


if __name__ == "__main__":
    main()
