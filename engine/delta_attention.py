"""Kimi delta attention: the gated delta rule with a decay of its own for every column of a head's matrix.

Queries, keys and values each go through a short convolution; decay and output gate come from narrow layers. It remembers the
three convolutions' windows and the matrices: four arrays, no positions.

Source: Kimi Team 2025 (Kimi Linear), section 3; spec/models.md section 4 for the rule itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.activation import silu
from engine.cache.protocol import Cache
from engine.cache.recurrent import RecurrentCache
from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.errors import ConfigError
from engine.gated_delta import decay_factors, gated_delta, unit_queries_and_keys
from engine.linear import Linear
from engine.norm import RMSNorm
from engine.short_convolution import ShortConvolution
from engine.taps import tap

STATE_SLOTS: Final = 4  # windows of queries, keys and values; matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Sizes of a layer, in the words of config.json.

    Attributes:
        num_heads: H.
        head_dim: E.
        kda_layers: Layers of this kind, counted from 1.
        full_attn_layers: The others.
        short_conv_kernel_size: Positions that a convolution sees.
    """

    num_heads: int
    head_dim: int
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    short_conv_kernel_size: int = 4

    @classmethod
    def read(cls, entry: Mapping[str, Any], *, layers: int) -> "DeltaSizes":
        """Read `linear_attn_config` of a model of that many layers.

        Raises:
            ConfigError: An unknown key, a wrong type, a size that is not positive, or a layer that is not in just one list.
        """
        sizes = read_config(cls, {**entry, "model_type": "kimi_linear (linear_attn_config)"}, irrelevant={})
        kinds = sorted((*sizes.kda_layers, *sizes.full_attn_layers))
        if min(sizes.num_heads, sizes.head_dim, sizes.short_conv_kernel_size - 1) < 1 or (
            kinds != list(range(1, layers + 1))
        ):
            raise ConfigError(
                "linear_attn_config of config.json does not fit together",
                num_heads=sizes.num_heads,
                head_dim=sizes.head_dim,
                short_conv_kernel_size=sizes.short_conv_kernel_size,
                layers_in_lists=", ".join(map(str, kinds)),
                num_hidden_layers=layers,
                next_step="mend config.json",
            )
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FilteredProjection:
    """silu(convolution(linear(x))).

    Attributes:
        path: Module path of the convolution's owner, such as `model.layers.0.self_attn.q_conv`.
        linear: [H * E, D].
        convolution: Over H * E channels.
    """

    path: str
    linear: Linear
    convolution: ShortConvolution

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, path: str, name: str, *, width: int, channels: int, kernel: int
    ) -> "FilteredProjection":
        """Take `<name>_proj` and `<name>_conv.conv`, or the hub's `<name>_conv1d` with its channels first."""
        hub, own = f"{path}.{name}_conv1d.weight", f"{path}.{name}_conv.conv"
        if hub in checkpoint:
            checkpoint.replace([hub], [f"{own}.weight"], lambda filters: [filters.swapaxes(1, 2)])
        return cls(
            path=f"{path}.{name}_conv",
            linear=Linear.take(checkpoint, f"{path}.{name}_proj", inputs=width, outputs=channels),
            convolution=ShortConvolution.take(checkpoint, own, channels=channels, kernel=kernel),
        )

    def __call__(self, x_BLD: mx.array, window: mx.array | None) -> tuple[mx.array, mx.array]:
        """Channels [B, L, H * E], and the window for the next call."""
        filtered, window = self.convolution(self.linear(x_BLD), window)
        return tap(self.path, silu(filtered)), window


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NarrowProjection:
    """b(a(x)) with nothing between.

    Attributes:
        a: [E, D].
        b: [H * E, E].
    """

    a: Linear
    b: Linear

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, path: str, name: str, *, width: int, narrow: int, channels: int
    ) -> "NarrowProjection":
        """Take `<name>_a_proj` and `<name>_b_proj` from the checkpoint."""
        return cls(
            a=Linear.take(checkpoint, f"{path}.{name}_a_proj", inputs=width, outputs=narrow),
            b=Linear.take(checkpoint, f"{path}.{name}_b_proj", inputs=narrow, outputs=channels),
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Channels [B, L, H * E]."""
        return self.b(self.a(x_BLD))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaAttention:
    """The whole layer.

    Attributes:
        path: Module path in the checkpoint, such as `model.layers.0.self_attn`.
        q: Queries.
        k: Keys.
        v: Values.
        decay: Decay of every column, before softplus and exponentials.
        strength: Of a correction, before the sigmoid [H, D].
        gate: Of the output, before the sigmoid.
        A_log: [H, 1].
        dt_bias: [H, E].
        norm: Of a head's output.
        out: [D, H * E].
    """

    path: str
    q: FilteredProjection
    k: FilteredProjection
    v: FilteredProjection
    decay: NarrowProjection
    strength: Linear
    gate: NarrowProjection
    A_log: mx.array
    dt_bias: mx.array
    norm: RMSNorm
    out: Linear

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, sizes: DeltaSizes, *, width: int, eps: float) -> "DeltaAttention":
        """Take the layer's tensors from the checkpoint; `width` is D, `eps` that of the norm."""
        heads, head_width, kernel = sizes.num_heads, sizes.head_dim, sizes.short_conv_kernel_size
        channels = heads * head_width
        bias = f"{path}.dt_bias"
        if len(checkpoint.shape(bias) or ()) > 1:
            checkpoint.replace([bias], [bias], lambda stored: [stored.reshape(-1)])

        def filtered(name: str) -> FilteredProjection:
            return FilteredProjection.take(checkpoint, path, name, width=width, channels=channels, kernel=kernel)

        def narrow(name: str) -> NarrowProjection:
            return NarrowProjection.take(checkpoint, path, name, width=width, narrow=head_width, channels=channels)

        return cls(
            path=path,
            q=filtered("q"),
            k=filtered("k"),
            v=filtered("v"),
            decay=narrow("f"),
            strength=Linear.take(checkpoint, f"{path}.b_proj", inputs=width, outputs=heads),
            gate=narrow("g"),
            A_log=checkpoint.take(f"{path}.A_log", (1, 1, heads, 1)).reshape(heads, 1),
            dt_bias=checkpoint.take(bias, (channels,)).reshape(heads, head_width),
            norm=RMSNorm.take(checkpoint, f"{path}.o_norm", width=head_width, eps=eps),
            out=Linear.take(checkpoint, f"{path}.o_proj", inputs=channels, outputs=width),
        )

    def __call__(self, x_BLD: mx.array, cache: Cache) -> tuple[mx.array, RecurrentCache]:
        """Mix [B, L, D] with what the cache holds; returns [B, L, D] and the cache after these positions.

        Raises:
            TypeError: The family handed it the wrong kind of cache.

        Numerics: the rule itself in float32 (see `gated_delta`); norm, gate and their product in x's dtype.
        """
        if not isinstance(cache, RecurrentCache):
            raise TypeError(f"a layer of delta attention was handed a cache of kind {cache.kind}")
        B, L, _ = x_BLD.shape
        shape = (B, L, *self.dt_bias.shape)
        *windows, matrices = cache.state
        projections = (self.q, self.k, self.v)
        pairs = [projection(x_BLD, window) for projection, window in zip(projections, windows, strict=True)]
        q_BLHE, k_BLHE, v_BLHE = (channels.reshape(shape) for channels, _ in pairs)
        q_BLHE, k_BLHE = unit_queries_and_keys(q_BLHE, k_BLHE)
        decay_BLHE = decay_factors(self.decay(x_BLD).reshape(shape), self.A_log, self.dt_bias)
        strength_BLH = mx.sigmoid(self.strength(x_BLD))
        y_BLHE, matrices = gated_delta(q_BLHE, k_BLHE, v_BLHE, decay=decay_BLHE, beta_BLH=strength_BLH, state=matrices)
        gated_BLHE = self.norm(y_BLHE) * mx.sigmoid(self.gate(x_BLD).reshape(shape))
        out_BLD = self.out(gated_BLHE.reshape(B, L, -1))
        return tap(self.path, out_BLD), cache.advanced(*(window for _, window in pairs), matrices, by=L)
