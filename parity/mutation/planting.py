"""Planting a fault in the running engine, and taking it out again.

Guarantees: sources are not edited; whatever happens inside, the engine is as before when the block ends; a plant counts how
often it acted, so that a fault that was never reached is not taken for one that nobody saw. A plant that changes no bit is
refused.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from engine.dtype import DTypeName
from engine.model import CausalModel, open_model
from parity import engine_runner


class NoChangeError(ValueError):
    """A fault puts in what was there already, or finds nothing where it is to be put: the catalogue is at fault."""


@dataclass(slots=True)
class Acted:
    """How often a planted fault took part in a computation."""

    times: int = 0


class Plant(Protocol):
    """Something that can be planted."""

    def planted(self) -> AbstractContextManager[Acted]:
        """Plant it until the block ends; tells how often it acted."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Another value in one field of an object inside every model that is opened.

    Attributes:
        at: The object: attributes and indices from the model on, such as `blocks.0.attention`; empty for the model itself.
        field: Its field.
        change: From the right value to the wrong one.
    """

    at: str
    field: str
    change: Callable[[Any], Any]

    @contextmanager
    def planted(self) -> Iterator[Acted]:
        """Edit each model that the engine's runner opens."""
        acted, right = Acted(), open_model

        def opened(folder: Path, *, dtype: DTypeName) -> CausalModel:
            model = right(folder, dtype=dtype)
            owner = _inside(model, self.at)
            old = _field(owner, self.field, self.at)
            new = self.change(old)
            if same(old, new):
                raise NoChangeError(f"{self.at}.{self.field} is changed to what it is")
            object.__setattr__(owner, self.field, new)
            acted.times += 1
            return model

        with _put(engine_runner, "open_model", opened):
            yield acted


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """Another function, method or constant in the place of one of the engine's.

    Attributes:
        target: `module:name` or `module:Class.name`; the module that looks the name up, not the one that defines it.
        by: From the right one to the wrong one.
    """

    target: str
    by: Callable[[Any], Any]

    @contextmanager
    def planted(self) -> Iterator[Acted]:
        """Put the wrong one in; every call of it counts as acting, of a constant the planting."""
        module, _, path = self.target.partition(":")
        owner: Any = import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        if name not in vars(owner):
            raise NoChangeError(f"{self.target} does not exist")
        right = vars(owner)[name]
        wrong, acted = self.by(right), Acted()
        if not callable(right):
            if same(right, wrong):
                raise NoChangeError(f"{self.target} is changed to what it is")
            acted.times = 1
            with _put(owner, name, wrong):
                yield acted
            return

        def counted(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - stands in for any function
            acted.times += 1
            return wrong(*args, **options)

        with _put(owner, name, counted):
            yield acted


def edit(path: str, change: Callable[[Any], Any]) -> Plant:
    """`Edit` of the field that a path from the model on ends with, such as `blocks.0.attention.scale`."""
    at, _, field = path.rpartition(".")
    return Edit(at=at, field=field, change=change)


def swap(target: str, by: Callable[[Any], Any]) -> Plant:
    """`Replacement` of what `module:name` names."""
    return Replacement(target=target, by=by)


def same(old: object, new: object) -> bool:
    """Whether two values are alike to the bit; arrays by dtype, shape and words."""
    if isinstance(old, mx.array) and isinstance(new, mx.array):
        if old.dtype != new.dtype or old.shape != new.shape:
            return False
        size = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[old.dtype.size]
        return bool(np.array_equal(np.array(old.view(size)), np.array(new.view(size))))
    if isinstance(old, mx.array) or isinstance(new, mx.array):
        return False
    return old is new or bool(old == new)


def _inside(model: object, path: str) -> Any:  # noqa: ANN401 - whatever stands there
    found: Any = model
    for part in path.split(".") if path else ():
        if not part.isdecimal():
            found = _field(found, part, path)
        elif int(part) < len(found):
            found = found[int(part)]
        else:
            raise NoChangeError(f"no {part} at {path}")
    return found


def _field(owner: object, name: str, path: str) -> Any:  # noqa: ANN401 - whatever stands there
    try:
        return getattr(owner, name)
    except AttributeError:
        raise NoChangeError(f"no field {name} at {path or 'the model'}") from None


@contextmanager
def _put(owner: Any, name: str, value: object) -> Iterator[None]:  # noqa: ANN401 - a module or a class
    right = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, right)
