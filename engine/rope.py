"""Rotary position embedding: default, linear, llama3, yarn, longrope and proportional scaling.

Guarantees: frequencies are computed by mlx in float32 on the default device, because a float64 computation on the host
ends one ULP off for some of them. A scaling entry is used in full or refused; none is parsed and ignored, but for the
short factors of longrope, as said at `longrope_periods`.

Source: Su et al. 2021; spec/models.md section 8 (formulas of the scaled forms); Peng et al. 2023 (yarn); Ding et al. 2024
(longrope).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.errors import ConfigError

KEYS: Final[Mapping[str, tuple[frozenset[str], frozenset[str]]]] = {  # scaling form: (required keys, optional keys)
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "attention_factor",
            }
        ),
    ),
    "longrope": (frozenset({"long_factor", "original_max_position_embeddings"}), frozenset({"short_factor"})),
    "proportional": (frozenset(), frozenset({"partial_rotary_factor", "factor"})),
}
PER_PAIR: Final = frozenset({"long_factor", "short_factor"})  # keys that hold one number a pair


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rope:
    """A rotation of the first `width` elements of each head.

    Attributes:
        width: Elements rotated.
        traditional: Pairs are neighbours (2i, 2i+1) rather than halves (i, i + width/2).
        base: The base of the geometric series of periods, where `periods` is None.
        scale: Factor on positions.
        periods: Positions a radian for each pair, float32 [width / 2], where scaling bends the series.
        gain: Factor on the rotated elements before rotation (the attention temperature of yarn and longrope).
    """

    width: int
    traditional: bool = False
    base: float | None = None
    scale: float = 1.0
    periods: mx.array | None = None
    gain: float = 1.0

    def __call__(self, x_BHLE: mx.array, offset: int | mx.array) -> mx.array:
        """Rotate [B, H, L, E] at positions offset..offset+L-1; same shape and dtype.

        The offset is one for all rows, or one a row: int32 [B].

        Numerics: angles, sines and cosines in float32, rounded to x's dtype; then two products and a sum, each rounded.
        """
        if self.gain != 1.0:
            rotated = x_BHLE[..., : self.width] * self.gain
            rest = x_BHLE[..., self.width :]
            x_BHLE = mx.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated
        return mx.fast.rope(
            x_BHLE,
            self.width,
            traditional=self.traditional,
            base=self.base,
            scale=self.scale,
            offset=offset,
            freqs=self.periods,
        )


def make_rope(
    width: int,
    *,
    base: float,
    traditional: bool = False,
    scaling: Mapping[str, Any] | None = None,
    max_positions: int | None = None,
) -> Rope:
    """Build the rotation that a config describes.

    Args:
        width: Elements of a head that rotate.
        base: `rope_theta`.
        traditional: Neighbouring pairs.
        scaling: `rope_scaling`, or None.
        max_positions: `max_position_embeddings`, on which the gain of longrope depends.

    Raises:
        ConfigError: The form is unknown, lacks a key or has one that it does not know, or its numbers do not fit together.
    """
    form, scaling = _read_scaling(scaling or {})
    if form == "linear":
        return Rope(width=width, traditional=traditional, base=base, scale=1 / scaling["factor"])
    if form == "llama3":
        return Rope(width=width, traditional=traditional, periods=llama3_periods(width, base=base, scaling=scaling))
    if form == "longrope":
        _check_longrope(width, scaling, traditional=traditional, max_positions=max_positions)
        return Rope(
            width=width,
            periods=longrope_periods(width, base=base, scaling=scaling),
            gain=longrope_gain(scaling, max_positions=max_positions or 0),
        )
    if form == "proportional":
        return Rope(
            width=width, traditional=traditional, periods=proportional_periods(width, base=base, scaling=scaling)
        )
    if form == "yarn":
        _check_attention_factor(scaling)
        return Rope(
            width=width,
            traditional=traditional,
            periods=yarn_periods(width, base=base, scaling=scaling),
            gain=yarn_gain(scaling),
        )
    return Rope(width=width, traditional=traditional, base=base)


def default_periods(width: int, *, base: float) -> mx.array:
    """base^(2i / width) for each pair i, float32 [width / 2]."""
    return base ** (mx.arange(0, width, 2, dtype=mx.float32) / width)


def llama3_periods(width: int, *, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """Long waves slowed by `factor`, short ones kept, a linear blend between; float32 [width / 2].

    Numerics: the wavelength is 2*pi*period in float32; the bounds are Python floats rounded once by the comparison.
    """
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = scaling["original_max_position_embeddings"]
    periods = default_periods(width, base=base)
    waves = 2 * mx.pi * periods
    blend = (context / waves - low) / (high - low)
    slowed = mx.where(waves > context / low, periods * factor, periods)
    between = (waves > context / high) & (waves < context / low)
    return mx.where(between, slowed / ((1 - blend) / factor + blend), slowed)


def yarn_periods(width: int, *, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """Pairs that turn often in the original context kept, those that hardly turn slowed; float32 [width / 2]."""
    factor = scaling["factor"]
    context = scaling.get("original_max_position_embeddings", 4096)

    def pair_turning(times: float) -> float:
        return width * math.log(context / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_turning(scaling.get("beta_fast", 32))), 0)
    high: float = min(math.ceil(pair_turning(scaling.get("beta_slow", 1))), width - 1)
    if high == low:
        high += 0.001  # a step rather than a division by zero
    ramp = mx.clip((mx.arange(width // 2, dtype=mx.float32) - low) / (high - low), 0, 1)
    keep = 1.0 - ramp
    kept = default_periods(width, base=base)
    slowed = factor * kept
    periods: mx.array = (slowed * kept) / (slowed * keep + kept * (1 - keep))
    return periods


def proportional_periods(width: int, *, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """The default series for the first pairs, slowed by `factor`; infinity, which is no turning, for the others.

    Args:
        width: Elements of a head; pairs are formed over all of them, whether they turn or not.
        base: `rope_theta`.
        scaling: `partial_rotary_factor`, the part of the pairs that turns (all by default), and `factor` (1 by default).

    Returns:
        float32 [width / 2].

    Raises:
        ConfigError: More pairs are to turn than there are.
    """
    turning = int(width * scaling.get("partial_rotary_factor", 1.0))
    if turning > width:
        raise ConfigError(
            "rope scaling 'proportional' turns more than the whole head",
            partial_rotary_factor=scaling["partial_rotary_factor"],
            next_step="mend rope_scaling in config.json",
        )
    turning_periods = scaling.get("factor", 1.0) * base ** (mx.arange(0, turning, 2, dtype=mx.float32) / width)
    return mx.concatenate([turning_periods, mx.full(((width - turning) // 2,), mx.inf)])


def yarn_gain(scaling: Mapping[str, Any]) -> float:
    """Factor on queries and on keys: temperature(mscale) / temperature(mscale_all_dim)."""
    factor = scaling["factor"]

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return temperature(scaling.get("mscale", 1)) / temperature(scaling.get("mscale_all_dim", 0))


def longrope_periods(width: int, *, base: float, scaling: Mapping[str, Any]) -> mx.array:
    """Every pair slowed by its own long factor, whatever the length of the text; float32 [width / 2].

    The short factors, meant for texts within the original context, are not used: the oracle never does.
    """
    factors: mx.array = mx.array(scaling["long_factor"], dtype=mx.float32)
    return factors * default_periods(width, base=base)


def longrope_gain(scaling: Mapping[str, Any], *, max_positions: int) -> float:
    """Factor on queries and on keys: sqrt(1 + ln(stretch) / ln(original context)), 1 where nothing is stretched."""
    context = scaling["original_max_position_embeddings"]
    stretch = max_positions / context
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(context))


def _check_longrope(width: int, scaling: Mapping[str, Any], *, traditional: bool, max_positions: int | None) -> None:
    wrong = {key: len(scaling[key]) for key in sorted(PER_PAIR & scaling.keys()) if len(scaling[key]) != width // 2}
    if wrong or traditional or not max_positions or scaling["original_max_position_embeddings"] <= 1:
        raise ConfigError(
            "rope scaling 'longrope' does not fit the model",
            **wrong,
            pairs=width // 2,
            traditional=traditional,
            max_position_embeddings=max_positions,
            original_max_position_embeddings=scaling["original_max_position_embeddings"],
            expected="a factor a pair, pairs of halves, max_position_embeddings, and an original context above 1",
            next_step="mend rope_scaling in config.json",
        )


def _check_attention_factor(scaling: Mapping[str, Any]) -> None:
    """A snapshot may state the gain; it must be the one that the other keys give."""
    stated = scaling.get("attention_factor")
    if stated is not None and not math.isclose(stated, yarn_gain(scaling)):
        raise ConfigError(
            "rope scaling 'yarn' states an attention factor that its other keys do not give",
            attention_factor=stated,
            computed=yarn_gain(scaling),
            next_step="mend rope_scaling in config.json",
        )


def _read_scaling(entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The form of an entry and its other keys, checked."""
    scaling = dict(entry)
    names = [str(scaling.pop(key)) for key in ("rope_type", "type") if key in scaling]
    if len(set(names)) > 1:
        raise ConfigError(
            "the two forms of rope scaling contradict each other",
            rope_type=names[0],
            type=names[1],
            next_step="mend rope_scaling in config.json",
        )
    form = names[0] if names else "default"
    _check_keys(form, scaling)
    return form, scaling


def _check_keys(form: str, scaling: Mapping[str, Any]) -> None:
    if form not in KEYS:
        raise ConfigError(
            f"rope scaling {form!r} is unknown",
            known=", ".join(KEYS),
            next_step="use a snapshot whose rope_scaling is one of these",
        )
    required, optional = KEYS[form]
    missing, unknown = required - scaling.keys(), scaling.keys() - required - optional
    if missing or unknown:
        raise ConfigError(
            f"rope scaling {form!r} is not as expected",
            missing=", ".join(sorted(missing)) or "nothing",
            unknown=", ".join(sorted(unknown)) or "nothing",
            next_step="mend rope_scaling in config.json",
        )
    for key, value in scaling.items():
        numbers = value if key in PER_PAIR and isinstance(value, list | tuple) else [None if key in PER_PAIR else value]
        if not all(_is_positive(number, or_zero=key == "mscale_all_dim") for number in numbers):
            raise ConfigError(
                f"rope scaling {form!r} has a value that is no positive number",
                key=key,
                value=value,
                next_step="mend rope_scaling in config.json",
            )


def _is_positive(value: object, *, or_zero: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value > 0 or (value == 0 and or_zero)
