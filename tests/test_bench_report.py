"""What is made of results: ratios, stand-ins, tables, charts, pages, the README, exit codes."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import derived, html, plot, readme, run, table
from bench.cases import Suite, load_suites
from bench.progress import Progress
from tests.bench_fakes import report_of

SUITES = load_suites()
HOST = "host time of a call, fwd: flash_cuda 17 us, sdpa_cudnn 17 us"


# ---- derived figures -------------------------------------------------------------------------


def test_stand_in_for_fa3_is_fa4_times_the_ratio_of_the_table() -> None:
    report = report_of(["train"])
    cells = derived.cells(report)
    key = next(k for k in report["cases"] if "b1 16k h8 d256 causal" in k)
    cell = cells[key, "bwd"]
    assert cell["fa3*"]["tflops"] == pytest.approx(cell["fa4"]["tflops"] * 472 / 378)
    assert cell["fa3*"]["ms"] == pytest.approx(cell["fa4"]["ms"] * 378 / 472)
    assert cell["flash_cuda"]["best_peer"] == "fa3*"
    assert cell["flash_cuda"]["ratio"] == pytest.approx(
        cell["fa3*"]["ms"] / cell["flash_cuda"]["ms"]
    )
    assert sum(e["status"] == "derived" for e in report["results"]) == 72


def test_no_stand_in_on_other_cards_shapes_or_beside_the_real_one() -> None:
    report = report_of(["decode", "window", "gqa", "deterministic"])
    stand_ins = {e["key"] for e in report["results"] if e["status"] == "derived"}
    for key in stand_ins:
        case = report["cases"][key]
        assert not case["deterministic"]
        assert case["heads"] == case["kv_heads"]
    report = report_of(["train"])
    report["results"] = [e for e in report["results"] if e["status"] == "ok"]
    other = copy.deepcopy(report)
    other["machine"]["gpu"] = "NVIDIA B200"
    assert derived.derive_fa3(other) == []
    assert len(derived.derive_fa3(report)) == 72
    report["results"][0]["backend"] = "fa3"
    assert derived.derive_fa3(report) == []


def test_share_of_the_ceiling() -> None:
    report = report_of(["smoke"])
    mean = (779 + 684 + 739) / 3
    for entry in report["results"]:
        is_decode = report["cases"][entry["key"]]["kind"] == "decode"
        expected = entry["tbps"] / 4.2 if is_decode else entry["tflops"] / mean
        assert entry["ceiling_pct"] == pytest.approx(100 * expected)


# ---- text ------------------------------------------------------------------------------------


def test_table_has_a_row_a_cell_and_says_what_went_wrong() -> None:
    report = report_of(["smoke"], soak=True)
    wrong = next(e for e in report["results"] if e["backend"] == "fa4" and e["pass"] == "bwd")
    wrong |= {"status": "wrong", "reason": "dq is off by 1.0e+00, allowed 4e-02"}
    header, rows = table.rows_of(report)
    assert header[:3] == ["case", "pass", "flash_cuda"]
    assert len(rows) == 9
    assert all(len(row) == len(header) for row in rows)
    assert sum("WRONG" in row for row in rows) == 1
    assert all("/" in row[2] for row in rows)
    text = table.plain(header, rows)
    assert len({len(line) for line in text.split("\n")[1:2]}) == 1
    notes = "\n".join(table.notes_of(report))
    for part in ("H200", "779", "absent: fa2: Module", "dq is off", "derived: fa3*", "1700", HOST):
        assert part in notes


def test_show_prints_without_rich(capsys: pytest.CaptureFixture[str]) -> None:
    table.show(report_of(["decode"]))
    assert "TB/s of K and V" in capsys.readouterr().out


def test_progress_writes_lines_with_an_estimate() -> None:
    import io

    stream = io.StringIO()
    progress = Progress(stream, period=0.0)
    progress.update(0, 4, "first")
    progress.update(2, 4, "third")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[0/4, 0 s] first"
    assert lines[1].startswith("[2/4, 0 s, about ")


# ---- charts ----------------------------------------------------------------------------------


def test_every_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.json"
    report = report_of(["train", "decode", "deterministic", "memory"], soak=True)
    path.write_text(json.dumps(report))
    lines = plot.draw_all(plot.load_report(path), tmp_path / "charts")
    assert not [line for line in lines if "no data" in line]
    names = {p.stem for p in (tmp_path / "charts").iterdir()}
    for name in (
        "throughput_train_fwd",
        "throughput_train_bwd_soaked",
        "ratio_train",
        "decode_bandwidth",
        "roofline",
        "determinism_overhead",
        "memory_memory_d128_causal_fwd_bwd",
    ):
        assert name in names
        for extension in ("png", "svg"):
            assert (tmp_path / "charts" / f"{name}.{extension}").stat().st_size > 5000


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_page_of_every_suite(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if suite not in ("smoke", "cpu"):  # the charts are the test above
        monkeypatch.setattr(html, "CHARTS", ())
    page = html.page([report_of([suite])])
    assert page.count("<tr>") == 1 + sum(len(case.passes) for case in SUITES[suite].cases)
    assert "http" not in page.replace("http://www.w3.org", "")


def test_without_matplotlib_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ImportError("no matplotlib")

    monkeypatch.setattr(plot, "pyplot", absent)
    monkeypatch.setattr(html, "pyplot", absent)
    report = report_of(["smoke"])
    assert plot.draw_all(report, tmp_path) == [plot.NO_MATPLOTLIB]
    assert "matplotlib is not installed" in html.page([report])


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(SystemExit, match="not a report"):
        plot.load_report(path)
    path.write_text("{")
    with pytest.raises(SystemExit, match=r"x\.json"):
        plot.load_report(path)


# ---- README ----------------------------------------------------------------------------------


def test_readme_is_written_and_checked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "bench" / "results" / "H200"
    folder.mkdir(parents=True)
    source = folder / "2026-11-29.json"
    source.write_text(json.dumps(report_of(["smoke"])))
    target = tmp_path / "README.md"
    target.write_text(f"# x\n{readme.BEGIN}\nold\n{readme.END}\ntail\n")
    arguments = [str(source), "--readme", str(target)]
    assert readme.main([*arguments, "--check"]) == 1
    assert readme.main(arguments) == 0
    assert readme.main([*arguments, "--check"]) == 0
    text = target.read_text()
    assert text.endswith("tail\n")
    assert "old" not in text
    for part in ("NVIDIA H200", "2026-11-29", "| smoke | fwd | 64 | full | 1 |", "fa4 4.0.0b36"):
        assert part in text
    assert "](bench/results/H200/2026-11-29/throughput_smoke_fwd.png)" in text
    assert (folder / "2026-11-29" / "throughput_smoke_fwd.png").is_file()
    with pytest.raises(ValueError, match="markers"):
        readme.replace_section("nothing", "x")


def test_readme_tells_determinism_and_soaked_ratios_apart() -> None:
    report = report_of(["deterministic"], soak=True)
    charts = [
        f"c/{name}.png"
        for name in ("throughput_deterministic_bwd", "throughput_deterministic_bwd_soaked", "a")
    ]
    text = readme.section(report, "r.json", charts)
    assert "| deterministic | bwd | 64 | causal, deterministic | 3 |" in text
    assert "| deterministic | bwd | 64 | causal | 3 |" in text
    assert "heat-soaked |" in text
    assert text.count(" (3) |") == 8
    assert "did not repeat): flash_cuda +30 % (12)" in text
    shown, hidden = text.split("<details>")
    assert "throughput_deterministic_bwd.png" in shown
    assert "throughput_deterministic_bwd_soaked.png" in hidden
    assert "c/a.png" in hidden


def test_the_readme_shows_the_committed_report() -> None:
    root = readme.ROOT
    section = (root / "README.md").read_text().split(readme.BEGIN)[1].split(readme.END)[0]
    source = section.split("Full data: [")[1].split("]")[0]
    assert readme.main([str(root / source), "--check"]) == 0


# ---- the command line ------------------------------------------------------------------------


def test_without_a_gpu_the_cpu_suite_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)
    small = Suite("cpu", "", "cpu", ("sdpa_math",), SUITES["cpu"].cases[:1])
    monkeypatch.setattr(run, "load_suites", lambda: SUITES | {"cpu": small})
    path = tmp_path / "deep" / "out.json"
    arguments = ["--suite", "train", "--backends", "sdpa_math,fa4", "--rounds", "5"]
    assert run.main([*arguments, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "needs a CUDA GPU: suite train (36 cases" in out
    assert "absent: fa4: needs cuda, this is cpu" in out
    report = plot.load_report(path)
    assert report["suites"] == ["cpu"]
    assert {e["status"] for e in report["results"]} == {"ok"}


def test_a_time_limit_from_outside_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM, which timeout(1) and batch systems send, while the second case is measured."""
    small = Suite("cpu", "", "cpu", ("sdpa_math",), SUITES["cpu"].cases[2:4])
    monkeypatch.setattr(run, "load_suites", lambda: SUITES | {"cpu": small})

    def update(self: Progress, done: int, total: int, text: str) -> None:
        if done == 1:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Progress, "update", update)
    path, before = tmp_path / "out.json", signal.getsignal(signal.SIGTERM)
    arguments = ["--suite", "cpu", "--device", "cpu", "--rounds", "3", "--json", str(path)]
    assert run.main(arguments) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    report = plot.load_report(path)
    assert {e["key"] for e in report["results"]} == {small.cases[0].key}
    assert f"skipped, interrupted: {small.cases[1].key}" in capsys.readouterr().out


def test_torch_and_numpy_are_enough(tmp_path: Path) -> None:
    """A process where rich, matplotlib and nvidia-ml-py cannot be imported."""
    code = (
        "import sys\n"
        "for name in ('rich', 'matplotlib', 'pynvml'):\n    sys.modules[name] = None\n"
        "from bench import run\nraise SystemExit(run.main(sys.argv[1:]))"
    )
    path = tmp_path / "out.json"
    chosen = ["--device=cpu", "--suite=cpu", "--filter=1k.*full", "--passes=fwd", "--rounds=1"]
    chosen += ["--backends=sdpa_math", f"--json={path}", f"--plot={tmp_path / 'charts'}"]
    done = subprocess.run(
        [sys.executable, "-c", code, *chosen], cwd=readme.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert plot.NO_MATPLOTLIB in done.stdout
    assert [e["status"] for e in plot.load_report(path)["results"]] == ["ok"]


def test_json_has_a_line_a_result() -> None:
    report = report_of(["smoke"])
    text = run.to_json(report)
    assert json.loads(text) == report
    assert sum('"label"' in line for line in text.split("\n")) == len(report["results"])
    report["results"] = []
    assert json.loads(run.to_json(report)) == report


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--suite", "trian"], "trian"),
        (["--device", "cpu", "--suite", "cpu", "--backends", "fa9"], "fa9"),
        (["--device", "cpu", "--suite", "cpu", "--without", "fa9"], "fa9"),
        (["--device", "cpu", "--suite", "cpu", "--filter", "nothing"], "leaves no case"),
        (["--device", "cpu", "--suite", "cpu", "--passes", "sideways"], "sideways"),
        (["--site", "/nowhere/at/all"], "no such folder"),
    ],
)
def test_command_line_errors_are_one_line(arguments: list[str], text: str) -> None:
    with pytest.raises(SystemExit, match=text):
        run.main(arguments)


def test_backends_can_be_left_out() -> None:
    device = torch.device("cpu")
    present, absent = run.choose_backends(None, [SUITES["cpu"]], device, ["flash_cuda"])
    assert [b.name for b in present] == ["sdpa_flash", "sdpa_math"]
    assert absent == {}


def test_passes_can_be_chosen() -> None:
    train = run.select_cases(SUITES["train"], "d128 causal", "fwd+bwd")
    assert {case.passes for case in train.cases} == {("fwd+bwd",)}
    assert len(train.cases) == 6
    assert len(run.select_cases(SUITES["train"], "^train: b4 4k").cases) == 6
    assert run.select_cases(SUITES["decode"], "", "bwd").cases == ()
