"""The environment that the Makefile makes: what it keeps, installs, and names as missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from build_tools import environment
from build_tools.messages import BuildError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What pip would be asked to install."""
    asked: list[list[str]] = []
    monkeypatch.setattr(environment, "pip_install", lambda python, words, what: asked.append(words))
    return asked


def test_the_torch_around_is_kept(tmp_path: Path, installed: list[list[str]]) -> None:
    environment.make(tmp_path / "venv", ["torch==9.9"])
    assert installed == [["setuptools>=70.1"]]
    code = "import torch; print(torch.__version__)"
    done = subprocess.run(
        [tmp_path / "venv/bin/python", "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert done.stdout.strip() == torch.__version__


def test_a_missing_torch_is_installed_as_told(
    tmp_path: Path, installed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "find_torch", lambda folders: None)
    environment.make(tmp_path / "venv", ["torch==2.13.0", "--index-url", "https://host/cpu"])
    assert installed[0] == ["torch==2.13.0", "--index-url", "https://host/cpu"]
    assert not list((tmp_path / "venv").rglob("outer_environment.pth"))


def test_an_environment_is_made_once(
    tmp_path: Path, installed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.make(tmp_path / "venv", ["torch"])
    monkeypatch.setattr(environment, "create", lambda venv: pytest.fail("created again"))
    environment.make(tmp_path / "venv", ["torch"])


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("venv", r"^the venv module is missing: apt install python3\.\d+-venv$"),
        ("git", r"^git is missing: apt install git$"),
        ("python", r"^Python 3\.9 is too old; 3\.10 or newer is needed"),
    ],
)
def test_what_is_missing_is_named(missing: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "venv":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    elif missing == "git":
        monkeypatch.setattr("shutil.which", lambda name: None if name == "git" else f"/bin/{name}")
    else:
        monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    with pytest.raises(BuildError, match=text):
        environment.check_prerequisites()


def test_a_failing_pip_ends_it(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="pip could not install the impossible"):
        environment.pip_install(Path(sys.executable), ["--no-such-option"], "the impossible")
