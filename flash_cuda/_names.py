"""Errors that name arguments as the caller does."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def calls_them(**theirs: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that calls arguments of the ops by other names: ``q="query"``."""
    ours = re.compile(rf"\b({'|'.join(theirs)})\b")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError, NotImplementedError) as error:
                error.args = (ours.sub(lambda name: theirs[name[0]], str(error)),)
                raise

        return call

    return decorate
