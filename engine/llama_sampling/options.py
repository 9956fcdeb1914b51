"""Checks of the numbers that users give to samplers.

Guarantees: an option that is not a number, or lies outside its range, is a `RequestError` when the sampler is made, long
before logits arrive. Nothing is clamped in silence.
"""

import math

from engine.errors import RequestError


def check_number(name: str, value: float, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Refuse what is not a finite number in [low, high].

    Raises:
        RequestError: It is not; the message names the option and the range.
    """
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(
            f"{name} is out of range", given=value, range=_range(low, high), next_step=f"choose another {name}"
        )


def check_whole(name: str, value: int, *, low: int) -> None:
    """Refuse what is not a whole number of at least `low`.

    Raises:
        RequestError: It is not.
    """
    if type(value) is not int or value < low:
        raise RequestError(
            f"{name} is out of range",
            given=value,
            range=f"whole numbers from {low}",
            next_step=f"choose another {name}",
        )


def _range(low: float, high: float) -> str:
    if math.isinf(low) and math.isinf(high):
        return "finite numbers"
    if math.isinf(high):
        return f"finite, at least {low:g}"
    return f"{low:g} to {high:g}"
