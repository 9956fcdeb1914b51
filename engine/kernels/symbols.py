"""Names of compiled functions, no two variants of which may share one.

Numba makes a symbol of a function's name and of a number that counts the functions of one process. Two variants of one name
that two processes compiled could so have one symbol, and a third process that reads both from disk would find one of them under
both.
"""

from collections.abc import Callable
from typing import Any


def named(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function, before it is compiled, a name that says which variant it is."""

    def rename(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__qualname__ = name
        return function

    return rename
