"""Rotary positions in float64: periods of each pair under every form of scaling, and the rotation itself.

Source: Su et al. 2021; Peng et al. 2023 (yarn); Ding et al. 2024 (longrope); spec/models.md section 8 for the config's keys.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from parity.truth.rounding import Rounding
from parity.truth.weights import Array, NoTruthError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How a head rotates.

    Attributes:
        width: Leading elements that rotate.
        periods: Of each pair, [width / 2]; an angle is position / period.
        neighbours: Pairs are neighbours; halves otherwise.
        gain: Factor on what rotates.
    """

    width: int
    periods: Array
    neighbours: bool = False
    gain: float = 1.0

    @classmethod
    def of(
        cls,
        width: int,
        base: float,
        scaling: Mapping[str, Any] | None = None,
        *,
        neighbours: bool = False,
        max_positions: int | None = None,
    ) -> Self:
        """The rotation that a config describes.

        Raises:
            NoTruthError: A form that is not written here.
        """
        plain: Array = base ** (np.arange(0, width, 2) / width)
        entry = dict(scaling or {})
        form = entry.get("rope_type", entry.get("type", "default"))
        gain = 1.0
        if form == "linear":
            periods = plain * entry["factor"]
        elif form == "llama3":
            periods = _llama3(plain, entry)
        elif form == "yarn":
            periods = _yarn(plain, width, base, entry)
            gain = _temperature(entry["factor"], entry.get("mscale", 1)) / _temperature(
                entry["factor"], entry.get("mscale_all_dim", 0)
            )
        elif form in ("longrope", "su"):
            periods = plain * np.array(entry["long_factor"])
            context = entry["original_max_position_embeddings"]
            stretch = (max_positions or context) / context
            gain = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(context))
        elif form in ("default", "mrope"):
            periods = plain
        else:
            raise NoTruthError(f"rope scaling {form!r} has no float64 truth")
        return cls(width=width, periods=periods, neighbours=neighbours, gain=gain)

    def __call__(self, x_LHE: Array, rounding: Rounding) -> Array:
        """Rotate heads [L, H, E] at positions 0 to L - 1."""
        angles = rounding.angle(np.arange(x_LHE.shape[0])[:, None] / self.periods)[:, None, :]
        cos, sin = np.cos(angles), np.sin(angles)
        part, rest = x_LHE[..., : self.width] * self.gain, x_LHE[..., self.width :]
        half = self.width // 2
        a, b = (part[..., 0::2], part[..., 1::2]) if self.neighbours else (part[..., :half], part[..., half:])
        turned = (a * cos - b * sin, a * sin + b * cos)
        out = np.stack(turned, axis=-1).reshape(part.shape) if self.neighbours else np.concatenate(turned, axis=-1)
        return np.concatenate([rounding.value(out), rest], axis=-1)


def _llama3(plain: Array, entry: Mapping[str, Any]) -> Array:
    context, factor = entry["original_max_position_embeddings"], entry["factor"]
    waves = 2 * math.pi * plain
    ratio = (context / waves - entry["low_freq_factor"]) / (entry["high_freq_factor"] - entry["low_freq_factor"])
    blend = np.clip(ratio, 0.0, 1.0)
    return np.asarray(1 / ((1 - blend) / (plain * factor) + blend / plain))


def _yarn(plain: Array, width: int, base: float, entry: Mapping[str, Any]) -> Array:
    context = entry.get("original_max_position_embeddings", 4096)

    def pair(turns: float) -> float:
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair(entry.get("beta_fast", 32))), 0)
    high: float = min(math.ceil(pair(entry.get("beta_slow", 1))), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / ((high - low) or 0.001), 0, 1)
    return np.asarray(1 / ((1 - ramp) / plain + ramp / (plain * entry["factor"])))


def _temperature(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
