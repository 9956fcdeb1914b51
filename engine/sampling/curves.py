"""Curves in place of a temperature: the HLG tone curve, its literal transfer functions, a shaper, and transfer curves by knots.

They map log-probabilities to logits for the draw. No oracle computes them bit for bit (tier L3): what binds is the formulas of
spec/samplers.md section 2, which the tests compare with its float64 numbers.

Guarantees: pure numpy in float64 over the last axis; a tone curve, and knots that rise, keep the order of tokens.
Source: spec/samplers.md section 2; ITU-R BT.2100 for HLG; Fritsch and Carlson: Monotone piecewise cubic interpolation (1980).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from engine.errors import RequestError

Doubles = npt.NDArray[np.float64]
Pivot = Literal["top", "entropy", "median"]

A: Final = 0.17883277
B: Final = 1 - 4 * A
C: Final = 0.5 - A * math.log(4 * A)
KNEE: Final = 1 / 12
LEAST: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ToneCurve:
    """Linear with slope `gain` around a pivot, logarithmic above and below it.

    Attributes:
        gain: Slope in the middle; that of temperature 1 / gain.
        width: Half the width of the middle, in nats; infinite switches both ends off.
        shoulder: Softness of the upper end in nats; 0 switches it off.
        toe: Softness of the lower end; 0 switches it off.
        pivot: Which log-probability the middle lies around: the largest, the mean (minus entropy), or the one at which the
            tokens from the top hold half.
        offset: Nats that the middle lies below the pivot.
    """

    gain: float = 1.0
    width: float = 4.0
    shoulder: float = 4.0
    toe: float = 6.0
    pivot: Pivot = "top"
    offset: float = 6.0

    def __call__(self, logprobs: npt.ArrayLike) -> Doubles:
        """Logits of log-probabilities [..., V], float64, same shape."""
        lp = np.asarray(logprobs, np.float64)
        upper, lower = self.shoulder > 0 and math.isfinite(self.width), self.toe > 0 and math.isfinite(self.width)
        if not upper and not lower:
            return np.multiply(self.gain, lp)
        z = lp - (pivot_of(lp, self.pivot) - self.offset)
        g = self.gain * z
        if upper:
            over = np.log(np.maximum(1 + (z - self.width) / self.shoulder, LEAST))
            g = np.where(z >= self.width, self.gain * (self.width + self.shoulder * over), g)
        if lower:
            under = np.log(np.maximum(1 + (-z - self.width) / self.toe, LEAST))
            g = np.where(z < -self.width, -self.gain * (self.width + self.toe * under), g)
        return g


def pivot_of(lp: Doubles, pivot: Pivot) -> Doubles:
    """The log-probability that a tone curve lies around, [..., 1]."""
    if pivot == "top":
        return _top(lp)
    p = np.exp(lp)
    if pivot == "entropy":
        mean: Doubles = np.sum(p * np.where(np.isneginf(lp), 0, lp), axis=-1, keepdims=True)
        return mean
    downward = -np.sort(-lp, axis=-1)
    first = np.argmax(np.cumsum(np.exp(downward), axis=-1) >= 0.5, axis=-1)
    median: Doubles = np.take_along_axis(downward, np.expand_dims(first, -1), axis=-1)
    return median


def system_gamma(peak: float = 1000.0) -> float:
    """HLG's exponent for a display of `peak` candela a square metre."""
    return 1.2 + 0.42 * math.log10(peak / 1000)


def oetf(logprobs: npt.ArrayLike) -> Doubles:
    """Logits ln V, V being HLG's signal for a light of p / p_max."""
    result: Doubles = np.log(np.maximum(_signal(_relative(logprobs)), LEAST))
    return result


def eotf(logprobs: npt.ArrayLike, *, peak: float = 1000.0) -> Doubles:
    """Logits gamma ln E, E being HLG's light for a signal of p / p_max."""
    lp = np.asarray(logprobs, np.float64)
    relative = _relative(lp)
    with np.errstate(divide="ignore"):
        light = np.where(
            relative < 0.5,
            2 * (lp - _top(lp)) - math.log(3),
            np.log((np.exp((np.maximum(relative, 0.5) - C) / A) + B) / 12),
        )
    return system_gamma(peak) * light


def pipeline(logprobs: npt.ArrayLike, *, scale: float = 5.0, peak: float = 1000.0) -> Doubles:
    """Logits scale * V ** gamma, V being HLG's signal for a light of p / p_max."""
    signal = np.maximum(_signal(_relative(logprobs)), LEAST)
    result: Doubles = scale * signal ** system_gamma(peak)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaper:
    """A film-like curve over a window of log-probabilities: cubic toe, curved middle, logarithmic shoulder, display gamma.

    Attributes:
        peak: Of the display, candela a square metre.
        window: Nats below the largest log-probability that the curve spans.
        middle: (x, y) where the shoulder starts.
        foot: (x, y) where the toe ends.
        power: Exponent of the bend between foot and middle.
        slope: At the middle.
        shoulder: Softness of the shoulder.
        target_gap: Logits that `reference_gap` nats are stretched to.
        reference_gap: See above.
        scale: Factor of the output, instead of the one that follows from the gaps.
    """

    peak: float = 1200.0
    window: float = 10.0
    middle: tuple[float, float] = (0.55, 0.5)
    foot: tuple[float, float] = (0.2, 0.18)
    power: float = 2.0
    slope: float = 0.7
    shoulder: float = 0.35
    target_gap: float = 15.0
    reference_gap: float = 4.0
    scale: float | None = None

    @property
    def bend(self) -> float:
        """Coefficient of the bend, so that the curve meets the foot."""
        dx = self.middle[0] - self.foot[0]
        return (self.middle[1] - self.slope * dx - self.foot[1]) / math.pow(dx, self.power)

    @property
    def foot_slope(self) -> float:
        """Slope at the foot."""
        return self.slope + self.bend * self.power * math.pow(self.middle[0] - self.foot[0], self.power - 1)

    @property
    def toe(self) -> tuple[float, float]:
        """Coefficients of x**3 and x**2 below the foot: value and slope meet there."""
        x, y = self.foot
        determinant = -(x**4)
        return (2 * x * y - x * x * self.foot_slope) / determinant, (
            x**3 * self.foot_slope - 3 * x * x * y
        ) / determinant

    @property
    def output_scale(self) -> float:
        """Factor from light to logits."""
        if self.scale is not None:
            return self.scale
        reference = float(self._light(np.array(1 - self.reference_gap / self.window)))
        return self.target_gap / max(1e-6, 1 - reference)

    def __call__(self, logprobs: npt.ArrayLike) -> Doubles:
        """Logits of log-probabilities [..., V], float64, same shape."""
        lp = np.asarray(logprobs, np.float64)
        x = np.clip((lp - _top(lp)) / self.window + 1, 0, 1)
        return self._light(x) * self.output_scale

    def curve(self, x: Doubles) -> Doubles:
        """The curve before gamma, for x in [0, 1]."""
        (xm, ym), (xf, _), (cubic, square) = self.middle, self.foot, self.toe
        below = np.maximum(xm - x, 0)
        bent = ym - self.slope * below - self.bend * below**self.power
        high = ym + self.shoulder * np.log(np.maximum(1 + self.slope / self.shoulder * (x - xm), LEAST))
        y: Doubles = np.maximum(np.where(x >= xm, high, np.where(x >= xf, bent, cubic * x**3 + square * x**2)), 0)
        return y

    def _light(self, x: Doubles) -> Doubles:
        light: Doubles = np.maximum(self.curve(x) / self.curve(np.array(1.0)), LEAST) ** system_gamma(self.peak)
        return light


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCurve:
    """A smooth curve through points (input, output), both in percent of probability, applied to log-probabilities.

    Attributes:
        points: At least two, with different inputs.
    """

    points: Sequence[tuple[float, float]]

    def __post_init__(self) -> None:
        """Refuse points that make no curve.

        Raises:
            RequestError: There are fewer than two, or two share an input.
        """
        if len({x for x, _ in self.points}) != len(self.points) or len(self.points) < 2:
            raise RequestError(
                "these points make no curve",
                points=", ".join(f"({x}, {y})" for x, y in self.points) or "none",
                next_step="give two or more points with different inputs, in percent",
            )

    @property
    def knots(self) -> tuple[Doubles, Doubles]:
        """Logarithms of inputs and outputs, by input."""
        pairs = np.array(sorted(self.points), np.float64)
        x, y = np.log(np.maximum(pairs, LEAST) / 100).T
        return x, y

    @property
    def tangents(self) -> Doubles:
        """Slopes at the knots: weighted harmonic means of the secants beside them, 0 where these differ in sign."""
        x, y = self.knots
        steps = np.diff(x)
        secants = np.diff(y) / steps
        slopes = np.concatenate([secants[:1], np.zeros(len(x) - 2), secants[-1:]])
        for i in range(1, len(x) - 1):
            before, after = secants[i - 1], secants[i]
            if before * after > 0:
                left, right = 2 * steps[i] + steps[i - 1], steps[i] + 2 * steps[i - 1]
                slopes[i] = (left + right) / (left / before + right / after)
        return slopes

    @property
    def rises(self) -> bool:
        """Whether the knots keep the order of tokens."""
        x, y = self.knots
        return bool((np.diff(y) / np.diff(x) >= -1e-12).all())

    def __call__(self, logprobs: npt.ArrayLike) -> Doubles:
        """Logits of log-probabilities [..., V], float64, same shape; lines continue the curve beyond the outer knots."""
        lp = np.asarray(logprobs, np.float64)
        (x, y), slopes = self.knots, self.tangents
        i = np.clip(np.searchsorted(x, lp, side="right") - 1, 0, len(x) - 2)
        h = x[i + 1] - x[i]
        with np.errstate(invalid="ignore"):  # -inf lies below the first knot and is replaced
            t = (lp - x[i]) / h
            inside = _hermite(t, y[i], y[i + 1], h * slopes[i], h * slopes[i + 1])
        below = y[0] + max(float(slopes[0]), 1.0) * (lp - x[0])  # at least 1: the far tail stays down
        above = y[-1] + slopes[-1] * (lp - x[-1])
        return np.where(lp < x[0], below, np.where(lp >= x[-1], above, inside))


def _hermite(t: Doubles, y0: Doubles, y1: Doubles, m0: Doubles, m1: Doubles) -> Doubles:
    """Cubic with values y0, y1 and slopes m0, m1 at t = 0, 1."""
    bend = 3 * (y1 - y0) - 2 * m0 - m1
    twist = 2 * (y0 - y1) + m0 + m1
    return y0 + t * (m0 + t * (bend + t * twist))


def _relative(logprobs: npt.ArrayLike) -> Doubles:
    """p / p_max."""
    lp = np.asarray(logprobs, np.float64)
    relative: Doubles = np.exp(lp - _top(lp))
    return relative


def _signal(light: Doubles) -> Doubles:
    """HLG's signal of a light in [0, 1]: a square root below the knee, a logarithm above."""
    high = A * np.log(np.maximum(12 * light - B, LEAST)) + C
    signal: Doubles = np.where(light < KNEE, np.sqrt(3 * light), high)
    return signal


def _top(lp: Doubles) -> Doubles:
    top: Doubles = lp.max(axis=-1, keepdims=True)
    return top
