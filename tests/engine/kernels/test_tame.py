"""The processor's conversion to bfloat16 is used exactly where no subnormal number can turn up, and that matters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from numba import njit

from engine.kernels import driver as drivers
from engine.kernels import layout
from engine.kernels.driver import Driver, Form, compiled, converts, fuses
from engine.kernels.layout import lay_out
from engine.kernels.tame import LARGEST_SCALE, SMALLEST_INPUT, SMALLEST_SCALE, TAME, are_short, are_tame, is_tame
from engine.kernels.verify import KernelError, Probe, check_probe, packed, verify

FORM = Form(stored="bf16", bits=4)
WIDE: Final = Form(stored="f32", bits=4)
needs_fusing = pytest.mark.skipif(not fuses(WIDE), reason="this processor has no fused operation")
needs_conversion = pytest.mark.skipif(not converts(FORM), reason="this processor has no conversion to bfloat16")


def test_scales_are_tame_when_zero_or_large_enough() -> None:
    ok = np.array([0.0, -0.0, SMALLEST_SCALE, -SMALLEST_SCALE, 1e30, np.inf, np.nan], np.float32)
    assert are_tame(ok)
    for at in range(len(ok)):
        for sign in (1, -1):
            bad = ok.copy()
            bad[at] = sign * np.nextafter(SMALLEST_SCALE, np.float32(0))
            assert not are_tame(bad)


def test_a_row_is_tame_when_every_element_is() -> None:
    ok = np.tile(np.array([0.0, -0.0, SMALLEST_INPUT, -SMALLEST_INPUT, 1e30, np.inf, np.nan], np.float32), 9)
    assert is_tame(ok.ctypes.data, ok.size)
    for at in range(len(ok)):
        bad = ok.copy()
        bad[at] = -np.nextafter(SMALLEST_INPUT, np.float32(0))
        assert not is_tame(bad.ctypes.data, bad.size)
        assert is_tame(bad.ctypes.data, at)


@needs_conversion
def test_a_matrix_is_marked_by_its_scales_and_biases(normal: Callable[..., mx.array]) -> None:
    def shift(scale: float) -> int:
        weight = packed(
            np.random.default_rng(1),
            Probe(rows=1, inner=64, outputs=40),
            4,
            lambda *shape: (mx.sign(normal(1, shape)) * scale).astype(mx.bfloat16),
        )
        return lay_out(weight).shift

    assert shift(2.0**-40) == TAME
    assert shift(2.0**-41) == 0


@needs_conversion
@pytest.mark.parametrize("where", ["inputs", "scales"])
def test_what_is_not_tame_is_not_converted(where: str, driver: Callable[[Form], Driver]) -> None:
    random = np.random.default_rng(5)
    for small in range(-126, -20, 7):
        weight = packed(
            random,
            Probe(rows=1, inner=64, outputs=40),
            4,
            lambda *shape: mx.array(
                random.standard_normal(shape) * 2.0 ** (small if where == "scales" else 0)  # noqa: B023
            ).astype(mx.bfloat16),
        )
        x = random.standard_normal((5, 64)) * 2.0 ** (small if where == "inputs" else -100 - small)
        fast = layout_product(weight, mx.array(x).astype(mx.bfloat16), driver)
        expected = weight.product(mx.array(x).astype(mx.bfloat16))
        assert (np.array(fast.view(mx.uint16)) == np.array(expected.view(mx.uint16))).all()


def layout_product(weight: Any, x: mx.array, driver: Callable[[Form], Driver]) -> mx.array:
    from engine.kernels.matrix import FastMatrix  # noqa: PLC0415 - here alone
    from engine.kernels.team import Team  # noqa: PLC0415 - here alone

    return FastMatrix(driver=driver, team=Team(threads=1), plain=weight).product(x)


@needs_conversion
def test_the_proof_catches_a_matrix_that_is_taken_for_tame(
    driver: Callable[[Form], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "are_tame", lambda _: True)
    with pytest.raises(KernelError, match="faint weight values"):
        verify(FORM, driver(FORM))


@needs_conversion
def test_the_proof_catches_rows_that_are_taken_for_tame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "is_tame", njit(lambda _x, count: count >= 0))
    wrong = compiled(FORM, tmp_path)
    check_probe(FORM, wrong, Probe(rows=2, inner=64, outputs=32))
    with pytest.raises(KernelError, match="faint input values"):
        verify(FORM, wrong)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_scales_are_short_exactly_when_their_products_are(bits: int) -> None:
    random = np.random.default_rng(bits)
    for scale in random.integers(0, 2**32, 400, dtype=np.uint32) & ~np.uint32((1 << bits) - 1):
        short = np.array([scale]).view(np.float32)
        if not abs(short[0]) <= LARGEST_SCALE:  # NaN and infinities too
            assert not are_short(short, bits)
            continue
        assert are_short(short, bits)
        codes = np.arange(1 << bits, dtype=np.float32)
        assert ((short * codes).astype(np.float64) == short.astype(np.float64) * codes).all()
        assert not are_short((np.array([scale]) | np.uint32(1 << (bits - 1))).view(np.float32), bits)


@needs_fusing
def test_the_proof_catches_scales_that_are_taken_for_short(
    driver: Callable[[Form], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "are_short", lambda _scales, _bits: True)
    with pytest.raises(KernelError, match="packed-4-f32"):
        verify(WIDE, driver(WIDE))


@needs_fusing
def test_the_proof_tries_scales_that_are_short(
    driver: Callable[[Form], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(layout, "are_short", lambda scales, bits: found.append(are_short(scales, bits)) or found[-1])
    verify(WIDE, driver(WIDE))
    assert set(found) == {True, False}
