"""Experts on compiled products give mlx's bits, lose nothing in their layout, and leave to mlx what they do not cover."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.kernels.driver import Driver, Form
from engine.kernels.experts import FastExperts
from engine.kernels.level import weight_of
from engine.kernels.team import Team
from engine.kernels.verify import DTYPES, SPECIALS, KernelError, Probe, check_experts, packed
from engine.linear import Packed
from engine.moe import ExpertLinear, gathered_product

Same = Callable[[Any, Any], None]
Normal = Callable[..., mx.array]
SHAPES = 60


@pytest.fixture
def fast(driver: Callable[[Form], Driver]) -> Callable[[mx.array | Packed], FastExperts]:
    return lambda weight: FastExperts.of(weight, driver=driver, team=Team(threads=2))


def test_sixty_random_shapes_are_bit_identical(form: Form, driver: Callable[[Form], Driver]) -> None:
    random = np.random.default_rng(list(form.name.encode()))
    for seed in range(SHAPES):
        probe = Probe(
            rows=int(random.choice([1, 1, 2, 5, 9, 20])),
            inner=32 * int(random.integers(1, 5)),
            outputs=int(random.choice([int(random.integers(1, 100)), 32, 64])),
            special=list(SPECIALS)[seed % len(SPECIALS)],
            seed=seed,
        )
        check_experts(form, driver(form), probe)


def test_the_proof_catches_a_wrong_expert(driver: Callable[[Form], Driver]) -> None:
    form = Form(stored="f32")
    right = driver(form)
    first: list[int] = []

    def always_the_first(*args: int) -> int:
        first[:] = first or [args[3]]
        return right(*args[:3], first[0], *args[4:])

    with pytest.raises(KernelError, match="kernel dense-f32 does not give mlx's bits here"):
        check_experts(form, always_the_first, Probe(rows=7, inner=32, outputs=64))


@pytest.mark.parametrize("bits", [None, 3, 4])
@pytest.mark.parametrize("outputs", [33, 64])
def test_the_layout_gives_the_matrices_back(
    bits: int | None, outputs: int, fast: Any, normal: Normal, same_bits: Same
) -> None:
    weight = experts_of(bits, outputs, normal)
    made = fast(weight)
    made.product(normal(0, (1, 1, 64)), mx.array([2], mx.uint32), sorted_experts=False)
    assert made.plain is None
    restored = made.restored()
    if isinstance(weight, Packed):
        assert (np.array(weight.weight) == np.array(restored.weight)).all()
        same_bits(weight.scales, restored.scales)
        same_bits(weight.biases, restored.biases)
        assert restored.format == weight.format
    else:
        same_bits(weight, restored)


def test_what_does_not_fit_is_left_to_mlx(fast: Any, normal: Normal, same_bits: Same) -> None:
    weight = experts_of(None, 33, normal)
    made = fast(weight)
    chosen = mx.array([[0, 2], [1, 2]], mx.uint32)
    for x in (normal(0, (2, 1, 1, 64)), normal(0, (2, 2, 1, 64)), normal(0, (2, 2, 3, 64))):
        same_bits(
            gathered_product(x, weight, chosen, sorted_experts=False),
            made.product(x, chosen, sorted_experts=False),
        )


def test_dense_experts_of_sixteen_bits_are_not_replaced(normal: Normal) -> None:
    assert weight_of(ExpertLinear(weight=normal(0, (2, 3, 4), mx.bfloat16))) is None
    assert weight_of(ExpertLinear(weight=normal(0, (2, 3, 4)))) is not None


def experts_of(bits: int | None, outputs: int, normal: Normal) -> mx.array | Packed:
    if bits is None:
        return normal(1, (3, outputs, 64), DTYPES["f32"])
    probe = Probe(rows=1, inner=64, outputs=outputs)
    flat = [packed(np.random.default_rng(i), probe, bits, lambda *shape: normal(2, shape)) for i in range(3)]
    scales, biases = (mx.stack([getattr(one, name) for one in flat]) for name in ("scales", "biases"))
    return Packed(weight=mx.stack([one.weight for one in flat]), scales=scales, biases=biases, format=flat[0].format)
