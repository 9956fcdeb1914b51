"""One forward in float64: the layers that families share, and the outputs that they leave behind.

Every layer names the module path that it is in a checkpoint, and keeps its output of every position under it. What is between
modules, as the sums of a residual stream, is rounded by the same rule.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from parity.truth.packing import Packing
from parity.truth.rotation import Rotation
from parity.truth.rounding import Rounding
from parity.truth.weights import Array, Weights

Activation = Callable[[Array], Array]
ONE_THREAD: Final = 1 << 18  # multiplications up to which OpenBLAS takes one thread
WORTH_THREADS: Final = 1 << 24  # multiplications from which several pay
SQRT_2_OVER_PI: Final = 0.7978845608028654


@dataclass(slots=True, kw_only=True)
class Forward:
    """One run over ids.

    Attributes:
        weights: Of the snapshot.
        rounding: What happens to results.
        ids: Token ids, [L].
        packing: Of keys and values; None where they are kept as computed.
        outputs: Module path to its output of every position, [L, ...].
    """

    weights: Weights
    rounding: Rounding
    ids: npt.NDArray[np.int64]
    packing: Packing | None = None
    outputs: dict[str, Array] = field(default_factory=dict)

    def keep(self, path: str, value: Array) -> Array:
        """Leave an output behind."""
        self.outputs[path] = value
        return value

    def rounded(self, value: Array) -> Array:
        """A result of one operation."""
        return self.rounding.value(value)

    def add(self, *terms: Array) -> Array:
        """A sum of terms, rounded term by term."""
        total = terms[0]
        for term in terms[1:]:
            total = self.rounded(total + term)
        return total

    def scaled(self, value: Array, factor: float) -> Array:
        """A product with a constant; nothing where that is 1."""
        return value if factor == 1.0 else self.rounded(value * factor)

    def embedding(self, path: str) -> Array:
        """The rows that the ids name."""
        return self.keep(path, self.weights.matrix(path, self.ids))

    def product(self, x: Array, weight: Array, *, packed: bool) -> Array:
        """x @ weight.T."""
        size = times(np.abs(x), np.abs(weight).T) if self.rounding.wants_size else None
        return self.rounding.product(times(x, weight.T), size, packed=packed)

    def linear(self, path: str, x: Array) -> Array:
        """A projection, with its bias where there is one."""
        y = self.product(x, self.weights.matrix(path), packed=self.weights.is_packed(path))
        if f"{path}.bias" in self.weights:
            y = self.rounded(y + self.weights.vector(f"{path}.bias"))
        return self.keep(path, y)

    def head(self, path: str, hidden: Array) -> Array:
        """Logits by a head of its own, or by the embedding at `path`; not kept under a module path that means another thing."""
        return self.product(hidden, self.weights.matrix(path), packed=self.weights.is_packed(path))

    def rms(self, path: str, x: Array, eps: float, *, plus_one: bool = False) -> Array:
        """Root-mean-square norm of the last axis."""
        weight = self.weights.vector(f"{path}.weight") + (1.0 if plus_one else 0.0)
        return self.keep(path, self.rounded(self.unit(x, eps) * weight))

    def unit(self, x: Array, eps: float) -> Array:
        """x / rms(x), without a weight."""
        return self.rounded(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))

    def layer_norm(self, path: str, x: Array, eps: float) -> Array:
        """Mean and variance norm of the last axis, with a bias where there is one."""
        centred = x - x.mean(axis=-1, keepdims=True)
        y = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps)
        y = y * self.weights.vector(f"{path}.weight")
        if f"{path}.bias" in self.weights:
            y = y + self.weights.vector(f"{path}.bias")
        return self.keep(path, self.rounded(y))

    def attend(
        self,
        q_LHE: Array,
        k_LKE: Array,
        v_LKE: Array,
        *,
        scale: float,
        rotation: Rotation | None = None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Array:
        """Causal attention of heads to themselves and to what precedes, [L, H * E]."""
        if rotation is not None:
            q_LHE, k_LKE = rotation(q_LHE, self.rounding), rotation(k_LKE, self.rounding)
        past = np.arange(q_LHE.shape[0])[:, None] - np.arange(q_LHE.shape[0])[None]
        allowed = (past >= 0) & (past < (window or q_LHE.shape[0]))
        plain = self._mixed(q_LHE, k_LKE, v_LKE, scale=scale, cap=cap, allowed=allowed)
        if self.packing is None:
            return plain
        packed = self._mixed(
            q_LHE,
            *(self.packing(heads, self.rounding) for heads in (k_LKE, v_LKE)),
            scale=scale,
            cap=cap,
            allowed=allowed,
        )
        return np.where(self.packing.rows(len(plain))[:, None], packed, plain)

    def _mixed(
        self,
        q_LHE: Array,
        k_LKE: Array,
        v_LKE: Array,
        *,
        scale: float,
        cap: float | None,
        allowed: npt.NDArray[np.bool_],
    ) -> Array:
        """The softmax of capped, masked scores, times values, [L, H * E]."""
        L, H, _ = q_LHE.shape
        group = H // k_LKE.shape[1]
        k_HLE, v_HLE = (np.repeat(heads, group, axis=1).swapaxes(0, 1) for heads in (k_LKE, v_LKE))
        q_HLE = self.rounded(q_LHE * scale).swapaxes(0, 1)
        scores = self._heads_product(q_HLE, k_HLE.swapaxes(1, 2))
        if cap is not None:
            scores = self.rounded(np.tanh(scores / cap) * cap)
        scores = np.where(allowed, scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = self.rounded(shares / shares.sum(axis=-1, keepdims=True))
        return self._heads_product(shares, v_HLE).swapaxes(0, 1).reshape(L, -1)

    def _heads_product(self, a: Array, b: Array) -> Array:
        size = np.abs(a) @ np.abs(b) if self.rounding.wants_size else None
        return self.rounding.product(a @ b, size, packed=False)

    def gated(self, path: str, x: Array, activation: Activation) -> Array:
        """down(activation(gate) * up)."""
        gate, up = self.linear(f"{path}.gate_proj", x), self.linear(f"{path}.up_proj", x)
        inner = self.rounded(self.rounded(activation(gate)) * up)
        return self.keep(path, self.linear(f"{path}.down_proj", inner))

    def fused_gated(self, path: str, x: Array, activation: Activation) -> Array:
        """down(activation(gate) * up), gate and up the halves of one projection."""
        gate, up = np.split(self.linear(f"{path}.gate_up_proj", x), 2, axis=-1)
        inner = self.rounded(self.rounded(activation(gate)) * up)
        return self.keep(path, self.linear(f"{path}.down_proj", inner))


def times(a: Array, b: Array) -> Array:
    """a @ b, small ones in pieces that numpy's BLAS keeps on one thread.

    Its threads wait for one another by spinning: for products of a tiny snapshot that costs more than the product, and on a
    busy machine a hundred times more.
    """
    work = a.shape[0] * b.shape[0] * b.shape[1]
    rows = max(2, ONE_THREAD // (b.shape[0] * b.shape[1]))
    if rows >= a.shape[0] or work > WORTH_THREADS:
        return a @ b
    return np.concatenate([a[i : i + rows] @ b for i in range(0, a.shape[0], rows)])


def heads(x: Array, width: int) -> Array:
    """[L, H * E] as [L, H, E]."""
    return x.reshape(x.shape[0], -1, width)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x: Array) -> Array:
    """The form with the error function; its series here is exact to 2e-15 (Abramowitz and Stegun 7.1.6, 7.1.14)."""
    return np.asarray(x * (1.0 + erf(x / np.sqrt(2.0))) / 2.0)


def gelu_tanh(x: Array) -> Array:
    """The form with tanh."""
    return np.asarray(0.5 * x * (1.0 + np.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))))


def erf(x: Array) -> Array:
    """Error function: a power series near 0, a continued fraction beyond 2.5."""
    size = np.abs(x)
    near, far = np.minimum(size, 2.5), np.maximum(size, 2.5)
    term = total = near.copy()
    for n in range(1, 60):
        term = term * (2 * near * near) / (2 * n + 1)
        total = total + term
    series = 2 / np.sqrt(np.pi) * np.exp(-near * near) * total
    fraction = far.copy()
    for n in range(60, 0, -1):
        fraction = far + (n / 2) / fraction
    tail = np.exp(-far * far) / (np.sqrt(np.pi) * fraction)
    return np.asarray(np.copysign(np.where(size <= 2.5, series, 1.0 - tail), x))
