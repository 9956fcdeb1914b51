from types import SimpleNamespace
from typing import Any

import pytest

from oracles.mlx_lm.run import check_ids, vocabulary_of
from parity.case import Case
from tests.oracles.shop import make_case


@pytest.mark.parametrize(
    ("case", "outside"),
    [
        (make_case(prompt_ids=(1, 512)), "[512]"),
        (make_case(prompt_ids=(-1,)), "[-1]"),
        (make_case(forced_ids=(3, 999)), "[999]"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(case: Case, outside: Any) -> None:
    with pytest.raises(ValueError, match="lie outside the vocabulary of 512") as refused:
        check_ids(case, 512)
    assert outside in str(refused.value)


def test_ids_inside_pass() -> None:
    check_ids(make_case(prompt_ids=(0, 511), forced_ids=(0, 511)), 512)


def test_the_vocabulary_is_found_wherever_a_family_keeps_it() -> None:
    model = SimpleNamespace(args=SimpleNamespace(vocab_size=7))
    assert vocabulary_of({"vocab_size": 5, "text_config": {"vocab_size": 6}}, model) == 5
    assert vocabulary_of({"text_config": {"vocab_size": 6}}, model) == 6
    assert vocabulary_of({}, model) == 7
