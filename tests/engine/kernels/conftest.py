"""What the tests of the kernels share: compiled products, kept between runs like a user's, and drivers that are wrong."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from engine.kernels.driver import NAN, SMALL_FLOATS, Driver, Form, compiled
from engine.kernels.fields import NORMED
from engine.kernels.level import Kernels
from engine.kernels.step import StepCode, step_code
from parity.home import assay_home

FORMS = (
    *(Form(stored=stored, bits=bits) for stored in ("f32", "bf16", "f16") for bits in (None, 2, 3, 4, 5, 6, 8)),
    *(Form(stored=s, bits=bits, mode=mode) for s in ("f32", "bf16", "f16") for mode, (bits, _) in SMALL_FLOATS.items()),
)

ROWS, Y, WIDTH, CONTROL = 1, 7, 8, 10  # arguments of a driver


@pytest.fixture(scope="session")
def driver() -> Callable[[Form], Driver]:
    """The compiled product of a form."""
    return lambda form: compiled(form, assay_home() / "kernels")


@pytest.fixture(scope="session")
def step() -> StepCode:
    """The compiled step."""
    return step_code(assay_home() / "kernels")


@pytest.fixture(scope="session")
def wrong_step(step: StepCode) -> Callable[..., StepCode]:
    """A step that flips the lowest bit of one float of what a call leaves in NORMED: `wrong_step(from_call=, at=)`."""

    def make(*, from_call: int = 0, at: int = 0) -> StepCode:
        calls = count()

        def run(parts: int, number: int, context: int, control: int) -> int:
            done: int = step.run(parts, number, context, control)
            if next(calls) >= from_call:
                buffer = ctypes.c_int64.from_address(context + 8 * NORMED).value
                if buffer:
                    ctypes.c_uint32.from_address(buffer + 4 * at).value ^= 0x10000
            return done

        return replace(step, run=run)

    return make


@pytest.fixture(params=FORMS, ids=lambda form: form.name)
def form(request: pytest.FixtureRequest) -> Form:
    """Every form in turn."""
    chosen: Form = request.param
    return chosen


@pytest.fixture(scope="session")
def flipping() -> Callable[..., Driver]:
    """A driver that flips the lowest bit of one sum: `flipping(driver, row=, column=, from_call=)`."""

    def make(right: Driver, *, row: int = 0, column: int = 0, from_call: int = 0) -> Driver:
        calls = count()

        def run(*args: int) -> int:
            done = right(*args)
            if next(calls) >= from_call and row < args[ROWS]:
                at = args[Y] + 4 * (row * args[WIDTH] + column)
                ctypes.c_uint32.from_address(at).value ^= 1
            return done

        return run

    return make


@pytest.fixture(scope="session")
def deaf_to_nan() -> Callable[[Driver], Driver]:
    """A driver that never says that a sum is NaN."""

    def make(right: Driver) -> Driver:
        def run(*args: int) -> int:
            done = right(*args)
            ctypes.c_int64.from_address(args[CONTROL] + 8 * NAN).value = 0
            return done

        return run

    return make


@pytest.fixture
def make_kernels(tmp_path: Path, driver: Callable[[Form], Driver], step: StepCode) -> Callable[..., Kernels]:
    """Kernels in an empty folder: `make_kernels(said, code)`, messages into `said`, on a step of one's own if given."""

    def kernels(said: list[str] | None = None, code: StepCode | None = None) -> Kernels:
        return Kernels(
            folder=tmp_path,
            say=[].append if said is None else said.append,
            threads=2,
            compile=lambda form, _: driver(form),
            compile_step=lambda _: code or step,
        )

    return kernels
