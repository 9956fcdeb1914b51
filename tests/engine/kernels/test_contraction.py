"""The flavour for wheels that contract rounds product and sum once, in the same order; where mlx does not, it is refused."""

import ctypes
import ctypes.util
import platform
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels import contraction
from engine.kernels.driver import Form, compiled
from engine.kernels.layout import lay_out
from engine.kernels.matrix import run
from engine.kernels.team import Team
from engine.kernels.verify import KernelError, verify
from engine.linear import Packed
from engine.quantization import Format

Floats = npt.NDArray[np.float32]
FORMS = (Form(stored="f32"), Form(stored="f32", bits=4))


@pytest.fixture
def contracting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose wheel contracts."""
    monkeypatch.setattr(contraction, "contracts", lambda: True)


def fused(a: Any, b: Any, c: Any) -> Floats:
    """a * b + c, rounded once, by the C library."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    result: Floats = np.frompyfunc(fmaf, 3, 1)(*np.broadcast_arrays(a, b, c)).astype(np.float32)
    return result


def in_order(x: Floats, weight: Floats) -> Floats:
    total = np.zeros((len(x), len(weight)), np.float32)
    for k in range(x.shape[1]):
        total = fused(x[:, k, None], weight[None, :, k], total)
    return total


def same(expected: Floats, actual: Floats) -> bool:
    return bool((expected.view(np.uint32) == np.ascontiguousarray(actual).view(np.uint32)).all())


@pytest.mark.usefixtures("contracting")
@pytest.mark.parametrize("rows", [1, 7])
def test_a_dense_product_and_its_sum_are_rounded_once(rows: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 48), np.float32)
    weight = rng.standard_normal((70, 48), np.float32)
    laid = lay_out(mx.array(weight))
    y = run(compiled(laid.form, tmp_path), Team(threads=1), laid, x)
    assert y is not None
    assert same(in_order(x, weight), y[:, :70])


@pytest.mark.usefixtures("contracting")
def test_packed_weights_are_unpacked_with_one_rounding(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 64), np.float32)
    q, scales, biases = mx.quantize(mx.array(rng.standard_normal((40, 64), np.float32)), 32, 4)
    laid = lay_out(Packed(weight=q, scales=scales, biases=biases, format=Format(bits=4, group_size=32)))
    codes = ((np.array(q)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15).reshape(40, 64).astype(np.float32)
    weight = fused(codes, *(np.repeat(np.array(a), 32, axis=1) for a in (scales, biases)))
    y = run(compiled(laid.form, tmp_path), Team(threads=1), laid, x)
    assert y is not None
    assert same(in_order(x, weight), y[:, :40])


@pytest.mark.skipif(contraction.contracts(), reason="here mlx contracts")
@pytest.mark.usefixtures("contracting")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_wrong_flavour_is_refused(form: Form, tmp_path: Path) -> None:
    with pytest.raises(KernelError):
        verify(form, compiled(form, tmp_path))


@pytest.mark.parametrize(
    ("machine", "expected"), [("x86_64", False), ("aarch64", True), ("arm64", True), ("AMD64", False)]
)
def test_machines_by_their_wheels(machine: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert contraction.contracts() is expected
