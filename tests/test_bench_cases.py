"""Suites, cost model and what backends say they support."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from bench import cost, warm
from bench.backend import Abilities, Backend
from bench.backends import all_backends
from bench.cases import Case, expand, load_suites, load_toml, make_case, short
from bench.derived import load_peers
from bench.warm import distinct

SUITES = load_suites()


def case_of(**values: object) -> Case:
    base = {"seqlen": 128, "batch": 2, "heads": 4, "head_dim": 64}
    return make_case("test", base | values)


def test_every_kind_of_suite_is_there() -> None:
    wanted = "smoke train window gqa varlen prefill decode short models deterministic cpu"
    assert set(wanted.split()) <= set(SUITES)


def test_suites_name_backends_that_exist() -> None:
    known = set(all_backends())
    for suite in SUITES.values():
        assert set(suite.backends) <= known
        assert suite.backends[0] == "flash_cuda"


def test_train_is_the_grid_of_the_table_of_peers() -> None:
    table = load_peers()
    keys = {f"{c.head_dim} {int(c.causal)} {c.seqlen_q}" for c in SUITES["train"].cases}
    assert keys == set(table["cells"])
    for case in SUITES["train"].cases:
        assert case.batch * case.seqlen_q == 16384
        assert case.heads * case.head_dim == 2048
        assert case.passes == ("fwd", "bwd")
        assert case.grad


def test_grid_is_the_product_of_its_lists() -> None:
    grid = {"seqlen": [64, 128], "tokens": 256, "width": 512, "head_dim": [64, 128], "causal": True}
    cases = list(expand("x", grid))
    assert [(c.seqlen_q, c.head_dim) for c in cases] == [(64, 64), (64, 128), (128, 64), (128, 128)]
    assert [c.batch for c in cases] == [4, 4, 2, 2]
    assert [c.heads for c in cases] == [8, 4, 8, 4]


def test_one_list_of_lengths_is_no_axis() -> None:
    base = {"kind": "varlen", "heads": 2, "head_dim": 64}
    assert len(list(expand("x", base | {"lengths": [3, 4]}))) == 1
    two = list(expand("x", base | {"lengths": [[3, 4], [5]]}))
    assert [(c.batch, c.seqlen_q) for c in two] == [(2, 4), (1, 5)]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"kind": "sparse"}, "kind"),
        ({"heads": 4, "kv_heads": 3}, "multiple of kv_heads"),
        ({"dtype": "int8"}, "int8"),
        ({"timer": "watch"}, "timer"),
        ({"passes": ["forward"]}, "passes"),
        ({"kind": "decode", "passes": ["bwd"]}, "forward only"),
        ({"kind": "decode", "lengths": [129, 1]}, "cache lengths"),
    ],
)
def test_cases_without_meaning_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        case_of(**values)


def test_unknown_key_of_a_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="seqlenn"):
        list(expand("x", {"seqlenn": 3}))


def test_a_suite_file_with_equal_cases_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    grid = "[[a.grid]]\nseqlen = 8\nbatch = 1\nheads = 1\nhead_dim = 64\n"
    path.write_text(f'[a]\ndescription = ""\nbackends = ["flash_cuda"]\n{grid}{grid}')
    with pytest.raises(ValueError, match="told apart"):
        load_suites(path)
    assert load_toml(path)["a"]["description"] == ""


# ---- cost ------------------------------------------------------------------------------------


def counted_pairs(case: Case) -> int:
    """By brute force."""
    right = 0 if case.causal else case.window_right
    total = 0
    for seqlen_q, seqlen_kv in case.spans:
        for row, key in itertools.product(range(seqlen_q), range(seqlen_kv)):
            place = row + seqlen_kv - seqlen_q
            in_right = right < 0 or key <= place + right
            in_left = case.window_left < 0 or key >= place - case.window_left
            total += in_right and in_left
    return total


@pytest.mark.parametrize(
    "values",
    [
        {"seqlen": 13},
        {"seqlen": 13, "window_left": 4, "causal": True},
        {"seqlen": 13, "window_left": 4, "window_right": 2},
        {"seqlen": 13, "window_right": 3},
        {"seqlen_q": 5, "seqlen_kv": 12, "seqlen": None, "causal": True},
        {"seqlen_q": 12, "seqlen_kv": 5, "seqlen": None, "causal": True},
        {"kind": "varlen", "lengths": [3, 9], "batch": 2, "window_left": 2, "causal": True},
        {"kind": "decode", "seqlen_q": 1, "seqlen_kv": 20, "seqlen": None, "lengths": [3, 20]},
    ],
    ids=str,
)
def test_pairs_are_those_that_the_masks_leave(values: dict[str, object]) -> None:
    case = case_of(**values)
    assert cost.visible_pairs(case) == counted_pairs(case)


def test_causal_counts_half_as_everyone_does() -> None:
    full, causal = case_of(seqlen=64), case_of(seqlen=64, causal=True)
    assert cost.flops(causal, "fwd") == cost.flops(full, "fwd") / 2
    assert cost.flops(full, "fwd") == 4 * 2 * 4 * 64 * 64 * 64
    assert cost.flops(full, "bwd") == 2.5 * cost.flops(full, "fwd")


def test_rate_of_a_cell_of_the_table() -> None:
    """FA3 forward at head dim 128, full, 16k: 708 TFLOP/s are 3.107 ms."""
    case = next(c for c in SUITES["train"].cases if c.label == "b1 16k h16 d128 full")
    assert cost.tflops(case, "fwd", 3.107) == pytest.approx(708, rel=1e-3)


def test_bytes() -> None:
    case = case_of(seqlen=128, kv_heads=2)
    query, key = 2 * 128 * 4 * 64 * 2, 2 * 128 * 2 * 64 * 2
    lse = 2 * 128 * 4 * 4
    assert cost.moved_bytes(case, "fwd") == 2 * query + 2 * key + lse
    assert cost.moved_bytes(case, "bwd") == 4 * query + 4 * key + lse
    decode = case_of(kind="decode", seqlen=None, seqlen_q=1, seqlen_kv=128, lengths=[100, 3])
    assert cost.moved_bytes(decode, "fwd") == 103 * 4 * 128 * 2


def test_short() -> None:
    assert [short(n) for n in (77, 1024, 1500, 131072)] == ["77", "1k", "1500", "128k"]


# ---- backends --------------------------------------------------------------------------------

REFUSALS = [
    ({"kinds": frozenset({"dense"})}, {"kind": "varlen", "lengths": [3, 4]}, "no varlen"),
    ({}, {"dtype": "float32"}, "no float32"),
    ({"backward": False}, {"passes": ["bwd"]}, "no backward"),
    ({"window": False}, {"causal": True, "window_left": 3}, "no window"),
    ({"softcap": False}, {"softcap": 30.0}, "no softcap"),
    ({"softcap_backward": False}, {"softcap": 30.0, "passes": ["bwd"]}, "backward with softcap"),
    ({"grouped_heads": False}, {"kv_heads": 2}, "grouped"),
    (
        {"bottom_right": False},
        {"seqlen": None, "seqlen_q": 2, "seqlen_kv": 9, "causal": True},
        "bottom",
    ),
    ({"deterministic": False}, {"deterministic": True}, "deterministic"),
    ({"uneven_cache": False}, {"kind": "decode", "lengths": [3, 4]}, "cache lengths"),
    ({"paged": False}, {"kind": "decode", "page_size": 16}, "no pages"),
    ({"page_multiple": 256}, {"kind": "decode", "page_size": 16}, "multiple of 256"),
    ({}, {"head_dim": 192, "head_dim_v": 128}, "head_dim_v"),
    ({"max_head_dim": 128}, {"head_dim": 256}, "up to 128"),
]


@pytest.mark.parametrize(("abilities", "values", "reason"), REFUSALS, ids=lambda x: str(x)[:40])
def test_refusals_follow_from_abilities(
    abilities: dict[str, object], values: dict[str, object], reason: str
) -> None:
    backend = Backend()
    backend.abilities = Abilities(**abilities)
    assert reason in (backend.refuses(case_of(**values)) or "")
    assert backend.refuses(case_of()) is None


def test_peers_say_no_where_they_must() -> None:
    known = all_backends()
    window = case_of(causal=True, window_left=3)
    for name in ("sdpa_cudnn", "sdpa_flash", "sdpa_math"):
        assert known[name].refuses(window)
    train = SUITES["train"].cases[0]
    for name in ("sdpa_cudnn", "sdpa_flash", "fa2", "fa4", "flex", "flash_cuda"):
        assert known[name].refuses(train) is None
    assert known["flashinfer"].refuses(train)  # has no backward
    for case in SUITES["models"].cases + SUITES["decode"].cases + SUITES["prefill"].cases:
        assert known["flash_cuda"].refuses(case) is None, case.label


def test_absent_backends_say_why() -> None:
    cpu = torch.device("cpu")
    for name, backend in all_backends().items():
        reason = backend.missing(cpu)
        if name in ("sdpa_flash", "sdpa_math"):
            assert reason is None
        elif not name.startswith("flash_cuda"):
            assert reason
            assert "\n" not in reason


# ---- compiling beforehand --------------------------------------------------------------------


def test_compiling_takes_one_case_of_a_kind() -> None:
    train = distinct(list(SUITES["train"].cases))
    assert {(c.head_dim, c.causal) for c in train} == {
        (d, c) for d in (64, 128, 256) for c in (False, True)
    }
    assert len(train) == 6
    assert len(distinct(list(SUITES["deterministic"].cases))) == 8


def test_a_compiling_process_without_the_peer_does_nothing() -> None:
    arguments = ["--suite", "train", "--worker", "0", "--workers", "1"]
    if all_backends()["fa4"].missing(torch.device("cuda")):
        assert warm.main(arguments) == 0


def test_nothing_is_started_for_peers_that_do_not_compile() -> None:
    said: list[str] = []
    warm.warm_up(["train"], ["flash_cuda", "sdpa_flash"], "", [], said.append)
    assert said == []
