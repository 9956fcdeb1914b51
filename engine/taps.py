"""Taps: watch what every module puts out, by the checkpoint's module paths, without changing a bit.

Each layer ends with `return tap(self.path, out)`. Outside `watching` a tap returns its argument and does nothing else.
Values are handed over unevaluated, in execution order; watching never forces or reorders a computation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx

Watcher = Callable[[str, mx.array], None]

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


def tap(path: str, value: mx.array) -> mx.array:
    """Show `value`, the output of the module at `path`, to the watcher if there is one, and return it."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(path, value)
    return value


def is_watched() -> bool:
    """Whether somebody watches: what has no taps of its own must then be computed by what has."""
    return _watcher.get() is not None


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call `watcher(path, value)` for every module output until the block ends; the inner of two nested blocks watches."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
