"""Generated rows: the same bits everywhere, and as hard on samplers as they claim."""

import hashlib

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.errors import CaseError
from parity.logit_rows import GENERATED, generated_rows, rounded

DIGESTS = [
    ("flat", "57ab6b3f82b58bf6b960a65af1ef6c236fb62ceb5df78c5317d892f03256b22d"),
    ("masked", "d50d1606306542e6c691e2402d14484a3ff2ea9d25a8a74030157023e630c899"),
    ("one-hot", "7345890e9d4083a17818f55cdf1942284dded4f8d0fddf56dee2d2399c7bab71"),
    ("spread", "e12c0c7af7eecbd79a48919ea18e217874a0d6cb503c24ef3b41457b0b3d3352"),
    ("ties", "56acd78180511f850792b63c013ad8ec66e121ac1f8bacea75ec60ea6a375581"),
]


@pytest.mark.parametrize(("name", "digest"), DIGESTS)
def test_rows_have_the_same_bits_everywhere(name: str, digest: str) -> None:
    assert hashlib.sha256(generated_rows(name, 4).astype("<f4").tobytes()).hexdigest() == digest


def test_every_kind_of_row_is_pinned() -> None:
    assert {name for name, _ in DIGESTS} == set(GENERATED)


def test_rows_are_as_hard_as_they_claim() -> None:
    ties, flat, masked, one_hot, spread = (
        generated_rows(name, 4) for name in ("ties", "flat", "masked", "one-hot", "spread")
    )
    assert all(len(np.unique(row)) == 8 for row in ties)
    assert len(np.unique(flat)) == 1
    assert all(150 < np.isneginf(row).sum() < 230 for row in masked)
    assert [(row == 30).sum() for row in one_hot] == [1, 1, 1, 1]
    assert [int(np.isneginf(row).sum()) for row in one_hot] == [0, 0, 255, 255]
    assert spread.max() - spread.min() > 100
    assert not any(np.isnan(rows).any() for rows in (ties, flat, masked, one_hot, spread))


def test_unknown_rows_are_refused() -> None:
    with pytest.raises(CaseError) as refused:
        generated_rows("tied", 4)
    assert str(refused.value) == (
        "unknown rows 'tied'\n"
        "  known  model, flat, masked, one-hot, spread, ties\n"
        "  next   correct it in parity/cases/*.toml"
    )


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32) | st.just(-float("inf")), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_rounding_is_that_of_mlx(values: list[float]) -> None:
    rows = np.array([values], np.float32)
    (tensor,) = rounded(rows, "bf16")
    assert (tensor.dtype, tensor.shape) == ("BF16", (1, len(values)))
    assert np.array_equal(tensor.bits(), np.array(mx.array(rows).astype(mx.bfloat16).view(mx.uint16)))


def test_float32_rows_keep_their_bits() -> None:
    rows = generated_rows("spread", 2)
    assert b"".join(tensor.data for tensor in rounded(rows, "f32")) == rows.astype("<f4").tobytes()
