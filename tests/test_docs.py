"""What the documents show: their code runs, and what they name is there."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path

import pytest
import torch

import flash_cuda

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "emulator/*.md", "third_party/*.md")
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[Path, str]]:
    """Code of all pages."""
    found = [(path, match) for path in PAGES for match in BLOCK.findall(path.read_text())]
    return [(path, code) for path, (name, code) in found if name == language]


def name_of(path: object) -> str:
    return path.relative_to(ROOT).as_posix() if isinstance(path, Path) else ""


@pytest.mark.parametrize(("path", "code"), blocks("python"), ids=name_of)
def test_code_runs(path: Path, code: str) -> None:
    if not torch.cuda.is_available():  # as the README says
        code = code.replace(', device="cuda"', "")
    exec(compile(code, path.name, "exec"), {"__name__": "__main__"})


def test_there_is_code_to_run() -> None:
    assert any(path.name == "README.md" for path, _ in blocks("python"))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    text = BLOCK.sub("", path.read_text())
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    inside = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]
    assert [t for t in inside if not (path.parent / t).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_exist(path: Path) -> None:
    text = path.read_text()
    modules = set(re.findall(r"python -m ([a-z_.]+[a-z_])", text)) - {"pip", "pytest", "venv"}
    assert [m for m in sorted(modules) if importlib.util.find_spec(m) is None] == []
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # In a code block at the begin of a line, elsewhere between backticks.
    code = "\n".join(body for _, body in BLOCK.findall(text))
    named = re.findall(r"^make ([\w.-]+)", code, re.MULTILINE)
    named += re.findall(r"`make ([\w.-]+)", BLOCK.sub("", text))
    assert sorted(set(named) - targets) == []


def test_variables_of_the_readme_are_read() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`(FLASH_CUDA_[A-Z_]+|[A-Z]+_(?:HOME|JOBS)|CXX)\b", text))
    sources = [
        p for folder in ("build_tools", "flash_cuda", "csrc") for p in ROOT.glob(f"{folder}/**/*")
    ]
    code = "".join(p.read_text() for p in sources if p.suffix in (".py", ".cpp", ".h"))
    assert len(named) > 6
    assert sorted(name for name in named if f'"{name}"' not in code) == []


def test_examples_of_docstrings_run() -> None:
    failures, tried = doctest.testmod(flash_cuda)
    assert (failures, tried > 0) == (0, True)
