"""Rows without probabilities are refused, in words that say where."""

import mlx.core as mx
import pytest

from engine.errors import RequestError
from engine.sampling.rows import check_rows, log_probabilities

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [[0.0, 1.0], [NAN, NAN]],
            (
                "row 1 of the logits holds NaN\n  tokens  0, 1\n  count   2 of 2\n"
                "  next    look for the first NaN in the activations of this step"
            ),
        ),
        (
            [[-INF, NAN, -INF]],
            (
                "row 0 of the logits holds NaN\n  tokens  1\n  count   1 of 3\n"
                "  next    look for the first NaN in the activations of this step"
            ),
        ),
        (
            [[0.0, INF]],
            (
                "row 0 of the logits holds +inf\n  tokens  1\n  count   1 of 2\n"
                "  next    rule tokens out with -inf; force one with a logit bias"
            ),
        ),
        (
            [[0.0, 0.0], [-INF, -INF]],
            (
                "every token of row 1 is ruled out\n  logits  -inf throughout\n"
                "  next    leave at least one token possible: check the mask or the logit bias"
            ),
        ),
    ],
)
def test_rows_without_probabilities_are_refused(rows: list[list[float]], message: str, dtype: mx.Dtype) -> None:
    with pytest.raises(RequestError) as refused:
        check_rows(mx.array(rows).astype(dtype))
    assert str(refused.value) == message


@pytest.mark.parametrize("shape", [(3,), (0, 3), (1, 0), (1, 1, 3)])
def test_what_is_no_batch_of_rows_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="logits to draw from must be rows"):
        check_rows(mx.zeros(shape))


def test_one_possible_token_is_enough() -> None:
    row = mx.array([[-INF, 2.0, -INF]])
    check_rows(row)
    assert log_probabilities(row).tolist() == [[-INF, 0.0, -INF]]
