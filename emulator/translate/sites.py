"""Where each instruction of a function comes from: PTX line and C++ source lines."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

LOC = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)"
    r"(?:\s*,\s*function_name\s+[^,]+?\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?"
)
Place = tuple[int, int, int]  # file, line, column


class SiteTable:
    """Numbers the instructions of one function in order."""

    def __init__(self, files: dict[int, str], root: Path | None = None) -> None:
        self._files = files
        self._root = root
        self._callers: dict[Place, Place | None] = {}
        self._place: Place | None = None
        self._names: dict[int, str] = {}
        self.rows: list[tuple[int, str]] = [(0, "")]  # site 0: nothing executed yet

    def location(self, text: str) -> None:
        m = LOC.match(text)
        if not m:
            return
        place = (int(m.group(1)), int(m.group(2)), int(m.group(3)))
        caller = (int(m.group(4)), int(m.group(5)), int(m.group(6))) if m.group(4) else None
        if place[1] == 0:  # line 0: code without a source line, keep the last one
            return
        self._callers[place] = caller
        self._place = place

    def add(self, ptx_line: int) -> int:
        self.rows.append((ptx_line, self._frames()))
        return len(self.rows) - 1

    def _name(self, file: int) -> str:
        if file not in self._names:
            name = self._files.get(file, "?")
            if self._root:
                with contextlib.suppress(ValueError):
                    name = str(Path(name).resolve().relative_to(self._root))
            self._names[file] = name
        return self._names[file]

    def _frames(self) -> str:
        frames: list[str] = []
        place = self._place
        while place and len(frames) < 8:
            frames.append(f"{self._name(place[0])}:{place[1]}")
            place = self._callers.get(place)
        return ", inlined at ".join(frames)
