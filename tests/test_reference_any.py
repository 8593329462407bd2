"""Any legal combination of features on the engine, shapes drawn and shrunk by hypothesis."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from .check import Backend, check
from .fuzz import draw_case

DTYPES = ("float32", "float64", "bfloat16", "float16", "float8_e4m3fn")


@given(st.data())
@settings(max_examples=250, deadline=None, derandomize=True)
def test_any_legal_call(data: st.DataObject) -> None:
    case = draw_case(
        lambda choices: data.draw(st.sampled_from(list(choices))),
        DTYPES,
        small=True,
        seed=data.draw(st.integers(0, 1000)),
    )
    check(case, Backend("cpu"))
