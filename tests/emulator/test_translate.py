"""Translation and libraries: what is refused, what a report can say, what is cached."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import emulator
from emulator.library import Recipe, build_recipe
from emulator.translate import TranslationError, translate

from .library import KERNELS, Failure, TestLibrary

HEAD = ".version 9.0\n.target sm_90a\n.address_size 64\n"
PTX = (
    HEAD
    + """
.visible .entry add(
\t.param .u64 .ptr .align 1 add_param_0
)
.maxntid 128, 1, 1
{
\t.reg .b32 \t%r<3>;
\t.reg .b64 \t%rd<3>;
\t.loc\t1 7 3
\tld.param.b64 \t%rd1, [add_param_0];
\t.loc\t2 3 1, function_name $L__info_string0, inlined_at 1 8 5
\tld.global.b32 \t%r1, [%rd1];
\tINSTRUCTION
\tst.global.b32 \t[%rd1], %r1;
\tret;

}
\t.file\t1 "/src/csrc/a.cu"
\t.file\t2 "/src/csrc/b.h"
\t.section\t.debug_str
\t{
$L__info_string0:
.b8 95,90,0

\t}
"""
)


def translated(instruction: str) -> str:
    text = PTX.replace("INSTRUCTION", instruction)
    out = translate(text, "m", Path("m.ptx"), Path("m.sites"), Path("/src"))
    return next(iter(out.kernels.values())) + out.index + out.sites


def test_lines() -> None:
    text = translated("add.s32 \t%r1, %r1, 1;")
    assert "S csrc/a.cu:7" in text
    assert "S csrc/b.h:3, inlined at csrc/a.cu:8" in text
    assert '"add"' in text
    assert "128u" in text


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ("frobnicate.b32 \t%r1, %r1;", "unknown instruction frobnicate.b32"),
        ("add.xorsign.s32 \t%r1, %r1, 1;", "unknown qualifier .xorsign"),
        (
            "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1};",
            "mma shape",
        ),
        ("add.s32 \t%r1, %q7, 1;", "operand '%q7'"),
        ("call.uni \tsomewhere;", "call of somewhere"),
        ("cvt.rs.f16x2.f32 \t%r1, %r1, %r1;", "stochastic"),
    ],
)
def test_unknown_is_refused(instruction: str, words: str) -> None:
    with pytest.raises(TranslationError, match=re.escape(words)) as error:
        translated(instruction)
    assert "line 16:" in str(error.value)


def test_unknown_architecture() -> None:
    with pytest.raises(ValueError, match="arch must be one of sm80, sm90"):
        emulator.build("sm75")
    with pytest.raises(emulator.EmulatorBuildError, match=r"no table\.cpp"):
        emulator.build("sm120")


def test_library_is_cached_and_closed(capfd: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe("test_failures", "sm90", [KERNELS / "failures.cu"])
    path = build_recipe(recipe)
    capfd.readouterr()
    assert build_recipe(recipe) == path
    assert capfd.readouterr().err == ""
    names = subprocess.run(
        ["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True
    ).stdout.split()[2::3]
    assert names
    assert all(name.startswith("flash_cuda_") for name in names)
    needed = subprocess.run(
        ["nm", "-D", "-u", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert "cuda" not in needed


def test_kernels_are_compiled_when_launched(capfd: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe("test_separate", "sm90", [KERNELS / "races.cu"], separate=True)
    path = build_recipe(recipe)
    code, kernels = path.with_suffix(".code"), path.with_suffix(".kernels")
    for file in code.iterdir():
        file.unlink()
    library = TestLibrary(path)
    data, out = np.arange(256, dtype=np.int32), np.zeros(64, np.int32)
    capfd.readouterr()
    for _ in range(2):
        library.exchange(data, out, 0)
        assert (out == data[:64] + 2).all()
    assert len(list(code.glob("*.so"))) == 1
    assert capfd.readouterr().err.count("emulator: compiling") == 1
    commands = kernels.read_text()
    kernels.write_text(re.sub(r"\t[^\t]*$", "\tfalse", commands, flags=re.M))
    try:
        with pytest.raises(Failure, match="does not compile: false"):
            library.warp_exchange(data, out, 0)
    finally:
        kernels.write_text(commands)
    library.warp_exchange(data, out, 0)
    assert (out[:32] == data[np.arange(32) ^ 1]).all()


def test_a_comment_recompiles_no_kernel(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "small.cu"
    text = (KERNELS / "races.cu").read_text().replace('"test_api.h"', f'"{KERNELS}/test_api.h"')
    source.write_text(text)
    recipe = Recipe("test_small", "sm90", [source])
    build_recipe(recipe, jobs=1)
    capfd.readouterr()
    objects = {
        p
        for p in emulator.library.cache_folder().glob("objects/*small.*.o")
        if "index" not in p.name
    }
    source.write_text("// A comment.\n\n" + text)
    build_recipe(recipe, jobs=1)
    after = {
        p
        for p in emulator.library.cache_folder().glob("objects/*small.*.o")
        if "index" not in p.name
    }
    assert objects
    assert after == objects
