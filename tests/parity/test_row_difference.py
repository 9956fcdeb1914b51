import json
import math
from dataclasses import replace

import numpy as np
import pytest

from parity.row_difference import RowDifference, finite, likeliest
from parity.tensor import Tensor


def row(*values: float) -> Tensor:
    return Tensor.of(np.array([values], dtype="<f4"))


def test_rows_of_the_same_bits_are_no_distance_apart() -> None:
    same = RowDifference.of(3, row(1, 2, 3), row(1, 2, 3))

    assert (same.step, same.num_different, same.max_ulp, same.kl, same.flips) == (3, 0, 0, 0.0, 0)


def test_a_changed_row_is_described_on_both_sides() -> None:
    changed = RowDifference.of(0, row(1, 2, 3), row(1, 4, 3))

    assert changed.num_different == 1
    assert changed.kl is not None
    assert changed.kl > 0
    assert [one.token_id for one in changed.expected_top] == [2, 1, 0]
    assert [one.token_id for one in changed.actual_top] == [1, 2, 0]
    assert changed.margin == 1.0


def test_the_likeliest_are_log_probabilities() -> None:
    total = math.log(sum(math.exp(v) for v in (1, 2, 3)))

    assert [one.logprob for one in likeliest(row(1, 2, 3), 2)] == pytest.approx([3 - total, 2 - total])


def test_numbers_that_json_lacks_become_words() -> None:
    ruled_out = RowDifference.of(0, row(1, 2, 3), row(1, 2, -math.inf))

    assert ruled_out.to_json()["kl"] == "inf"
    json.dumps(ruled_out.to_json(), allow_nan=False)
    assert (finite(None), finite(0.5), finite(float("nan"))) == (None, 0.5, "nan")


def test_a_sketch_gives_the_expected_top_and_no_guess_beyond_it() -> None:
    sampled = {
        "top_ids": Tensor.of(np.array([[2, 1]], dtype="<i4")),
        "top_values": Tensor.of(np.array([[3.0, 2.0]], dtype="<f4")),
        "logsumexp": Tensor.of(np.array([3.5], dtype="<f4")),
    }

    known = RowDifference.against_sketch(0, sampled, row(1, 4, 3))

    assert (known.num_different, known.max_ulp, known.kl) == (None, None, None)
    assert [(one.token_id, one.logprob) for one in known.expected_top] == [(2, -0.5), (1, -1.5)]
    assert known.flips == 0
    assert known.margin == 1.0
    assert replace(known, expected_top=()).actual_top[0].token_id == 1
