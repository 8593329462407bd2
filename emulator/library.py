"""The library of one architecture's kernels that runs on the CPU.

It holds the host objects of csrc/<folder> and csrc/common as the ordinary build made them, an index
of the translated PTX that nvcc kept beside them, the emulator's runtime and its stand-in for the
CUDA runtime. Objects that the ordinary build lacks, or that are older than their sources, are
compiled here, without ptxas. A kernel's translation is compiled when it is first launched. All is
cached by content, compilers and CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from build_tools.jobs import job_count
from build_tools.plan import default_build_folder

from .errors import EmulatorBuildError
from .toolchain import (
    CSRC,
    HERE,
    HOST_FLAGS,
    INDEX_FLAGS,
    KERNEL_FLAGS,
    NVCC_FLAGS,
    PTX_TARGETS,
    ROOT,
    RUNTIME_FLAGS,
    SEPARATE_FLAGS,
    SEPARATE_INDEX_FLAGS,
    Tools,
    cache_folder,
    find_tools,
    run,
)

Say = Callable[[str], None]
T = TypeVar("T")
Job = tuple[Path, list[str]]  # a C++ file and its flags


def _say(text: str) -> None:
    print(f"emulator: {text}", file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    del text


@dataclass
class Recipe:
    """What goes into a library.

    Attributes:
        name: for messages and file names.
        arch: folder whose target nvcc compiles for, "sm80".
        kernels: .cu files.
        hosts: .cpp files.
        table: C++ function that returns the KernelTable, or None for a library without one.
        nvcc_flags: additional ones (include folders, macros).
        program: the kernels' file has a main(); the result is a program.
        separate: kernels are compiled when they are first launched, as objects of their own.
    """

    name: str
    arch: str
    kernels: list[Path]
    hosts: list[Path] = field(default_factory=list)
    table: str | None = None
    nvcc_flags: list[str] = field(default_factory=list)
    program: bool = False
    separate: bool = False


def architectures() -> list[str]:
    """Folders of csrc that have kernels and a table: ["sm80", "sm90"]."""
    return [a for a in PTX_TARGETS if (CSRC / a / "table.cpp").exists()]


def recipe_of(arch: str) -> Recipe:
    """The library of csrc/<arch> and csrc/common."""
    if arch not in PTX_TARGETS:
        raise ValueError(f"arch must be one of {', '.join(PTX_TARGETS)}, got {arch!r}")
    folder = CSRC / arch
    if not (folder / "table.cpp").exists():
        have = ", ".join(architectures()) or "none"
        raise EmulatorBuildError(f"csrc/{arch} has no table.cpp; folders with kernels: {have}")
    folders = [CSRC / "common", folder]
    return Recipe(
        arch,
        arch,
        sorted(p for f in folders for p in f.glob("*.cu")),
        sorted(p for f in folders for p in f.glob("*.cpp")),
        f"flash_cuda::{arch}::kernel_table",
        separate=True,
    )


# ---- dependencies --------------------------------------------------------------------------


def _dependencies(depfile: Path) -> list[Path]:
    text = depfile.read_text().replace("\\\n", " ")
    return [Path(p) for p in text.split(":", 1)[1].split()]


def _hash(*parts: str | bytes) -> str:
    h = hashlib.sha256()
    for p in parts:
        h.update(p.encode() if isinstance(p, str) else p)
        h.update(b"\0")
    return h.hexdigest()[:32]


_contents: dict[tuple[Path, int], str] = {}


def _content(path: Path) -> str:
    key = (path, path.stat().st_mtime_ns)
    if key not in _contents:
        _contents[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return _contents[key]


def _ordinary_object(source: Path) -> Path | None:
    """The ordinary build's object, if nothing that it was made of has changed since."""
    if ROOT not in source.parents:
        return None
    obj = (default_build_folder() / "obj" / source.relative_to(ROOT)).with_suffix(".o")
    try:
        started = json.loads(obj.with_suffix(".json").read_text())["started"]
        files = [source, *_dependencies(obj.with_suffix(".d"))]
        if obj.exists() and all(f.stat().st_mtime < started for f in files):
            return obj
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return None


def _is_for(ptx: Path, target: str) -> bool:
    """Whether there is this PTX file, compiled for sm_<target>."""
    try:
        with ptx.open() as file:
            return any(re.match(rf"\.target sm_{target}\b", file.readline()) for _ in range(20))
    except OSError:
        return False


# ---- steps ---------------------------------------------------------------------------------


class Builder:
    """One library under construction."""

    def __init__(self, recipe: Recipe, tools: Tools, say: Say, jobs: int) -> None:
        self.recipe, self.tools, self.say, self.jobs = recipe, tools, say, jobs
        self.cache = cache_folder()
        self.objects = self.cache / "objects"
        self.modules = self.cache / "modules"
        for f in (self.objects, self.modules, self.cache / "lib"):
            f.mkdir(parents=True, exist_ok=True)

    def build(self, kernels: bool) -> Path:
        started = time.monotonic()
        everything = [*self.recipe.kernels, *self.recipe.hosts]
        made = self._in_parallel([partial(self._host, p) for p in everything])
        compiled = [path for paths in made for path in paths if path.suffix == ".o"]
        ptx = [
            (source, path)
            for source, paths in zip(everything, made, strict=True)
            for path in paths
            if path.suffix == ".ptx"
        ]
        modules = self._in_parallel([partial(self._translate, s, p) for s, p in ptx])
        code = [job for module in modules for job in module[0]]
        jobs = [module[1] for module in modules] + self._runtime_jobs()
        jobs.append((self._table_source(), HOST_FLAGS))
        if not self.recipe.separate:
            jobs += code
        # The longest first, so that no core waits for a late straggler.
        jobs.sort(key=lambda j: -j[0].stat().st_size)
        done = self._in_parallel([partial(self._compile, *job) for job in jobs])
        # Kernels of other code belong to another library, though they are not in it.
        later = [self._object(*job)[0].name for job in code if self.recipe.separate]
        library = self._link([*compiled, *done], sorted(later))
        if self.recipe.separate:
            self._note_kernels(library, code, kernels)
        seconds = time.monotonic() - started
        if seconds > 2:
            self.say(f"{self.recipe.name}: {library.name} ready in {seconds:.0f} s")
        return library

    def _in_parallel(self, work: Sequence[Callable[[], T]]) -> list[T]:
        with ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(fn) for fn in work]
            try:
                for f in as_completed(futures):
                    f.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            return [f.result() for f in futures]

    # ---- host objects and PTX
    def _host(self, source: Path) -> list[Path]:
        """The host object, and for a .cu the PTX of the recipe's architecture."""
        is_cuda = source.suffix == ".cu"
        if not self.recipe.nvcc_flags and (obj := _ordinary_object(source)):
            if not is_cuda:
                return [obj]
            target = PTX_TARGETS[self.recipe.arch]
            for name in (f"{obj.stem}.compute_{target}.ptx", f"{obj.stem}.ptx"):
                if _is_for(obj.parent / name, target):
                    return [obj, obj.parent / name]
        return self._compile_cuda(source) if is_cuda else self._compile_host(source)

    def _is_current(self, stem: Path, command: str, outputs: Sequence[Path]) -> bool:
        """Whether `outputs` were made by `command` from files of the same content."""
        try:
            stamp = json.loads(stem.with_suffix(".json").read_text())
            return (
                stamp["command"] == command
                and all(o.exists() for o in outputs)
                and all(_content(Path(p)) == h for p, h in stamp["files"].items())
            )
        except (OSError, ValueError, KeyError):
            return False

    def _note(self, stem: Path, command: str, depfile: Path) -> None:
        own = [p for p in _dependencies(depfile) if not str(p).startswith("/usr/")]
        files = {str(p): _content(p) for p in own}
        stem.with_suffix(".json").write_text(json.dumps({"command": command, "files": files}))

    def _stem(self, source: Path, *more: str) -> Path:
        return self.objects / f"{source.stem}-{_hash(str(source), self.tools.key, *more)}"

    def _compile_cuda(self, source: Path) -> list[Path]:
        arch = PTX_TARGETS[self.recipe.arch]
        flags = [
            *NVCC_FLAGS,
            f"-gencode=arch=compute_{arch},code=compute_{arch}",
            f"-I{CSRC}",
            *self.recipe.nvcc_flags,
        ]
        stem = self._stem(source, *flags)
        obj, ptx, dep = (stem.with_suffix(s) for s in (".o", ".ptx", ".d"))
        if self._is_current(stem, " ".join(flags), [obj, ptx]):
            return [obj, ptx]
        keep = stem.with_suffix(".keep")
        keep.mkdir(exist_ok=True)
        started = time.monotonic()
        run(
            [
                str(self.tools.nvcc),
                f"-ccbin={self.tools.gxx[-1]}",
                *flags,
                f"--keep-dir={keep}",
                "-MD",
                "-MF",
                str(dep),
                "-c",
                str(source),
                "-o",
                str(obj),
            ],
            f"nvcc {source.name}",
        )
        kept = sorted(keep.glob("*.ptx"))
        kept[0].replace(ptx)
        for file in keep.iterdir():
            file.unlink()
        keep.rmdir()
        self._note(stem, " ".join(flags), dep)
        self.say(f"nvcc {self._shown(source)} {time.monotonic() - started:.1f} s")
        return [obj, ptx]

    def _compile_host(self, source: Path) -> list[Path]:
        flags = [*HOST_FLAGS, f"-I{CSRC}", "-isystem", str(self.tools.cuda_include)]
        stem = self._stem(source, *flags)
        obj, dep = stem.with_suffix(".o"), stem.with_suffix(".d")
        if not self._is_current(stem, " ".join(flags), [obj]):
            run(
                [
                    *self.tools.gxx,
                    *flags,
                    "-MD",
                    "-MF",
                    str(dep),
                    "-c",
                    str(source),
                    "-o",
                    str(obj),
                ],
                f"g++ {source.name}",
            )
            self._note(stem, " ".join(flags), dep)
        return [obj]

    # ---- translation
    def _translate(self, source: Path, ptx: Path) -> tuple[list[Job], Job]:
        """C++ files of a PTX file and their flags: kernels, and the index."""
        text = ptx.read_bytes()
        translator = "".join(_content(p) for p in sorted((HERE / "translate").glob("*.py")))
        module = prefix = f"{source.parent.name}_{source.stem}"
        folder = self.modules / f"{module}-{_hash(text, translator, str(ROOT))}"
        done = folder / "done.json"
        if not done.exists():
            folder.mkdir(exist_ok=True)
            unfinished = folder / f"module.{os.getpid()}.tmp"
            unfinished.write_bytes(text)
            unfinished.replace(folder / "module.ptx")
            started = time.monotonic()
            # Threads of this process would translate one after the other.
            command = [sys.executable, "-m", "emulator.translate", prefix, str(folder), str(ROOT)]
            run(command, "the translation", ROOT)
            self.say(f"translate {module} {time.monotonic() - started:.1f} s")
        flags, index_flags = KERNEL_FLAGS, INDEX_FLAGS
        if self.recipe.separate:
            flags, index_flags = flags + SEPARATE_FLAGS, index_flags + SEPARATE_INDEX_FLAGS
        jobs = [(folder / f"{stem}.cpp", flags) for stem in json.loads(done.read_text())]
        return jobs, (folder / f"{prefix}.index.cpp", index_flags)

    # ---- compilation of what is ours
    def _runtime_jobs(self) -> list[Job]:
        flags = [*RUNTIME_FLAGS, "-isystem", str(self.tools.cuda_include)]
        files = sorted((HERE / "runtime").glob("*.cpp")) + sorted((HERE / "cudart").glob("*.cpp"))
        return [(f, flags) for f in files]

    def _table_source(self) -> Path:
        cc = int("".join(c for c in PTX_TARGETS[self.recipe.arch] if c.isdigit()))
        name = "flash_cuda_emulator_library_cc"
        text = f'extern "C" {{ extern const int {name}; const int {name} = {cc}; }}\n'
        if self.recipe.table:
            space, _, name = self.recipe.table.rpartition("::")
            text = (
                '#include "common/kernel_table.h"\n'
                f"namespace {space} {{ const ::flash_cuda::KernelTable& {name}(); }}\n"
                'extern "C" __attribute__((visibility("default"))) '
                "const flash_cuda::KernelTable* flash_cuda_kernel_table() {\n"
                f"  return &{self.recipe.table}();\n}}\n"
            ) + text
        path = self.objects / f"table-{_hash(text)}.cpp"
        if not path.exists():
            path.write_text(text)
        return path

    def _object(self, source: Path, flags: list[str]) -> tuple[Path, list[str]]:
        """The object of a C++ file, and the command that makes it (less `-o` and a name)."""
        includes = [f"-I{HERE / 'runtime'}", f"-I{HERE / 'cudart'}", f"-I{CSRC}"]
        is_kernel = self.modules in source.parents
        headers = sorted((HERE / "runtime").glob("*.h")) + sorted((HERE / "cudart").glob("*.h"))
        if is_kernel:  # these see only the interface
            headers = [h for h in headers if h.name in ("thread.h", "numbers.h")]
        elif HERE not in source.parents:
            headers = [CSRC / "common" / "kernel_table.h", CSRC / "common" / "params.h"]
        key = _hash(_content(source), self.tools.key, *flags, *map(_content, headers))
        command = [*self.tools.gxx, *flags, *includes, "-c", str(source)]
        return self.objects / f"{source.stem}-{key}.o", command

    def _compile(self, source: Path, flags: list[str]) -> Path:
        obj, command = self._object(source, flags)
        if not obj.exists():
            started = time.monotonic()
            unfinished = obj.with_suffix(f".{time.monotonic_ns()}.tmp")
            run([*command, "-o", str(unfinished)], f"g++ {source.name}")
            unfinished.replace(obj)
            seconds = time.monotonic() - started
            if seconds > 1:
                self.say(f"g++ {source.name} {seconds:.1f} s")
        return obj

    def _link(self, objects: list[Path], later: list[str]) -> Path:
        names = sorted(map(str, objects))
        contents = map(_content, map(Path, names))
        key = _hash(self.tools.key, str(self.recipe.program), *contents, *later)
        library = self.cache / "lib" / f"libflash_cuda_emulated_{self.recipe.name}-{key}.so"
        if library.exists():
            return library
        script = library.with_suffix(".map")
        more = 'extern "C++" { px::*; }; ' if self.recipe.separate else ""
        script.write_text(f"{{ global: flash_cuda_*; {more}local: *; }};\n")
        unfinished = library.with_suffix(f".{time.monotonic_ns()}.tmp")
        flags = (
            []
            if self.recipe.program
            else ["-shared", "-Wl,-Bsymbolic", f"-Wl,--version-script={script}"]
        )
        run(
            [*self.tools.gxx, *flags, "-Wl,--no-undefined", "-o", str(unfinished), *names],
            "the link",
        )
        unfinished.replace(library)
        return library

    def _note_kernels(self, library: Path, code: list[Job], compile_now: bool) -> None:
        """Writes down how each kernel becomes an object, for runtime/code.cpp."""
        folder = library.with_suffix(".code")
        folder.mkdir(exist_ok=True)
        lines, commands = [], []
        for source, flags in sorted(code, key=lambda job: -job[0].stat().st_size):
            obj, command = self._object(source, flags)
            done, made = folder / f"{source.stem}.so", f"{shlex.quote(str(obj))}.$$"
            link = shlex.join([*self.tools.gxx, "-shared", str(obj), str(library)])
            text = (
                f"{{ test -f {shlex.quote(str(obj))} || {{ {shlex.join(command)} -o {made} && "
                f"mv {made} {shlex.quote(str(obj))}; }}; }} && "
                f"{link} -o {shlex.quote(str(done))}.$$ && "
                f"mv {shlex.quote(str(done))}.$$ {shlex.quote(str(done))}"
            )
            lines.append(f"{source.stem}\t{done}\t{text}\n")
            if not done.exists():
                commands.append(partial(run, ["sh", "-c", text], f"g++ {source.name}"))
        unfinished = library.with_suffix(f".{time.monotonic_ns()}.tmp")
        unfinished.write_text("".join(lines))
        unfinished.replace(library.with_suffix(".kernels"))
        if compile_now:
            self._in_parallel(commands)

    @staticmethod
    def _shown(path: Path) -> str:
        return str(path.relative_to(ROOT)) if ROOT in path.parents else path.name


def build_recipe(
    recipe: Recipe, *, progress: bool = True, jobs: int | None = None, kernels: bool = False
) -> Path:
    """Builds any library of kernels; see `Recipe`.

    Raises:
        EmulatorBuildError: a compiler or the translation failed.
    """
    say = _say if progress else _silent
    return Builder(recipe, find_tools(), say, jobs or job_count()).build(kernels)


def build(
    arch: str, *, progress: bool = True, jobs: int | None = None, kernels: bool = False
) -> Path:
    """Builds the emulated library of csrc/<arch>, or returns it from the cache.

    Args:
        arch: "sm80", "sm90", "sm100".
        progress: whether to say what is compiled, on stderr.
        jobs: compilers at a time; by default what cores and memory allow.
        kernels: compiles all kernels now, not each when it is first launched.

    Returns:
        The path of a shared library that exports `flash_cuda_kernel_table`.

    Raises:
        ValueError: for an unknown arch.
        EmulatorBuildError: no kernels there, no nvcc, or a compiler or the translation failed.
    """
    return build_recipe(recipe_of(arch), progress=progress, jobs=jobs, kernels=kernels)
