"""A rotation is read from either place, never from two that differ, and never without a base."""

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.rope_entry import read_rope_entry, unscaled_theta

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("parameters", "theta", "scaling", "expected"),
    [
        (None, 7, None, (7.0, {})),
        (None, 7.0, YARN, (7.0, YARN)),
        ({"rope_theta": 7, **YARN}, None, None, (7.0, YARN)),
        ({"rope_theta": 7.0, **YARN}, 7.0, YARN, (7.0, YARN)),
        ({"rope_theta": 7.0}, None, YARN, (7.0, YARN)),
        (YARN, 7.0, None, (7.0, YARN)),
    ],
)
def test_base_and_scaling_stand_in_either_place(
    parameters: dict[str, Any] | None, theta: float | None, scaling: dict[str, Any] | None, expected: object
) -> None:
    assert read_rope_entry(parameters, theta=theta, scaling=scaling) == expected


@pytest.mark.parametrize(
    ("parameters", "theta", "scaling", "what"),
    [
        ({"rope_theta": 8.0}, 7.0, None, "rope_parameters and rope_theta contradict each other"),
        ({"rope_theta": 0}, 7.0, None, "rope_parameters and rope_theta contradict each other"),
        ({"rope_type": "default"}, 7.0, YARN, "rope_parameters and rope_scaling contradict each other"),
        (None, None, None, "config.json has no positive rope_theta"),
        (None, -1.0, None, "config.json has no positive rope_theta"),
        ({"rope_theta": True}, None, None, "config.json has no positive rope_theta"),
        ({"rope_theta": "7"}, None, None, "config.json has no positive rope_theta"),
    ],
)
def test_no_base_and_two_rotations_are_refused(
    parameters: dict[str, Any] | None, theta: float | None, scaling: dict[str, Any] | None, what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rope_entry(parameters, theta=theta, scaling=scaling)
    assert str(caught.value) == (
        f"{what}\n"
        f"  rope theta       {theta}\n"
        f"  rope scaling     {scaling}\n"
        f"  rope parameters  {parameters}\n"
        "  next             mend config.json"
    )


@pytest.mark.parametrize(
    ("parameters", "theta"),
    [(None, 7.0), ({}, 7.0), ({"rope_theta": 9}, 9.0), ({"rope_theta": 9.5, "rope_type": "default"}, 9.5)],
)
def test_it_is_the_base_there_or_else_the_other_one(parameters: dict[str, Any] | None, theta: float) -> None:
    assert unscaled_theta(parameters, otherwise=7.0) == theta


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn"},
        {"rope_theta": 9.0, "factor": 2.0},
        {"rope_theta": "9"},
        {"rope_theta": True},
        {"rope_theta": 0},
    ],
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
    assert expected == '  expected  {"rope_theta": a positive number, "rope_type": "default"}'
