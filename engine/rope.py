"""Rotary position embedding: default, linear, llama3 and yarn scaling.

Guarantees: frequencies are computed by mlx in float32 on the default device, because a float64 computation on the host
ends one ULP off for some of them. A scaling entry is used in full or refused; none is parsed and ignored.

Source: Su et al. 2021; spec/models.md section 8 (formulas of the scaled forms); Peng et al. 2023 (yarn).
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
        frozenset({"original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rope:
    """A rotation of the first `width` elements of each head.

    Attributes:
        width: Elements rotated.
        traditional: Pairs are neighbours (2i, 2i+1) rather than halves (i, i + width/2).
        base: The base of the geometric series of periods, where `periods` is None.
        scale: Factor on positions.
        periods: Positions a radian for each pair, float32 [width / 2], where scaling bends the series.
        gain: Factor on the rotated elements before rotation (yarn's attention temperature).
    """

    width: int
    traditional: bool = False
    base: float | None = None
    scale: float = 1.0
    periods: mx.array | None = None
    gain: float = 1.0

    def __call__(self, x_BHLE: mx.array, offset: int) -> mx.array:
        """Rotate [B, H, L, E] at positions offset..offset+L-1; same shape and dtype.

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


def make_rope(width: int, *, base: float, traditional: bool = False, scaling: Mapping[str, Any] | None = None) -> Rope:
    """Build the rotation that a config describes.

    Args:
        width: Elements of a head that rotate.
        base: `rope_theta`.
        traditional: Neighbouring pairs.
        scaling: `rope_scaling`, or None.

    Raises:
        ConfigError: The form is unknown, lacks a key or has one that it does not know.
    """
    form, scaling = _read_scaling(scaling or {})
    if form == "linear":
        return Rope(width=width, traditional=traditional, base=base, scale=1 / scaling["factor"])
    if form == "llama3":
        return Rope(width=width, traditional=traditional, periods=llama3_periods(width, base=base, scaling=scaling))
    if form == "yarn":
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


def yarn_gain(scaling: Mapping[str, Any]) -> float:
    """Factor on queries and on keys: temperature(mscale) / temperature(mscale_all_dim)."""
    factor = scaling["factor"]

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return temperature(scaling.get("mscale", 1)) / temperature(scaling.get("mscale_all_dim", 0))


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
        zero_is_fine = key == "mscale_all_dim"
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value < 0
            or (value == 0 and not zero_is_fine)
        ):
            raise ConfigError(
                f"rope scaling {form!r} has a value that is no positive number",
                key=key,
                value=value,
                next_step="mend rope_scaling in config.json",
            )
