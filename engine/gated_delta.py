"""The gated delta rule: a matrix of associations a head, decayed, corrected towards each new value, and read by a query.

Holds the recurrence as a loop over positions, the form that the oracle takes on the CPU, and the mixer that the qwen3_next
and qwen3_5 families put around it. A GPU kernel of the oracle sums in another order: bits are promised on the CPU only.

Source: spec/models.md section 4; Yang et al. 2024 (gated delta networks).
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from engine.activation import silu
from engine.cache.recurrent import RecurrentCache, without_padding
from engine.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.linear import Linear
from engine.norm import GatedRMSNorm
from engine.short_convolution import ShortConvolution
from engine.taps import tap

UNIT_EPS: Final = 1e-6  # added to the sum of squares of a query or a key
STATE_SLOTS: Final = 2  # the convolution's window, the matrices


def unit_queries_and_keys(q_BLHE: mx.array, k_BLHE: mx.array) -> tuple[mx.array, mx.array]:
    """Queries of length E^-0.5 and keys of length 1, along the last axis; same shapes and dtypes.

    Numerics: as root-mean-square norms, with the eps of the sum of squares scaled to that of a mean, rounded to the dtype;
        then a product with a Python float, rounded again.
    Source: spec/models.md section 4 (eps as of mlx-lm 0.32.2).
    """
    scale = q_BLHE.shape[-1] ** -0.5
    eps = UNIT_EPS * scale**2
    return scale**2 * mx.fast.rms_norm(q_BLHE, None, eps), scale * mx.fast.rms_norm(k_BLHE, None, eps)


def decay_factors(a: mx.array, A_log: mx.array, dt_bias: mx.array) -> mx.array:
    """exp(-exp(A_log) * softplus(a + dt_bias)), between 0 and 1.

    Args:
        a: [B, L, H], or [B, L, H, E] for a factor a column.
        A_log: Broadcasts against `a`.
        dt_bias: Broadcasts against `a`.

    Returns:
        The factors in float32, in a's shape.

    Numerics: the sum and the softplus in a's dtype, the rest in float32.
    """
    return mx.exp(-mx.exp(A_log.astype(mx.float32)) * mx.logaddexp(a + dt_bias, 0))


def gated_delta(
    q_BLKE: mx.array,
    k_BLKE: mx.array,
    v_BLHV: mx.array,
    *,
    decay: mx.array,
    beta_BLH: mx.array,
    state: mx.array | None,
    mask_BL: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Run the rule over L positions: S = g S; S = S + (beta (v - S k)) k^T; y = S q.

    Args:
        q_BLKE: Queries [B, L, K, E]; H is a multiple of K and head h reads query head h * K // H.
        k_BLKE: Keys [B, L, K, E].
        v_BLHV: Values [B, L, H, V].
        decay: Factors g, float32 [B, L, H], or [B, L, H, E] for a factor a column of S.
        beta_BLH: Strength of a correction, [B, L, H].
        state: S, float32 [B, H, V, E]; None at the beginning, which means zeros.
        mask_BL: Boolean [B, L]: a position without a token leaves S as it was; None where all have one.

    Returns:
        y [B, L, H, V] in q's dtype, and S after the last position.

    Numerics: everything in float32, each product rounded before it is summed; y is rounded to q's dtype at the end.
    """
    B, L, K, E = q_BLKE.shape
    H, V = v_BLHV.shape[2:]
    if H != K:
        q_BLKE, k_BLKE = (mx.repeat(heads, H // K, axis=2) for heads in (q_BLKE, k_BLKE))
    if state is None:
        state = mx.zeros((B, H, V, E), dtype=mx.float32)
    decay = decay[..., None, None] if decay.ndim == 3 else decay[..., None, :]
    rows: list[mx.array] = []
    for i in range(L):
        q_BH1E, k_BH1E = q_BLKE[:, i, :, None], k_BLKE[:, i, :, None]
        before = state
        state = state * decay[:, i]
        recalled_BHV = (state * k_BH1E).sum(axis=-1)
        correction_BHV = (v_BLHV[:, i] - recalled_BHV) * beta_BLH[:, i, :, None]
        state = state + k_BH1E * correction_BHV[..., None]
        rows.append((state * q_BH1E).sum(axis=-1).astype(q_BLKE.dtype))
        if mask_BL is not None:
            state = mx.where(mask_BL[:, i, None, None, None], state, before)
    return mx.stack(rows, axis=1), state


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHeads:
    """Sizes of a mixer.

    Attributes:
        key_heads: K, of queries and of keys.
        value_heads: H, a multiple of K.
        key_width: E.
        value_width: V.
        kernel: Positions that the convolution sees.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    kernel: int

    def check(self) -> None:
        """Refuse sizes that do not fit together.

        Raises:
            ConfigError: There is no head, no width or no position before the newest, or heads that cannot be grouped.
        """
        sizes = (self.key_heads, self.value_heads, self.key_width, self.value_width, self.kernel - 1)
        if min(sizes) < 1 or self.value_heads % self.key_heads:
            raise ConfigError(
                "the heads of the linear layers do not fit together",
                linear_num_key_heads=self.key_heads,
                linear_num_value_heads=self.value_heads,
                linear_key_head_dim=self.key_width,
                linear_value_head_dim=self.value_width,
                linear_conv_kernel_dim=self.kernel,
                next_step="mend config.json",
            )

    @property
    def keys(self) -> int:
        """Channels of all queries, and of all keys."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatedDeltaMixer:
    """Convolution, delta rule, gated norm and the projection out; how its inputs are projected is the family's business.

    Attributes:
        path: Module path in the checkpoint, such as `model.layers.0.linear_attn`.
        heads: Sizes.
        convolution: Over all channels.
        A_log: [H].
        dt_bias: [H].
        norm: Of a head's output, gated.
        out: [D, H * V].
    """

    path: str
    heads: DeltaHeads
    convolution: ShortConvolution
    A_log: mx.array
    dt_bias: mx.array
    norm: GatedRMSNorm
    out: Linear

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, path: str, *, heads: DeltaHeads, width: int, eps: float, channels_first: bool
    ) -> "GatedDeltaMixer":
        """Take the mixer's tensors from the checkpoint; `channels_first` is the filters' shape on the hub."""
        return cls(
            path=path,
            heads=heads,
            convolution=ShortConvolution.take(
                checkpoint,
                f"{path}.conv1d",
                channels=heads.channels,
                kernel=heads.kernel,
                channels_first=channels_first,
            ),
            A_log=checkpoint.take(f"{path}.A_log", (heads.value_heads,)),
            dt_bias=checkpoint.take(f"{path}.dt_bias", (heads.value_heads,)),
            norm=GatedRMSNorm.take(checkpoint, f"{path}.norm", width=heads.value_width, eps=eps),
            out=Linear.take(checkpoint, f"{path}.out_proj", inputs=heads.values, outputs=width),
        )

    def __call__(
        self, qkv_BLC: mx.array, z_BLHV: mx.array, b_BLH: mx.array, a_BLH: mx.array, cache: RecurrentCache
    ) -> tuple[mx.array, RecurrentCache]:
        """Mix L positions.

        Args:
            qkv_BLC: Channels of all queries, then all keys, then all values [B, L, 2KE + HV].
            z_BLHV: Gate of the output [B, L, H, V].
            b_BLH: Strength of the correction, before the sigmoid.
            a_BLH: Decay, before softplus and exponentials.
            cache: The convolution's window and the matrices.

        Returns:
            [B, L, D], and the cache after these positions.
        """
        B, L, _ = qkv_BLC.shape
        heads = self.heads
        window, matrices = cache.state
        mask_BL = cache.mask(L)
        mixed_BLC, window = self.convolution(without_padding(qkv_BLC, mask_BL), window, cache.ends(L))
        q, k, v = mx.split(silu(mixed_BLC), [heads.keys, 2 * heads.keys], axis=-1)
        q_BLKE, k_BLKE = unit_queries_and_keys(
            q.reshape(B, L, heads.key_heads, heads.key_width), k.reshape(B, L, heads.key_heads, heads.key_width)
        )
        v_BLHV = v.reshape(B, L, heads.value_heads, heads.value_width)
        decay_BLH = decay_factors(a_BLH, self.A_log, self.dt_bias)
        y_BLHV, matrices = gated_delta(
            q_BLKE, k_BLKE, v_BLHV, decay=decay_BLH, beta_BLH=mx.sigmoid(b_BLH), state=matrices, mask_BL=mask_BL
        )
        out_BLD = self.out(self.norm(y_BLHV, z_BLHV).reshape(B, L, -1))
        return tap(self.path, out_BLD), cache.advanced(window, matrices, by=L)
