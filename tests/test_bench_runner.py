"""The runner on a CPU: what is right is timed, what is wrong is named, nothing ends the run."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import bench.runner
from bench import machine, reference, run
from bench.backend import Abilities, Backend, Forward
from bench.backends import all_backends
from bench.cases import Case, Suite, make_case
from bench.inputs import Inputs, make_inputs, sets_needed
from bench.machine import Ceiling
from bench.runner import Budget, DeviceLost, Runner, Settings, run_once, run_suites
from bench.timing import CpuClock, Timed
from bench.torch_family import Flex, Sdpa

CPU = torch.device("cpu")


def case_of(**values: object) -> Case:
    base = {
        "seqlen": 96,
        "batch": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "dtype": "float32",
        "passes": ["fwd", "bwd"],
        "grad": True,
    }
    return make_case("test", base | values)


def expand_heads(case: Case, x: Tensor) -> Tensor:
    return x.repeat_interleave(case.heads // case.kv_heads, dim=-2)


def plain_attention(case: Case, x: Inputs) -> Tensor:
    """Dense attention by autograd's own operators, for dense cases."""
    k, v = expand_heads(case, x.k), expand_heads(case, x.v)
    s = torch.einsum("bqhd,bkhd->bhqk", x.q, k) / math.sqrt(case.head_dim)
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    place = torch.arange(case.seqlen_q)[:, None] + case.seqlen_kv - case.seqlen_q
    key = torch.arange(case.seqlen_kv)[None]
    seen = torch.ones(case.seqlen_q, case.seqlen_kv, dtype=torch.bool)
    if case.causal:
        seen &= key <= place
    if case.window_left >= 0:
        seen &= key >= place - case.window_left
    p = s.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


class Plain(Backend):
    """A backend whose result a test may spoil."""

    abilities = Abilities(
        dtypes=frozenset({"float32"}), devices=frozenset({"cpu"}), other_head_dim_v=True
    )

    def __init__(self, name: str = "plain", is_peer: bool = True) -> None:
        self.name, self.is_peer = name, is_peer

    def setup(self, case: Case, x: Inputs) -> Forward:
        return lambda: self.spoil(plain_attention(case, x))

    def spoil(self, out: Tensor) -> Tensor:
        return out


class OneBadRow(Plain):
    def spoil(self, out: Tensor) -> Tensor:
        keep = torch.ones_like(out)
        keep[-1, -1, 0] = 0.5
        return out * keep


class Nan(Plain):
    def spoil(self, out: Tensor) -> Tensor:
        keep = torch.ones_like(out)
        keep[0, 3, 1, 2] = math.nan
        return out * keep


class BadGradient(Plain):
    def spoil(self, out: Tensor) -> Tensor:
        return out.detach() + 1.01 * (out - out.detach())


class Shy(Plain):
    def spoil(self, out: Tensor) -> Tensor:
        raise NotImplementedError("not here\nsecond line")


class Broken(Plain):
    def spoil(self, out: Tensor) -> Tensor:
        raise RuntimeError("no luck")


class Restless(Plain):
    calls = 0

    def spoil(self, out: Tensor) -> Tensor:
        self.calls += 1
        return out * (1 + 1e-6 * self.calls)


# ---- the reference ---------------------------------------------------------------------------

SHAPES = [
    {},
    {"causal": True},
    {"causal": True, "window_left": 7},
    {"causal": True, "softcap": 5.0},
    {"seqlen": None, "seqlen_q": 40, "seqlen_kv": 96, "causal": True},
    {"seqlen": None, "seqlen_q": 96, "seqlen_kv": 40, "causal": True},
    {"head_dim_v": 16},
]


@pytest.mark.parametrize("values", SHAPES, ids=str)
@pytest.mark.parametrize("slice_bytes", [1 << 26, 30_000])
def test_reference_is_attention(
    values: dict[str, object], slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reference.SLICE_BYTES, "cpu", slice_bytes)
    case = case_of(**values)
    x = make_inputs(case, CPU, 1)
    expected = reference.compute(case, x, backward=True)
    assert expected.grads is not None
    for got, want in zip(run_once(case, Plain(), x), [expected.out, *expected.grads], strict=True):
        assert reference.worst_error(case, got, want) < 1e-5


def test_reference_of_packed_sequences_is_that_of_each() -> None:
    case = case_of(kind="varlen", lengths=[5, 64, 1], batch=3, causal=True)
    x = make_inputs(case, CPU, 1)
    out = torch.cat(
        [
            plain_attention(
                case_of(seqlen=n, batch=1, causal=True),
                Inputs(x.q[None, a : a + n], x.k[None, a : a + n], x.v[None, a : a + n]),
            )[0]
            for a, n in ((0, 5), (5, 64), (69, 1))
        ]
    )
    expected = reference.compute(case, x, backward=False)
    assert reference.worst_error(case, out.detach(), expected.out) < 1e-5


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("lengths", [[], [96, 17]])
def test_reference_of_a_cache(page_size: int, lengths: list[int]) -> None:
    case = case_of(
        kind="decode",
        seqlen=None,
        seqlen_q=2,
        seqlen_kv=96,
        lengths=lengths,
        page_size=page_size,
        causal=True,
        passes=["fwd"],
        grad=False,
    )
    x = make_inputs(case, CPU, 1)
    rows = []
    for i, (_, n) in enumerate(case.spans):
        k, v = x.k, x.v
        if page_size:
            assert x.block_table is not None
            pages = x.block_table[i].long()
            k, v = (t[pages].reshape(1, -1, *t.shape[2:]) for t in (k, v))
            i = 0
        one = case_of(seqlen=None, seqlen_q=2, seqlen_kv=n, batch=1, causal=True)
        q = x.q[len(rows), None]
        rows.append(plain_attention(one, Inputs(q, k[i, None, :n], v[i, None, :n])))
    expected = reference.compute(case, x, backward=False)
    assert reference.worst_error(case, torch.cat(rows), expected.out) < 1e-5


def test_inputs_repeat_and_differ_by_seed() -> None:
    case = case_of()
    one, two, other = (make_inputs(case, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(one.q, two.q)
    assert not torch.equal(one.q, other.q)
    assert one.q.requires_grad


def test_enough_sets_to_miss_the_cache() -> None:
    small, large = case_of(seqlen=16), case_of(seqlen=8192, heads=32)
    assert sets_needed(small, 50 << 20) == 16
    assert sets_needed(large, 50 << 20) == 3


# ---- the runner ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cheap_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large matrix product for every run would be most of the tests' time."""
    monkeypatch.setattr(machine, "measure_ceiling", lambda when, *_: Ceiling(when, 1.0, 1.0))


class Silent:
    """Telemetry without a GPU."""

    def between(self, begin: float, end: float) -> None:
        return None


def settings(**values: object) -> Settings:
    return Settings(CPU, rounds=5, warmup=1, **values)


def suite(*cases: Case) -> Suite:
    return Suite("test", "", "cpu", (), cases)


def test_right_is_timed_and_wrong_is_named() -> None:
    contestants: list[Backend] = [Plain("flash_cuda", is_peer=False), Plain("peer")]
    faulty = {"row": OneBadRow, "nan": Nan, "gradient": BadGradient, "shy": Shy, "broken": Broken}
    contestants += [kind(name) for name, kind in faulty.items()]
    report = run_suites(
        [suite(case_of(causal=True))], contestants, {"gone": "no module"}, settings(), print
    )
    status = {
        (e["backend"], e["pass"]): (e["status"], e.get("reason", "")) for e in report["results"]
    }
    assert len(status) == 14
    for name in ("fwd", "bwd"):
        assert status["flash_cuda", name][0] == status["peer", name][0] == "ok"
        assert status["row", name][0] == "wrong"
        assert status["row", name][1].startswith("out is off")
        assert status["nan", name][1].startswith("out is off by inf")
        assert status["gradient", name][1].startswith("dq is off")
        assert status["shy", name] == ("refused", "NotImplementedError: not here")
        assert status["broken", name] == ("failed", "RuntimeError: no luck")
    ours = next(e for e in report["results"] if e["backend"] == "flash_cuda")
    assert ours["ms"] > 0
    assert ours["tflops"] > 0
    assert ours["samples"] == 5
    assert ours["best_peer"] == "peer"
    assert ours["ratio"] > 0
    assert ours["error"] < 1e-5
    assert ours["ceiling_pct"] > 0
    assert [c["when"] for c in report["ceiling"]] == ["start", "end"]
    assert report["backends"]["gone"] == {"status": "absent", "reason": "no module"}


def test_deterministic_means_the_same_bits() -> None:
    case = case_of(deterministic=True)
    report = run_suites([suite(case)], [Restless("a"), Plain("b")], {}, settings(), print)
    status = {e["backend"]: (e["status"], e.get("reason")) for e in report["results"]}
    assert status["a"] == ("wrong", "out differs from run to run")
    assert status["b"][0] == "ok"


def test_soaked_rates_are_kept_apart() -> None:
    case = case_of(passes=["fwd"])
    ours = Plain("flash_cuda", is_peer=False)
    report = run_suites([suite(case)], [ours, Plain("peer")], {}, settings(soak_seconds=0.2), print)
    for entry in report["results"]:
        assert entry["soak"]["ms"] > 0
    assert report["results"][0]["soak"]["best_peer"] == "peer"


def test_everyone_is_soaked_first_in_turn_and_only_where_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def fake(one: Timed, *_: object) -> tuple[float, float, float]:
        order.append(one.name)
        return 1.0, 0.0, 0.0

    monkeypatch.setattr(bench.runner, "soak", fake)
    cases = [case_of(seqlen=n, passes=["fwd"]) for n in (16, 24, 32, 48)]
    asked = settings(soak_seconds=1.0, soak_filter="b2 (16|32|48) ")
    contestants: list[Backend] = [Plain(name) for name in ("a", "b", "c")]
    report = run_suites([suite(*cases)], contestants, {}, asked, print)
    assert "".join(order) == "abcbcacab"
    cold = {e["key"] for e in report["results"] if "soak" not in e}
    assert cold == {cases[1].key}


def test_ctrl_c_ends_the_run_but_keeps_what_was_measured() -> None:
    class Impatient(Plain):
        def refuses(self, case: Case) -> str | None:
            if case.seqlen_q == 32:
                raise KeyboardInterrupt
            return None

    cases = [case_of(seqlen=n) for n in (16, 32, 48)]
    report = run_suites([suite(*cases)], [Impatient()], {}, settings(), print)
    assert report["interrupted"]
    assert report["skipped"] == [cases[1].key, cases[2].key]
    assert {e["key"] for e in report["results"]} == {cases[0].key}
    assert [c["when"] for c in report["ceiling"]] == ["start", "middle", "end"]


def test_an_interrupted_case_that_has_results_is_not_called_skipped() -> None:
    class Impatient(Plain):
        def refuses(self, case: Case) -> str | None:
            if self.name == "b":
                raise KeyboardInterrupt
            return "not this one"

    cases = [case_of(seqlen=n) for n in (16, 32)]
    contestants = [Impatient("a"), Impatient("b")]
    report = run_suites([suite(*cases)], contestants, {}, settings(), print)
    assert report["interrupted"]
    measured = {e["key"] for e in report["results"]}
    assert set(report["skipped"]) == {c.key for c in cases} - measured


def test_a_suite_runs_its_own_backends() -> None:
    few = Suite("few", "", "cpu", ("b",), (replace(case_of(), suite="few"),))
    report = run_suites([suite(case_of()), few], [Plain("a"), Plain("b")], {}, settings(), print)
    ran = {(e["suite"], e["backend"]) for e in report["results"]}
    assert ran == {("test", "a"), ("test", "b"), ("few", "b")}


def test_the_report_so_far_is_told_after_every_case() -> None:
    told: list[dict[str, Any]] = []
    cases = [case_of(seqlen=n) for n in (16, 32)]
    ours = Plain("flash_cuda", is_peer=False)
    report = run_suites(
        [suite(*cases)], [ours, Plain("peer")], {}, settings(), print, on_report=told.append
    )
    assert [len(part["results"]) for part in told] == [4, 8]
    assert told[1]["results"] == report["results"]
    assert all("ratio" in e for e in told[0]["results"] if not e["is_peer"])
    assert set(told[0]) == set(report)


def test_a_spent_budget_skips_cases_and_says_so() -> None:
    cases = [case_of(seqlen=n) for n in (16, 32, 48)]
    report = run_suites([suite(*cases)], [Plain()], {}, settings(budget_seconds=1e-9), print)
    assert report["results"] == []
    assert report["skipped"] == [case.key for case in cases]


def test_a_lost_device_ends_the_run_but_not_the_report() -> None:
    class Lost(CpuClock):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    runner = Runner(settings(), [Broken("flash_cuda")], Lost(), Silent())
    with pytest.raises(DeviceLost, match="illegal memory access"):
        runner.run_case(case_of(), Budget(0, 1))


def test_a_case_that_breaks_the_harness_costs_only_itself() -> None:
    class Trap(Plain):
        def refuses(self, case: Case) -> str | None:
            if case.seqlen_q == 16:
                raise KeyError("trap")
            return None

    cases = [case_of(seqlen=16), case_of(seqlen=32)]
    report = run_suites([suite(*cases)], [Trap("a")], {}, settings(), print)
    assert report["broken"] == [f"{cases[0].key}: KeyError: 'trap'"]
    assert [e["status"] for e in report["results"]] == ["ok", "ok"]


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    run_suites([suite(case_of(threads=1))], [Plain()], {}, settings(), print)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", ["flash_cuda", "sdpa_flash", "sdpa_math"])
def test_backends_of_a_cpu_are_right(name: str) -> None:
    backend = all_backends()[name]
    reason = backend.missing(CPU)
    if reason:
        pytest.skip(reason)
    case = case_of(causal=True)
    report = run_suites([suite(case)], [backend], {}, settings(), print)
    assert [e["status"] for e in report["results"]] == ["ok", "ok"], report["results"]


@pytest.mark.parametrize("values", SHAPES, ids=str)
def test_flex_masks_mean_the_same(values: dict[str, object]) -> None:
    """FlexAttention uncompiled; it has no backward on a CPU."""
    flex = Flex()
    flex.module = importlib.import_module("torch.nn.attention.flex_attention")
    flex.attend = flex.module.flex_attention
    case = case_of(**values, passes=["fwd"], grad=False)
    x = make_inputs(case, CPU, 1)
    expected = reference.compute(case, x, backward=False)
    assert reference.worst_error(case, run_once(case, flex, x)[0], expected.out) < 1e-5


def test_a_lower_right_diagonal_is_flash_attentions_alone() -> None:
    chunk = case_of(
        seqlen=None, seqlen_q=40, seqlen_kv=96, causal=True, dtype="bfloat16", passes=["fwd"]
    )
    there = Abilities(bottom_right=True, kinds=frozenset({"dense"}))
    flash = Sdpa("flash", SDPBackend.FLASH_ATTENTION, there)
    assert flash.refuses(chunk) is None
    # The mask is an object that torch hands to its kernel; on a CPU it is written out.
    x = make_inputs(chunk, CPU, 1)
    with torch.no_grad():
        out = Sdpa("math", SDPBackend.MATH, there).setup(chunk, x)()
    expected = reference.compute(chunk, x, backward=False)
    assert reference.worst_error(chunk, out, expected.out) < reference.TOLERANCE["bfloat16"]
    for name in ("sdpa_cudnn", "sdpa_efficient", "sdpa_math"):
        backend = all_backends()[name]
        assert backend.refuses(chunk) in ("no bottom-right causal", "no grouped heads")


def test_flash_cuda_serves_every_kind() -> None:
    backend = all_backends()["flash_cuda"]
    if backend.missing(CPU):
        pytest.skip("flash_cuda is not built")
    forward = {"passes": ["fwd"], "grad": False, "causal": True}
    decode = forward | {"kind": "decode", "seqlen": None, "seqlen_q": 2, "seqlen_kv": 96}
    cases = [
        case_of(kind="varlen", lengths=[5, 64, 1], batch=3, causal=True),
        case_of(causal=True, window_left=7),
        case_of(window_left=5, window_right=9),
        case_of(softcap=5.0),
        case_of(deterministic=True),
        case_of(head_dim_v=16),
        case_of(**decode),
        case_of(**decode, lengths=[96, 17]),
        case_of(**decode, page_size=16),
        case_of(dtype="bfloat16", causal=True),
        case_of(**forward, dtype="float8_e4m3fn"),
    ]
    for case in cases:
        x = make_inputs(case, CPU, 1)
        expected = reference.compute(case, x, case.needs_backward)
        got = run_once(case, backend, x)
        for result, want in zip(got, [expected.out, *(expected.grads or ())], strict=True):
            error = reference.worst_error(case, result, want)
            assert error < reference.TOLERANCE[case.dtype], case.label


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--filter", "("], "--filter '(' is no regular expression"),
        (["--soak-filter", "*"], "--soak-filter '*' is no regular expression"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--budget-seconds", "-3"], "--budget-seconds must be at least 0, got -3.0"),
        (["--soak", "-1"], "--soak must be at least 0, got -1.0"),
    ],
)
def test_wrong_settings_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.parse_args(arguments)
    assert said in capsys.readouterr().err


def test_the_cpu_suite_in_place_of_others_keeps_the_filter() -> None:
    args = run.parse_args(["--suite", " train ", "--filter", "512"])
    (suite,) = run.choose_suites(args, torch.device("cpu"))
    assert suite.name == "cpu"
    assert suite.cases
    assert all("512" in case.key for case in suite.cases)
