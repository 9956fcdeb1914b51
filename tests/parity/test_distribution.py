import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.distribution import RowDistance, kl_divergence, log_softmax, top1_agreement, top2_margin, top_k_flips
from parity.tensor import Tensor

ROWS = st.lists(st.floats(-50, 50, width=32), min_size=4, max_size=4)
inf, nan = math.inf, math.nan


def row(*values: float) -> Tensor:
    return Tensor.of(np.array([values], dtype="<f4"))


@given(ROWS)
def test_a_row_is_no_distance_from_itself(values: list[float]) -> None:
    assert kl_divergence(row(*values), row(*values)) == 0
    assert top_k_flips(row(*values), row(*values), 3) == 0


@given(ROWS, ROWS)
def test_kl_is_what_its_definition_says_and_never_negative(p: list[float], q: list[float]) -> None:
    a, b = np.exp(np.array(p) - max(p)), np.exp(np.array(q) - max(q))
    a, b = a / a.sum(), b / b.sum()
    expected = float(np.sum(a * (np.log(a) - np.log(b))))

    assert kl_divergence(row(*p), row(*q)) == pytest.approx(max(expected, 0), abs=1e-6, rel=1e-6)
    assert kl_divergence(row(*p), row(*q)) >= 0


def test_kl_is_directed() -> None:
    assert kl_divergence(row(0, 3), row(0, 0)) != pytest.approx(kl_divergence(row(0, 0), row(0, 3)))


def test_kl_of_a_known_pair() -> None:
    assert kl_divergence(row(math.log(3), 0), row(0, 0)) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


@pytest.mark.parametrize(
    ("expected", "actual", "kl"),
    [
        pytest.param(row(0, -inf), row(0, 0), math.log(2), id="expected-rules-out"),
        pytest.param(row(0, 0), row(0, -inf), inf, id="actual-rules-out"),
        pytest.param(row(0, -inf), row(0, -inf), 0, id="both-rule-out"),
        pytest.param(row(0, nan), row(0, 0), nan, id="nan"),
        pytest.param(row(0, 0), row(0, inf), nan, id="infinite"),
        pytest.param(row(-inf, -inf), row(0, 0), nan, id="nothing-left"),
    ],
)
def test_kl_at_the_edges(expected: Tensor, actual: Tensor, kl: float) -> None:
    assert kl_divergence(expected, actual) == pytest.approx(kl, nan_ok=True)


def test_large_logits_do_not_overflow() -> None:
    assert np.exp(log_softmax(row(1e30, 1e30))).tolist() == pytest.approx([0.5, 0.5])


def test_flips_are_ids_that_fall_out() -> None:
    assert top_k_flips(row(4, 3, 2, 1), row(4, 3, 1, 2), 2) == 0
    assert top_k_flips(row(4, 3, 2, 1), row(4, 1, 2, 3), 2) == 1
    assert top_k_flips(row(4, 3, 2, 1), row(1, 2, 3, 4), 2) == 2


def test_margin_is_between_the_two_largest() -> None:
    assert top2_margin(row(1, 5, 3)) == 2
    assert top2_margin(row(5, 5, 3)) == 0
    assert top2_margin(row(5)) == inf
    assert top2_margin(row(inf, inf)) == 0


def test_agreement_is_a_share_of_rows() -> None:
    rows = [row(1, 2), row(2, 1)]

    assert top1_agreement(rows, rows) == 1
    assert top1_agreement(rows, [rows[0], rows[0]]) == 0.5
    with pytest.raises(ValueError, match="no rows"):
        top1_agreement([], [])
    with pytest.raises(ValueError, match="zip"):
        top1_agreement(rows, rows[:1])


def test_a_row_distance_says_whether_greedy_decoding_flips() -> None:
    same = RowDistance.of(row(1, 2, 0), row(1, 2.5, 0), k=99)
    flipped = RowDistance.of(row(1, 1.5, 0), row(2, 1.5, 0))

    assert (same.top1_agrees, same.k, same.described()) == (True, 3, "top-1 agrees, margin 1")
    assert (flipped.top1_agrees, flipped.described()) == (False, "top-1 flips from 1 to 0, margin 0.5")
