"""The scan of a state-space layer (Mamba-2) and the lengths of its steps.

It keeps a matrix a head. At every position the matrix decays, takes in the position's values along `write` and is read
along `read`. Up to 256 positions are computed at once, as a masked product of positions with positions plus what the matrix
before them still gives; cutting a sequence elsewhere therefore rounds otherwise, which is the oracle's doing and kept.

Source: Dao and Gu 2024 (state-space duality).
"""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx

from engine.errors import ConfigError

PIECE: Final = 256  # positions computed at once

Limits = tuple[float, float]


def read_limits(bounds: Sequence[float]) -> Limits:
    """`time_step_limit` as a lower and an upper bound.

    Raises:
        ConfigError: It is no such pair.
    """
    if len(bounds) != 2 or not bounds[0] <= bounds[1]:
        raise ConfigError(
            "time_step_limit is not a lower and an upper bound",
            time_step_limit=list(bounds),
            next_step="mend config.json",
        )
    low, high = bounds
    return low, high


def time_steps(dt_BLH: mx.array, bias_H: mx.array, limits: Limits) -> mx.array:
    """How long each position lasts for each head: softplus(dt + bias), kept within `limits`; float32 [B, L, H].

    Numerics: dt is widened to float32 first; softplus as the logarithm of exp(x) + exp(0), from the C library.
    """
    return mx.clip(mx.logaddexp(dt_BLH.astype(mx.float32) + bias_H, 0), limits[0], limits[1])


def scan(
    x_BLHE: mx.array,
    write_BLGN: mx.array,
    read_BLGN: mx.array,
    steps_BLH: mx.array,
    *,
    A_log_H: mx.array,
    D_H: mx.array,
    state_BHEN: mx.array | None,
    mask_BL: mx.array | None = None,
    ends: tuple[int, ...] | None = None,
) -> tuple[mx.array, mx.array]:
    """Scan L positions.

    Args:
        x_BLHE: Values [B, L, H, E].
        write_BLGN: Where the values go (the paper's B), [B, L, G, N]; head h uses group h * G // H.
        read_BLGN: What is read (the paper's C), [B, L, G, N].
        steps_BLH: From `time_steps`.
        A_log_H: Logarithm of each head's rate of decay.
        D_H: Factor on the values that bypass the scan.
        state_BHEN: Matrices before these positions [B, H, E, N], float32; None at the beginning, which means zeros.
        mask_BL: Boolean [B, L]: a position without a token leaves the matrices as they were; None where all have one.
        ends: Of the L, how many each row has before right padding; None for all.

    Returns:
        [B, L, H, E] in x's dtype, and the matrices after these positions.

    Numerics: exp(A_log) and read @ write round to the dtype of their operands; all else is float32 until each piece is
        rounded to x's dtype; the bypass is a product and a sum in that dtype.
    """
    decay_BLH = steps_BLH * -mx.exp(A_log_H).astype(steps_BLH.dtype)  # its logarithm, never above 0
    if mask_BL is not None:
        decay_BLH = decay_BLH * mask_BL[..., None]
    driven_BLHE = steps_BLH[..., None] * x_BLHE
    pieces: list[mx.array] = []
    state = state_BHEN
    for start in range(0, x_BLHE.shape[1], PIECE):
        at = slice(start, start + PIECE)
        y, state = _scan_piece(
            driven_BLHE[:, at],
            write_BLGN[:, at],
            read_BLGN[:, at],
            decay_BLH[:, at],
            state,
            mask_BL=None if mask_BL is None else mask_BL[:, at],
            ends=None if ends is None else tuple(min(max(end - start, 0), PIECE) for end in ends),
        )
        pieces.append(y.astype(x_BLHE.dtype))
    if state is None:
        raise ValueError("a scan needs at least one position")
    return mx.concatenate(pieces, axis=1) + x_BLHE * D_H[:, None], state


def _scan_piece(
    driven_BLHE: mx.array,
    write_BLGN: mx.array,
    read_BLGN: mx.array,
    decay_BLH: mx.array,
    state_BHEN: mx.array | None,
    *,
    mask_BL: mx.array | None,
    ends: tuple[int, ...] | None,
) -> tuple[mx.array, mx.array]:
    """At most `PIECE` positions at once; float32 results."""
    B, L, H, E = driven_BLHE.shape
    G, N = write_BLGN.shape[2:]
    R = H // G  # heads that share a group
    log_BHL1 = decay_BLH.swapaxes(1, 2)[..., None]
    later_BHLL = mx.tril(mx.broadcast_to(log_BHL1, (B, H, L, L)), -1)  # row i, column j: i's decay if i comes after j
    log_BHLL = mx.cumsum(later_BHLL, axis=-2)
    if mask_BL is not None:
        both_B1LL = (mask_BL[:, None] & mask_BL[..., None])[:, None]
        log_BHLL = mx.where(both_B1LL, log_BHLL, -float("inf"))
    between_BHLL = mx.exp(log_BHLL)  # what is left at i of what came in at j
    match_BGLL = read_BLGN.swapaxes(1, 2) @ write_BLGN.transpose(0, 2, 3, 1)
    mixing_BHLL = mx.tril(mx.repeat(match_BGLL, R, axis=1) * between_BHLL)
    y_BLHE = (mixing_BHLL @ driven_BLHE.swapaxes(1, 2)).swapaxes(1, 2)

    if ends is None:
        last_BH1L = between_BHLL[:, :, -1:]
    else:
        last_B = mx.array([max(end - 1, 0) for end in ends])
        last_BH1L = mx.take_along_axis(between_BHLL, last_B[:, None, None, None], axis=2)
    left_BLH1 = last_BH1L.transpose(0, 3, 1, 2)  # at the last position
    taken_BGREL = (driven_BLHE * left_BLH1).transpose(0, 2, 3, 1).reshape(B, G, R, E, L)
    after_BHEN = (taken_BGREL @ write_BLGN.swapaxes(1, 2)[:, :, None]).reshape(B, H, E, N)
    if state_BHEN is not None:
        since_BLH = mx.exp(mx.cumsum(decay_BLH, axis=1))  # what is left of the matrices before
        after_BHEN = after_BHEN + since_BLH[:, -1, :, None, None] * state_BHEN
        grouped = state_BHEN.reshape(B, 1, G, R, E, N) @ read_BLGN.reshape(B, L, G, 1, N, 1)
        y_BLHE = y_BLHE + since_BLH[..., None] * grouped.reshape(B, L, H, E)
    return y_BLHE, after_BHEN
