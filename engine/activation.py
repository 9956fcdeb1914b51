"""Elementwise activations, each as the oracle rounds it.

A gated activation takes (gate, up). Constants that are Python floats take the arrays' dtype, so in 16 bits they are rounded
before they are used. Source: spec/models.md section 0; Hendrycks and Gimpel 2016; Shazeer 2020.
"""

import math
from collections.abc import Callable

import mlx.core as mx


def silu(x: mx.array) -> mx.array:
    """The logistic-weighted identity.

    Numerics: the sigmoid is rounded to x's dtype, then the product.
    """
    return x * mx.sigmoid(x)


def relu2(x: mx.array) -> mx.array:
    """The square of what is above zero.

    Numerics: the square is rounded to x's dtype.
    """
    return mx.square(mx.maximum(x, 0))


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up.

    Numerics: sigmoid, gate * sigmoid and the product with `up` are each rounded to the arrays' dtype, in this order.
    """
    return silu(gate) * up


def gelu(x: mx.array) -> mx.array:
    """x times the normal distribution function at x, through erf.

    Numerics: each of the four operations is rounded; erf is mlx's own on the CPU, not the C library's.
    """
    return x * (1 + mx.erf(x / math.sqrt(2))) / 2


def gelu_approx(x: mx.array) -> mx.array:
    """The tanh form of gelu.

    Numerics: the cube is a power, which rounds otherwise than two products in 16 bits; tanh comes from the C library.
    """
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + mx.tanh(inner))


def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """gelu(gate) * up.

    Numerics: as `gelu`, rounded to the arrays' dtype before the product with `up`, which is rounded again.
    """
    return gelu(gate) * up


def geglu_approx(gate: mx.array, up: mx.array) -> mx.array:
    """gelu_approx(gate) * up.

    Numerics: as `gelu_approx`, rounded to the arrays' dtype before the product with `up`, which is rounded again.
    """
    return gelu_approx(gate) * up


def soft_capped(x: mx.array, cap: float) -> mx.array:
    """cap * tanh(x / cap): almost x near zero, never beyond cap.

    Numerics: quotient, tanh and product are each rounded; tanh comes from the C library.
    Source: spec/models.md section 8, gemma2.
    """
    return mx.tanh(x / cap) * cap


def clipped_swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """(up + 1) * gate * sigmoid(1.702 * gate), with the gate at most 7 and `up` between -7 and 7.

    Numerics: 1.702 * gate, its sigmoid, gate * sigmoid, up + 1 and the last product are each rounded to the arrays' dtype.
    Source: OpenAI 2025 (gpt-oss model card).
    """
    gate = mx.minimum(gate, 7.0)
    up = mx.clip(up, -7.0, 7.0)
    return (up + 1.0) * (gate * mx.sigmoid(1.702 * gate))


def sparse_geglu(sparsity: float) -> Callable[[mx.array, mx.array], mx.array]:
    """gelu_approx(max(0, gate - cutoff)) * up, the cutoff being the quantile that a normal spread of the gates would have.

    Args:
        sparsity: The part of the gates that is to be cut off, above 0 and below 1.

    Numerics: the quantile is float32, rounded to the gate's dtype; mean and standard deviation are taken in that dtype.
    """
    deviations = math.sqrt(2.0) * mx.erfinv(mx.array(2 * sparsity - 1))

    def activation(gate: mx.array, up: mx.array) -> mx.array:
        mean, spread = mx.mean(gate, axis=-1, keepdims=True), mx.std(gate, axis=-1, keepdims=True)
        cutoff = mean + spread * deviations.astype(gate.dtype)
        return gelu_approx(mx.maximum(0, gate - cutoff)) * up

    return activation
