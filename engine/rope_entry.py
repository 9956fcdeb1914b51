"""Where a config keeps its rotation: `rope_theta` beside `rope_scaling`, or both inside `rope_parameters`.

Guarantees: a base is a positive number; what stands in two places is the same in both. What the scaling means, and whether it
is sound, is `engine.rope`'s business.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

from engine.errors import ConfigError


def read_rope_entry(
    parameters: Mapping[str, Any] | None,
    *,
    theta: float | None = None,
    scaling: Mapping[str, Any] | None = None,
) -> tuple[float, Mapping[str, Any]]:
    """Base and scaling, wherever they stand.

    Args:
        parameters: `rope_parameters`, or None.
        theta: `rope_theta`, or None.
        scaling: `rope_scaling`, or None.

    Returns:
        The base, and a scaling for `make_rope`, empty where there is none.

    Raises:
        ConfigError: There is no base, it is no positive number, or the two places contradict each other.
    """
    inner = dict(parameters or {})
    inner_theta = inner.pop("rope_theta", None)
    twice = [
        name
        for name, outside, inside in (("rope_theta", theta, inner_theta), ("rope_scaling", scaling, inner))
        if outside is not None and inside not in (None, {}) and outside != inside
    ]
    base = inner_theta if theta is None else theta
    if twice or not _is_base(base):
        what = (
            f"rope_parameters and {twice[0]} contradict each other"
            if twice
            else "config.json has no positive rope_theta"
        )
        raise ConfigError(
            what,
            rope_theta=theta,
            rope_scaling=scaling,
            rope_parameters=parameters,
            next_step="mend config.json",
        )
    return float(base), scaling or inner


def unscaled_theta(parameters: Mapping[str, Any] | None, *, otherwise: float) -> float:
    """The base that `rope_parameters` holds, for families whose rotation is never scaled.

    Args:
        parameters: `rope_parameters`, or None.
        otherwise: The base where it holds none.

    Raises:
        ConfigError: It asks for more than a base.
    """
    entry = dict(parameters or {})
    theta = entry.pop("rope_theta", otherwise)
    if entry not in ({}, {"rope_type": "default"}) or not _is_base(theta):
        raise ConfigError(
            "rope_parameters is not as expected",
            found=dict(parameters or {}),
            expected='{"rope_theta": a positive number, "rope_type": "default"}',
            next_step="use a snapshot whose rotation is not scaled",
        )
    return float(theta)


def _is_base(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
