"""Every kernel gives mlx's bits on random shapes and special values; a proof catches what is wrong and is kept when right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.kernels import float_tile
from engine.kernels import verify as verifying
from engine.kernels.driver import SMALL_FLOATS, Driver, Form, compiled
from engine.kernels.vector_code import VectorCode
from engine.kernels.verify import ODD, PROBES, SPECIALS, KernelError, Probe, check_probe, once, proven, verify

SHAPES = 60


def random_probes(form: Form) -> list[Probe]:
    random = np.random.default_rng(list(form.name.encode()))
    probes = []
    for seed in range(SHAPES):
        group = int(random.choice([32, 64, 128]))
        unit = 32 if form.mode in SMALL_FLOATS else group
        inner = int(random.integers(1, 300)) if form.bits is None else unit * int(random.integers(1, 4))
        rows = int(random.choice([1, 1, 2, 3, 5, 6, 7, 8, 12, 17, 48, 50]))
        special = list(SPECIALS)[seed % len(SPECIALS)]
        outputs = int(random.choice([int(random.integers(1, 200)), 32, 64, 128]))
        probes.append(
            Probe(rows=rows, inner=inner, outputs=outputs, group=group, special=special, bias=seed % 3 == 0, seed=seed)
        )
    return probes


def test_sixty_random_shapes_with_special_values_are_bit_identical(
    form: Form, driver: Callable[[Form], Driver]
) -> None:
    for probe in random_probes(form):
        check_probe(form, driver(form), probe)


def test_the_proof_itself_passes(form: Form, driver: Callable[[Form], Driver]) -> None:
    verify(form, driver(form))


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (5, 0), (8, 66), (48, 63)])
def test_the_proof_catches_one_bit_of_one_sum(
    place: tuple[int, int], driver: Callable[[Form], Driver], flipping: Callable[..., Driver]
) -> None:
    form = Form(stored="f32", bits=4)
    wide = any(probe.rows > place[0] and probe.outputs > place[1] for probe in PROBES)
    assert wide
    with pytest.raises(KernelError, match="kernel packed-4-f32 does not give mlx's bits here"):
        verify(form, flipping(driver(form), row=place[0], column=place[1]))


def test_a_mismatch_names_the_probe_and_the_first_word(
    driver: Callable[[Form], Driver], flipping: Callable[..., Driver]
) -> None:
    form, probe = Form(stored="f32"), Probe(rows=2, inner=3, outputs=4)
    with pytest.raises(KernelError) as caught:
        check_probe(form, flipping(driver(form), row=1, column=2), probe)
    lines = str(caught.value).splitlines()
    assert lines[0] == "kernel dense-f32 does not give mlx's bits here"
    assert lines[1] == "  probe    2 x 3 by 4, ordinary values"
    expected, actual = (int(word, 16) for word in lines[2].replace(",", "").split() if word.startswith("0x"))
    assert lines[2].startswith("  first    [1, 2]: expected 0x")
    assert expected ^ actual == 1
    assert lines[3:] == [
        "  count    1 of 8 elements",
        "  instead  plain mlx operations",
        "  next     report it; ASSAY_KERNELS=plain computes the same without kernels and without this message",
    ]


def test_the_proof_catches_nan_that_is_not_handed_to_mlx(
    driver: Callable[[Form], Driver], deaf_to_nan: Callable[[Driver], Driver]
) -> None:
    form = Form(stored="f32", bits=3)
    with pytest.raises(KernelError, match="nan values"):
        verify(form, deaf_to_nan(driver(form)))


def test_the_proof_catches_weights_of_another_width(driver: Callable[[Form], Driver]) -> None:
    with pytest.raises(KernelError):
        verify(Form(stored="bf16", bits=2), driver(Form(stored="f32", bits=2)))  # without the roundings of bfloat16


@pytest.mark.parametrize("lost", ["sign", "half"])
def test_the_proof_catches_small_floats_that_are_read_wrongly(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, right = Form(stored="f32", bits=4, mode="mxfp4"), float_tile.element

    def wrong(code: VectorCode, packed: Any, bits: int) -> Any:
        b = code.builder
        if lost == "sign":
            return right(code, b.and_(packed, code.word(7)), bits)
        is_half = b.icmp_unsigned("==", b.and_(packed, code.word(7)), code.word(1))  # the only subnormal of e2m1
        return b.select(is_half, code.zero, right(code, packed, bits))

    monkeypatch.setattr(float_tile, "element", wrong)
    with pytest.raises(KernelError, match="kernel mxfp4-f32 does not give mlx's bits here"):
        verify(form, compiled.__wrapped__(form, tmp_path))


def test_the_probes_have_the_borders_that_they_promise() -> None:
    assert {probe.special for probe in PROBES} == set(SPECIALS)
    assert {1, 2, 8, 9, 49} <= {probe.rows for probe in PROBES}
    assert {probe.group for probe in PROBES} == {32, 64, 128}
    assert any(probe.inner % 4 for probe in ODD)


def test_a_proof_is_done_once(tmp_path: Path) -> None:
    done: list[int] = []
    for _ in range(3):
        once(tmp_path, "thing", lambda: done.append(1))
    assert done == [1]


def test_a_failed_proof_leaves_no_record(
    tmp_path: Path, driver: Callable[[Form], Driver], flipping: Callable[..., Driver]
) -> None:
    form = Form(stored="f32")
    for _ in range(2):
        with pytest.raises(KernelError):
            proven(form, flipping(driver(form)), tmp_path)
    proven(form, driver(form), tmp_path)
    proven(form, flipping(driver(form)), tmp_path)  # what is on record is believed: same sources, same machine


def test_a_proof_under_another_identity_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    once(tmp_path, "thing", lambda: done.append(1))
    monkeypatch.setattr(verifying, "identity", lambda: "0" * 64)
    once(tmp_path, "thing", lambda: done.append(2))
    assert done == [1, 2]


def test_a_damaged_record_proves_nothing(tmp_path: Path) -> None:
    done: list[int] = []
    once(tmp_path, "thing", lambda: done.append(1))
    (record,) = (tmp_path / "proofs").rglob("thing.json")
    record.write_text(record.read_text()[:-5])
    once(tmp_path, "thing", lambda: done.append(2))
    assert done == [1, 2]
