import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.sweeping.outcome import Outcome, Pair, outcome_of
from parity.tensor import Tensor


def tensor(*values: float) -> Tensor:
    return Tensor.of(np.array(values, dtype="<f4"))


def judged(expected: Tensor, actual: Tensor) -> Outcome:
    return outcome_of([Pair(label="row 0", expected=expected, actual=actual)])


def test_equal_bits_are_equal_and_the_sign_of_zero_counts() -> None:
    assert judged(tensor(1, math.nan), tensor(1, math.nan)).kind == "equal"
    assert judged(tensor(0.0, 1), tensor(-0.0, 1)).verdict == "different"


def test_a_size_is_told_in_standard_deviations() -> None:
    outcome = judged(tensor(-1, 1, 1, -1), tensor(-1, 1, 1.5, -1))

    assert outcome.kind == "logic"
    assert outcome.size == 0.5
    assert outcome.where == "row 0"


def test_a_small_difference_is_called_rounding_and_is_still_different() -> None:
    outcome = judged(tensor(-1, 1), tensor(-1, np.nextafter(np.float32(1), np.float32(2))))

    assert (outcome.verdict, outcome.kind, outcome.max_ulp) == ("different", "rounding", 1)


def test_sixteen_bits_round_more_coarsely() -> None:
    half = [Tensor.of(np.array(values, dtype="<f2")) for values in ([-1, 1], [-1, 1.001])]

    assert judged(*half).kind == "rounding"
    assert judged(*half).verdict == "different"


def test_ids_that_differ_are_never_rounding() -> None:
    ids = [Tensor.of(np.array(values, dtype="<i4")) for values in ([1, 2**30], [2, 2**30])]

    assert judged(*ids).kind == "logic"


def test_another_dtype_is_a_difference_that_says_so() -> None:
    outcome = judged(tensor(1), Tensor.of(np.array([1], dtype="<f2")))

    assert outcome.detail == "F32[1] became F16[1]"
    assert outcome.kind == "logic"


def test_a_value_that_is_no_longer_finite_is_infinitely_far() -> None:
    assert judged(tensor(1, 2), tensor(1, math.nan)).size == math.inf


def test_an_invariance_that_compares_nothing_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="compared nothing"):
        outcome_of([])


def test_a_refusal_by_not_implemented_is_a_refusal() -> None:
    def refusing() -> Iterator[Pair]:
        raise NotImplementedError("NYI")
        yield

    assert outcome_of(refusing()) == Outcome(verdict="refused", detail="NotImplementedError: NYI")


@given(
    st.sampled_from(["equal", "different", "refused"]),
    st.one_of(st.none(), st.just(math.inf), st.floats(0, 10, allow_nan=False)),
    st.one_of(st.none(), st.integers(0, 2**32)),
)
def test_an_outcome_survives_json(verdict: str, size: float | None, max_ulp: int | None) -> None:
    outcome = Outcome(verdict=verdict, where="w", detail="d", size=size, max_ulp=max_ulp)  # type: ignore[arg-type]

    assert Outcome.from_json(outcome.to_json()) == outcome
