"""Every part of the fused step gives mlx's bits on random shapes and special values; a proof catches what is wrong."""

import ctypes
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.kernels import driver as drivers
from engine.kernels import fields as f
from engine.kernels import verify_step as verify_step_module
from engine.kernels.driver import NAN, SLOTS
from engine.kernels.step import StepCode, step_code
from engine.kernels.verify import DTYPES, SPECIALS, KernelError
from engine.kernels.verify_experts import EXPERTS, ExpertProbe
from engine.kernels.verify_rows import ACTIVATIONS, ROWS, RowProbe
from engine.kernels.verify_step import HEADS, PACKED, HeadProbe, check_part, verify_step

SHAPES = 60


def random_rows() -> list[RowProbe]:
    random = np.random.default_rng(11)
    return [
        RowProbe(
            dtype=list(DTYPES)[seed % 3],
            rows=int(random.integers(1, 9)),
            width=int(random.integers(1, 700)),
            special=list(SPECIALS)[seed % len(SPECIALS)],
            bias=bool(random.integers(2)),
            post=bool(random.integers(2)),
            activation=int(random.choice(ACTIVATIONS)),
            kind=int(random.integers(3)),
            shift=bool(random.integers(2)),
            multiplier=random.choice([None, 0.22, -3.0]),
            also=bool(random.integers(2)),
            joined=bool(random.integers(2)),
            seed=seed,
        )
        for seed in range(SHAPES)
    ]


def random_heads() -> list[HeadProbe]:
    random = np.random.default_rng(12)
    return [
        HeadProbe(
            dtype=list(DTYPES)[seed % 3],
            pieces=tuple(int(n) for n in random.choice([1, 1, 1, 2, 5, 17, 49, 66], int(random.integers(2, 7)))),
            groups=int(random.integers(1, 4)),
            group=int(random.integers(1, 9)),
            width=2 * int(random.integers(2, 40)),
            special=list(SPECIALS)[seed % len(SPECIALS)],
            bias=bool(random.integers(2)),
            norm=bool(random.integers(2)),
            rope=[None, "halves", "neighbours", "part", "gain"][int(random.integers(5))],
            window=int(random.integers(1, 40)) if random.integers(2) else None,
            ring=bool(random.integers(2)),
            cap=float(random.uniform(0.5, 60.0)) if random.integers(3) == 0 else None,
            joined=bool(random.integers(2)),
            seed=seed,
        )
        for seed in range(SHAPES)
    ]


def test_sixty_random_rows_with_special_values_are_bit_identical(step: StepCode) -> None:
    for probe in random_rows():
        check_part(step, probe)


def test_sixty_random_attentions_with_special_values_are_bit_identical(step: StepCode) -> None:
    for probe in random_heads():
        check_part(step, probe)


def random_experts() -> list[ExpertProbe]:
    random = np.random.default_rng(13)
    probes = []
    for seed in range(SHAPES):
        experts = int(random.integers(1, 300)) if seed % 2 else int(random.integers(1, 12))
        probes.append(
            ExpertProbe(
                dtype=list(DTYPES)[seed % 3],
                rows=int(random.integers(1, 30)),
                experts=experts,
                chosen=int(random.integers(1, min(experts, 10) + 1)),
                width=int(random.integers(1, 50)),
                special=list(SPECIALS)[seed % len(SPECIALS)],
                kind=int(random.integers(2)),
                normalised=bool(random.integers(2)),
                bias=bool(random.integers(2)),
                seed=seed,
            )
        )
    return probes


def test_sixty_random_choices_of_experts_with_special_values_are_bit_identical(step: StepCode) -> None:
    for probe in random_experts():
        check_part(step, probe)


def test_the_proof_itself_passes(step: StepCode) -> None:
    verify_step(step)


def test_the_flavour_for_narrow_vectors_is_bit_identical_too_and_contracts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "has_wide_vectors", lambda: False)
    narrow = step_code(tmp_path)
    for probe in (*random_heads()[::3], *PACKED):
        check_part(narrow, probe)
    for part, product in ((narrow.norm, "mulps"), (narrow.rotation, "mulps"), (narrow.packing, "mulss")):
        (assembly,) = part.inspect_asm().values()
        assert re.search(rf"\bv?{product}\b", assembly)
        assert not re.search(r"\bv?fn?m(add|sub)", assembly)


def test_the_probes_cover_what_they_promise() -> None:
    assert {probe.special for probe in ROWS} == {probe.special for probe in HEADS} == set(SPECIALS)
    assert {probe.dtype for probe in ROWS} == {probe.dtype for probe in HEADS} == set(DTYPES)
    assert {probe.activation for probe in ROWS} == set(ACTIVATIONS)
    assert {probe.kind for probe in ROWS} == {f.RMS, f.CENTRED, f.NO_NORM}
    assert {(probe.dtype, probe.special) for probe in PACKED} > {(dtype, "ordinary") for dtype in DTYPES}
    assert {probe.packed[0] for probe in PACKED if probe.packed} == {2, 3, 4, 5, 6, 8}
    assert {probe.packed[1] for probe in PACKED if probe.packed} == {32, 64, 128}
    assert {probe.rope for probe in HEADS} == {None, "halves", "neighbours", "part", "gain"}
    assert {probe.special for probe in EXPERTS} == set(SPECIALS)
    assert {probe.kind for probe in EXPERTS} == {f.PROBABLE, f.HIGHEST}
    windows = [probe for probe in HEADS if probe.window is not None]
    assert all(sum(probe.pieces) > 3 * (probe.window or 0) for probe in windows)


def changed(step: StepCode, buffer: int) -> StepCode:
    """A step after which one bit of a buffer is another one."""

    def run(parts: int, number: int, context: int, control: int) -> int:
        done: int = step.run(parts, number, context, control)
        address = ctypes.c_int64.from_address(context + 8 * buffer).value
        if address:
            ctypes.c_uint32.from_address(address).value ^= 0x10000
        return done

    return replace(step, run=run)


@pytest.mark.parametrize(
    ("buffer", "probe", "name"),
    [
        (f.NORMED, ROWS[0], "norm"),
        (f.STREAM, ROWS[0], "residual sum"),
        (f.GATED, ROWS[0], "activation"),
        (f.QUERIES, ROWS[0], "norm of a whole row"),
        (f.ATTENDED, HEADS[0], "attention"),
        (f.SHARES, EXPERTS[0], "shares of experts"),
        (f.GATHERED, EXPERTS[0], "rows of experts"),
        (f.SUMS, EXPERTS[0], "sum of experts"),
    ],
)
def test_the_proof_catches_one_bit(
    buffer: int, probe: RowProbe | HeadProbe | ExpertProbe, name: str, step: StepCode
) -> None:
    with pytest.raises(KernelError) as caught:
        check_part(changed(step, buffer), probe)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"the {name} of the fused step does not give mlx's bits here"
    assert lines[1].startswith("  probe    ")
    assert lines[2:] == [
        "  threads  1",
        "  reason   another word",
        "  instead  fast products alone",
        "  next     report it; ASSAY_KERNELS=linear computes the same without the fused step and without this message",
    ]


def marking(step: StepCode) -> StepCode:
    """A step that always marks a NaN, which would leave everything to mlx unseen."""

    def run(parts: int, number: int, context: int, control: int) -> int:
        done: int = step.run(parts, number, context, control)
        ctypes.c_int64.from_address(control + 8 * NAN).value = 1
        return done

    return replace(step, run=run)


def deaf(step: StepCode) -> StepCode:
    """A step that never marks one."""

    def run(parts: int, number: int, context: int, control: int) -> int:
        done: int = step.run(parts, number, context, control)
        for part in range(number):
            ctypes.c_int64.from_address(control + 8 * (part * SLOTS + NAN)).value = 0
        return done

    return replace(step, run=run)


def test_the_proof_catches_a_step_that_leaves_ordinary_values_to_mlx(step: StepCode) -> None:
    with pytest.raises(KernelError, match="it marks a NaN where there is none"):
        verify_step(marking(step))


def test_the_proof_catches_a_nan_or_an_infinite_value_that_is_not_left_to_mlx(step: StepCode) -> None:
    with pytest.raises(KernelError, match="the norm of the fused step"):
        verify_step(deaf(step))
    hidden_infinities = HeadProbe(dtype="f32", pieces=(9, 1), special="infinite", window=3, rope=None)
    check_part(step, hidden_infinities)
    with pytest.raises(KernelError, match="the attention of the fused step"):
        check_part(deaf(step), hidden_infinities)


@pytest.mark.parametrize("rope", ["neighbours", "gain", None])
def test_the_proof_catches_another_rotation(
    rope: str | None, step: StepCode, wrong_rotation: Callable[..., None]
) -> None:
    wrong_rotation()
    with pytest.raises(KernelError, match="the attention of the fused step"):
        check_part(step, HeadProbe(dtype="f32", pieces=(5,), rope=rope))


@pytest.fixture
def wrong_rotation(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:

    right = verify_step_module.rotation_part

    def wrong(*args: object, **kwargs: object) -> dict[int, int]:
        words = right(*args, **kwargs)  # type: ignore[arg-type]
        words[f.NEIGHBOURS] = 1 - words.get(f.NEIGHBOURS, 0)
        words[f.SCALE] ^= 0x100000
        return words

    return lambda: monkeypatch.setattr(verify_step_module, "rotation_part", wrong)


def test_float16_is_held_to_nothing_where_the_processor_lacks_it(
    step: StepCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[str] = []
    monkeypatch.setattr(verify_step_module, "check_part", lambda _, probe: held.append(probe.dtype))
    verify_step(step)
    assert "f16" in held
    held.clear()
    monkeypatch.setattr(verify_step_module, "has_half_precision", lambda: False)
    verify_step(step)
    assert set(held) == {"f32", "bf16"}
