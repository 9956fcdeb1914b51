# ruff: noqa: ANN001, ANN201 - Numba reads these signatures; what is compiled takes numbers only
# mypy: disable-error-code="untyped-decorator,no-untyped-def,import-untyped,var-annotated,call-arg,unreachable"
"""Soft caps on scores: cap * tanh(x / cap), in place.

Guarantees: only what a query sees is capped; hidden positions are never looked at.

Numerics: the score, quotient, tanh and product are each rounded to the activations' dtype; tanh is the C library's.
Source: spec/models.md section 8, gemma2; `engine.activation.soft_capped`, to which this is held.
"""

import numpy as np
from numba import njit, types

from engine.kernels.memory import float_at, put_float
from engine.kernels.scalar import rounded

_f32 = np.float32
_tanhf = types.ExternalFunction("tanhf", types.float32(types.float32))


@njit(nogil=True, error_model="numpy")
def capped(scores, count, cap, to):
    """Cap some scores."""
    for i in range(count):
        share = rounded(_f32(rounded(float_at(scores, i), to) / cap), to)
        put_float(scores, i, rounded(_f32(rounded(_tanhf(share), to) * cap), to))
