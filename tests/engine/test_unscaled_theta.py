"""The base in `rope_parameters`, for families that never scale their rotation."""

from typing import Any

import pytest

from engine.config_checks import unscaled_theta
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("parameters", "theta"),
    [(None, 7.0), ({}, 7.0), ({"rope_theta": 9}, 9.0), ({"rope_theta": 9.5, "rope_type": "default"}, 9.5)],
)
def test_it_is_the_base_there_or_else_the_other_one(parameters: dict[str, Any] | None, theta: float) -> None:
    assert unscaled_theta(parameters, otherwise=7.0) == theta


@pytest.mark.parametrize(
    "parameters",
    [{"rope_type": "yarn"}, {"rope_theta": 9.0, "factor": 2.0}, {"rope_theta": "9"}, {"rope_theta": True}],
)
def test_anything_more_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        unscaled_theta(parameters, otherwise=7.0)
    first, found, expected, last = str(caught.value).splitlines()
    assert (first, last) == (
        "rope_parameters is not as expected",
        "  next      use a snapshot whose rotation is not scaled",
    )
    assert found == f"  found     {parameters}"
    assert expected == '  expected  {"rope_theta": a number, "rope_type": "default"}'
