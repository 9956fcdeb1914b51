"""Micro benchmarks of the pieces, run by `make bench` and not collected by `make test`. They assert no time."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.quantized import pack
from engine.rope import make_rope
from parity.compare import TensorDiff
from parity.tensor import Tensor

VOCABULARY = 49_152


def random(*shape: int) -> mx.array:
    return mx.array(np.random.Generator(np.random.PCG64(0)).standard_normal(shape, dtype="f4"))


@pytest.mark.parametrize("rows", [1, 16])
def test_dense_product(benchmark: Any, rows: int) -> None:
    x, w = random(rows, 576), random(1536, 576)
    mx.eval(x, w)
    benchmark(lambda: mx.eval(x @ w.T))


def test_rope_of_one_token(benchmark: Any) -> None:
    rope, x = make_rope(64, base=1e5), random(1, 9, 1, 64)
    benchmark(lambda: mx.eval(rope(x, 100)))


def test_append_to_a_plain_cache(benchmark: Any) -> None:
    cache, _, _ = PlainCache().append(random(1, 3, 200, 64), random(1, 3, 200, 64))
    new = random(1, 3, 1, 64)
    benchmark(lambda: mx.eval(cache.append(new, new)[0].arrays))


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_attention_over_256_positions(benchmark: Any, bits: int | None) -> None:
    q, k, v = random(1, 9, 1, 64), random(1, 3, 256, 64), random(1, 3, 256, 64)
    keys, values = (k, v) if bits is None else (pack(k, bits=bits, group_size=64), pack(v, bits=bits, group_size=64))
    benchmark(lambda: mx.eval(attend(q, keys, values, scale=0.125, mask=None)))


def test_digest_of_a_row(benchmark: Any) -> None:
    row = np.random.Generator(np.random.PCG64(0)).standard_normal((1, VOCABULARY), dtype="f4")
    benchmark(lambda: Tensor.of(row).digest)


def test_comparison_of_a_row(benchmark: Any) -> None:
    row = Tensor.of(np.random.Generator(np.random.PCG64(0)).standard_normal((1, VOCABULARY), dtype="f4"))
    benchmark(lambda: TensorDiff.of(row, row))
