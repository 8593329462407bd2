"""The training example: its data, its comparison, and short runs on the CPU."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

PATH = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
SMALL = [
    "--device=cpu", "--layers=1", "--width=32", "--heads=2", "--kv-heads=1", "--seqlen=48",
    "--tokens=128", "--steps=22",
]  # fmt: skip


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_text_is_fixed_and_bounded(example: ModuleType) -> None:
    files = example.read_files()
    assert 1_000_000 < sum(map(len, files)) <= 2_000_000
    assert files == example.read_files()
    assert len(set(example.STDLIB_FILES)) == len(example.STDLIB_FILES)


def test_documents_differ_in_length_and_rows_do_not(example: ModuleType) -> None:
    files = [
        b"import x\n\n\ndef f():\n    return 1234567\n" + b"y" * 100,
        b"class A:\n    def g(self):\n        pass\n",
    ]
    documents = example.cut_pieces(files, 48, "documents")
    assert len({len(d) for d in documents}) > 2
    assert all(example.MIN_PIECE < len(d) <= 49 for d in documents)
    assert all(d in files[0] + files[1] for d in documents)
    rows = example.cut_pieces(files, 16, "rows")
    assert {len(r) for r in rows} == {17}
    assert rows[1][0] == rows[0][-1]  # the last target of a row is the first input of the next


def test_batches_hold_whole_steps_and_repeat(example: ModuleType) -> None:
    pieces = example.cut_pieces(example.read_files(), 64, "documents")
    batches = list(example.make_batches(pieces, 300, 3, seed=1))
    for batch, again in zip(batches, example.make_batches(pieces, 300, 3, seed=1), strict=True):
        assert batch.bounds == again.bounds
        assert batch.bounds[0] == 0
        assert batch.bounds[-1] == 300 == len(batch.tokens)
        assert batch.longest <= 64
        for a, b in zip(batch.bounds, batch.bounds[1:], strict=False):
            assert batch.positions[a:b].tolist() == list(range(b - a))
            # A target is the next token of the same document.
            assert torch.equal(batch.tokens[a + 1 : b], batch.targets[a : b - 1])
    assert not torch.equal(batches[0].tokens, batches[1].tokens)


def test_dense_batches_are_recognised(example: ModuleType) -> None:
    def batch(*bounds: int) -> bool:
        empty = torch.empty(0)
        return bool(example.Batch(empty, empty, empty, empty, list(bounds)).is_dense)

    assert batch(0, 8, 16, 24)
    assert batch(0, 8)
    assert not batch(0, 8, 15)
    assert not batch(0, 8, 16, 20)


def test_reference_attention_does_not_cross_documents(example: ModuleType) -> None:
    torch.manual_seed(0)
    bounds = [0, 5, 6, 20]
    q, k, v = (torch.randn(20, h, 8) for h in (4, 2, 2))
    empty = torch.empty(0)
    batch = example.Batch(empty, empty, empty, empty, bounds)
    out = example.ATTENTIONS["math"](q, k, v, batch)
    document = torch.bucketize(torch.arange(20), torch.tensor(bounds[1:]), right=True)
    seen = (document[:, None] == document[None]) & torch.ones(20, 20).tril().bool()
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(8)
    expected = torch.einsum("hqk,khd->qhd", s.masked_fill(~seen, -math.inf).softmax(-1), v)
    assert torch.allclose(out, expected, atol=1e-5)
    rows = example.Batch(empty, empty, empty, empty, [0, 10, 20])
    document = torch.arange(20) // 10
    seen = (document[:, None] == document[None]) & torch.ones(20, 20).tril().bool()
    expected = torch.einsum("hqk,khd->qhd", s.masked_fill(~seen, -math.inf).softmax(-1), v)
    assert torch.allclose(
        example.ATTENTIONS["math"](q, k[:, ::2], v[:, ::2], rows), expected, atol=1e-5
    )


def test_rotation_keeps_lengths_and_depends_on_distance_alone(example: ModuleType) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def product(i: int, j: int) -> float:
        a = example.rotate(x, torch.tensor([i]))
        b = example.rotate(y, torch.tensor([j]))
        return float((a * b).sum())

    assert product(3, 1) == pytest.approx(product(12, 10), abs=1e-4)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-3)
    assert example.rotate(x, torch.tensor([7])).norm() == pytest.approx(float(x.norm()), rel=1e-5)


@pytest.mark.parametrize(
    ("losses", "faults"),
    [
        ([3.0] * 30, 0),
        ([3.0] * 19 + [3.00011] + [3.0] * 10, 1),  # the 20th counts
        ([3.0] * 20 + [3.4] + [3.0] * 9, 0),  # the 21st does not
        ([3.0] * 29 + [3.07], 1),
        ([3.0] * 29 + [3.05], 0),
        ([3.0] * 25 + [math.nan] + [3.0] * 4, 1),
        ([math.nan] * 30, 2),
    ],
)
def test_comparison(example: ModuleType, losses: list[float], faults: int) -> None:
    run, reference = example.Run("a", ""), example.Run("b", "")
    run.losses, reference.losses = losses, [3.0] * 30
    assert len(example.compare(run, reference, torch.float32)) == faults


def test_nothing_is_compared_after_references_part(example: ModuleType) -> None:
    run, one, other = (example.Run(name, "") for name in "abc")
    one.losses, other.losses = [3.0] * 30, [3.0] * 12 + [3.1, 3.2] + [3.0] * 16
    assert example.steps_to_compare([one], torch.float32) == 20
    assert example.steps_to_compare([one, one], torch.float32) == 20
    steps = example.steps_to_compare([one, other], torch.float32)
    assert steps == 12
    run.losses = [3.0] * 12 + [3.5] * 5 + [3.0] * 13
    assert not example.compare(run, one, torch.float32, steps)
    run.losses[11] = 3.5
    assert len(example.compare(run, one, torch.float32, steps)) == 1
    other.losses[0] = 4.0  # they never agree: the last loss alone is left
    assert example.steps_to_compare([one, other], torch.float32) == 0
    assert not example.compare(run, one, torch.float32, 0)


def test_both_agree_and_the_report_says_so(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, curve = tmp_path / "r.json", tmp_path / "curve.png"
    assert example.main([*SMALL, "--json", str(report), "--plot", str(curve)]) == 0
    out = capsys.readouterr().out
    for part in ("forward: ", "backward: ", "flash_cuda", "math", "tokens/s", "peak MiB", "passed"):
        assert part in out
    found = json.loads(report.read_text())
    assert [run["attention"] for run in found["runs"]] == ["flash_cuda", "math"]
    assert found["faults"] == []
    for run in found["runs"]:
        assert len(run["losses"]) == 22
        assert run["losses"][-1] < run["losses"][0]
        assert run["tokens_per_second"] > 0
    if importlib.util.find_spec("matplotlib"):
        assert curve.stat().st_size > 5000


def test_several_references(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, curve = tmp_path / "r.json", tmp_path / "curve.png"
    arguments = ["--reference=math,sdpa_flash", "--json", str(report), "--plot", str(curve)]
    assert example.main([*SMALL, *arguments]) == 0
    assert "the losses of flash_cuda and math and sdpa_flash agree" in capsys.readouterr().out
    assert len(json.loads(report.read_text())["runs"]) == 3
    with pytest.raises(SystemExit):
        example.main([*SMALL, "--reference=math,flahs"])
    assert "flahs" in capsys.readouterr().err


def test_wrong_attention_is_found(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = example.ATTENTIONS["flash_cuda"]

    def wrong(q: Tensor, k: Tensor, v: Tensor, batch: Any) -> Tensor:
        whole = [0, batch.bounds[-1]]  # one document sees the others
        cu_seqlens = torch.tensor(whole, dtype=torch.int32)
        return right(q, k, v, replace(batch, bounds=whole, cu_seqlens=cu_seqlens))

    monkeypatch.setitem(example.ATTENTIONS, "flash_cuda", wrong)
    assert example.main([*SMALL, "--plot", str(tmp_path / "c.png")]) == 1


def test_gradients_come_from_the_op(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong gradient alone must fail too: the losses part after the first step."""
    right = example.ATTENTIONS["flash_cuda"]

    def wrong(q: Tensor, k: Tensor, v: Tensor, batch: Any) -> Tensor:
        out = right(q, k, v, batch)
        return out.detach() + 1.2 * (out - out.detach())

    monkeypatch.setitem(example.ATTENTIONS, "flash_cuda", wrong)
    assert example.main([*SMALL, "--plot", str(tmp_path / "c.png")]) == 1


def test_one_alone_is_a_benchmark(example: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    arguments = ["--attention=math", "--reference=none", "--pack=rows", "--tokens=96"]
    arguments += ["--json", str(report), "--plot", str(tmp_path / "c.png")]
    assert example.main([*SMALL, *arguments]) == 0
    assert len(json.loads(report.read_text())["runs"]) == 1


@pytest.mark.parametrize(
    "arguments", [["--heads=3"], ["--kv-heads=4"], ["--pack=rows", "--tokens=100"]], ids=str
)
def test_sizes_that_do_not_fit_are_refused(example: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="multiple of"):
        example.main([*SMALL, *arguments])
