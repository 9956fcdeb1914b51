"""The state-space layer (Mamba-2) around its scan: a projection, a short convolution, the scan, a gated output.

One projection makes the gate, the convolution's channels (values, write and read) and the time steps. How the output is
normalised, and whether before or after its gate, differs from family to family and is told.

Source: Dao and Gu 2024, section 7.
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from engine.activation import silu, swiglu
from engine.cache.recurrent import RecurrentCache, without_padding
from engine.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.linear import Linear
from engine.short_convolution import ShortConvolution
from engine.state_space import Limits, scan, time_steps
from engine.taps import tap

STATE_SLOTS: Final = 2  # of a layer's cache: the convolution's window, the matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanHeads:
    """Sizes of a state-space layer.

    Attributes:
        heads: H.
        head_width: E.
        groups: G, of heads that share `write` and `read`.
        state_width: N.
        kernel: Taps of the convolution.
    """

    heads: int
    head_width: int
    groups: int
    state_width: int
    kernel: int

    def check(self) -> None:
        """Refuse sizes that do not fit together.

        Raises:
            ConfigError: One is less than 1, or the groups do not divide the heads.
        """
        sizes = (self.heads, self.head_width, self.groups, self.state_width, self.kernel)
        if min(sizes) < 1 or self.heads % self.groups:
            raise ConfigError(
                "the heads of the scan do not fit together",
                heads=self.heads,
                head_width=self.head_width,
                groups=self.groups,
                state_width=self.state_width,
                kernel=self.kernel,
                next_step="mend config.json",
            )

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_width

    @property
    def shared(self) -> int:
        """Elements of `write`, and of `read`, of all groups."""
        return self.groups * self.state_width

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, write, read."""
        return self.inner + 2 * self.shared


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutputNorm:
    """A root-mean-square norm of what was scanned, and silu(gate) times it, before the norm or after.

    Attributes:
        path: Module path in the checkpoint.
        weight: [D].
        eps: Added to the mean square.
        group: Elements normalised together, the weight being applied after; None: all of them, in one operation.
        gate_first: The gate comes before the norm.
    """

    path: str
    weight: mx.array
    eps: float
    group: int | None = None
    gate_first: bool = True

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        path: str,
        *,
        width: int,
        eps: float,
        group: int | None = None,
        gate_first: bool = True,
    ) -> "OutputNorm":
        """Take the weight from the checkpoint."""
        weight = checkpoint.take(f"{path}.weight", (width,))
        return cls(path=path, weight=weight, eps=eps, group=group, gate_first=gate_first)

    def __call__(self, y_BLD: mx.array, gate_BLD: mx.array) -> mx.array:
        """Normalise and gate [B, L, D]; same shape and dtype.

        Numerics: the norm as `RMSNorm`; with groups it rounds before the weight is applied, and the product rounds again.
        """
        if self.gate_first:
            y_BLD = swiglu(gate_BLD, y_BLD)
        if self.group is None:
            y_BLD = mx.fast.rms_norm(y_BLD, self.weight, self.eps)
        else:
            grouped = mx.fast.rms_norm(mx.unflatten(y_BLD, -1, (-1, self.group)), None, self.eps)
            y_BLD = self.weight * grouped.flatten(-2)
        return tap(self.path, y_BLD if self.gate_first else swiglu(gate_BLD, y_BLD))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateSpaceMixer:
    """The whole layer.

    Attributes:
        path: Module path in the checkpoint.
        heads: Sizes.
        limits: Of the time steps.
        into: [H * E + channels + H, D], whose outputs are the gate, the convolution's channels and the time steps.
        convolution: Over values, write and read.
        dt_bias: [H].
        A_log: [H].
        D: [H].
        norm: Of the output; None: the gate alone.
        out: [D, H * E].
    """

    path: str
    heads: ScanHeads
    limits: Limits
    into: Linear
    convolution: ShortConvolution
    dt_bias: mx.array
    A_log: mx.array
    D: mx.array
    norm: OutputNorm | None
    out: Linear

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        path: str,
        *,
        heads: ScanHeads,
        width: int,
        limits: Limits,
        norm: OutputNorm | None,
        in_bias: bool,
        conv_bias: bool,
        out_bias: bool,
    ) -> "StateSpaceMixer":
        """Take the layer's tensors, but for the norm's, from the checkpoint, the filters as converted or as on the hub."""
        filters = checkpoint.shape(f"{path}.conv1d.weight")
        H = heads.heads
        return cls(
            path=path,
            heads=heads,
            limits=limits,
            into=Linear.take(
                checkpoint, f"{path}.in_proj", inputs=width, outputs=heads.inner + heads.channels + H, bias=in_bias
            ),
            convolution=ShortConvolution.take(
                checkpoint,
                f"{path}.conv1d",
                channels=heads.channels,
                kernel=heads.kernel,
                bias=conv_bias,
                channels_first=filters is not None and filters[-1] != 1,
            ),
            dt_bias=checkpoint.take(f"{path}.dt_bias", (H,)),
            A_log=checkpoint.take(f"{path}.A_log", (H,)),
            D=checkpoint.take(f"{path}.D", (H,)),
            norm=norm,
            out=Linear.take(checkpoint, f"{path}.out_proj", inputs=heads.inner, outputs=width, bias=out_bias),
        )

    def __call__(self, x_BLD: mx.array, cache: RecurrentCache) -> tuple[mx.array, RecurrentCache]:
        """Mix L positions [B, L, D] with all before; returns [B, L, D] and the cache after them.

        Numerics: the scan as `scan` says; projections, convolution and gate in x's dtype.
        """
        B, L, _ = x_BLD.shape
        sizes = self.heads
        window, matrices = cache.state
        gate, channels, dt_BLH = mx.split(self.into(x_BLD), [sizes.inner, sizes.inner + sizes.channels], axis=-1)
        mask_BL, ends = cache.mask(L), cache.ends(L)
        mixed, window = self.convolution(without_padding(channels, mask_BL), window, ends)
        x, write, read = mx.split(silu(mixed), [sizes.inner, sizes.inner + sizes.shared], axis=-1)
        y_BLHE, matrices = scan(
            x.reshape(B, L, sizes.heads, sizes.head_width),
            write.reshape(B, L, sizes.groups, sizes.state_width),
            read.reshape(B, L, sizes.groups, sizes.state_width),
            time_steps(dt_BLH, self.dt_bias, self.limits),
            A_log_H=self.A_log,
            D_H=self.D,
            state_BHEN=matrices,
            mask_BL=mask_BL,
            ends=ends,
        )
        y_BLD = y_BLHE.reshape(B, L, sizes.inner)
        gated = swiglu(gate, y_BLD) if self.norm is None else self.norm(y_BLD, gate)
        return tap(self.path, self.out(gated)), cache.advanced(window, matrices, by=L)
