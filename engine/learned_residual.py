"""Learned residuals: copies of the stream that update each other, and a low-rank way around attention.

Alternating updates (`AltUp`, `Copies`): a layer works on one of several copies of the stream. Before it every copy is
predicted from all of them; after it the error of the active one's prediction is spread over all. The coefficients of both
come from the active copy through a small router. `Laurel` runs beside attention. Gemma 3n has all of them.

Source: Baykal et al. 2023; Menghani et al. 2024. Copies lead in shapes: `n` in suffixes counts them.
"""

from dataclasses import dataclass

import mlx.core as mx

from engine.checkpoint import Checkpoint
from engine.linear import Linear
from engine.norm import RMSNorm
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AltUp:
    """One layer's prediction and correction.

    Attributes:
        router_norm: Before the router.
        router: [n, D].
        prediction: [n * n, n], float32, clipped.
        correction: [n, n], float32, clipped.
        output_scale: [D]; for the family to use.
        active: The copy that the layer works on.
        width: D.
    """

    router_norm: RMSNorm
    router: Linear
    prediction: Linear
    correction: Linear
    output_scale: mx.array
    active: int
    width: int

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        path: str,
        *,
        copies: int,
        active: int,
        width: int,
        eps: float,
        clip: float | None,
    ) -> "AltUp":
        """Take the layer's tensors from the checkpoint.

        Numerics: the coefficients' weights are widened to float32 after the cast to the model's dtype, then clipped; they are
            never packed, being too narrow.
        """

        def coefficients(name: str, outputs: int) -> Linear:
            weight = checkpoint.take(f"{path}.{name}.weight", (outputs, copies)).astype(mx.float32)
            return Linear(path=f"{path}.{name}", weight=weight if clip is None else mx.clip(weight, -clip, clip))

        return cls(
            router_norm=RMSNorm.take(checkpoint, f"{path}.router_norm", width=width, eps=eps),
            router=Linear.take(checkpoint, f"{path}.modality_router", inputs=width, outputs=copies),
            prediction=coefficients("prediction_coefs", copies * copies),
            correction=coefficients("correction_coefs", copies),
            output_scale=checkpoint.take(f"{path}.correct_output_scale", (width,)),
            active=active,
            width=width,
        )

    def predict(self, x_nBLD: mx.array) -> mx.array:
        """Every copy predicted from all of them; same shape and dtype.

        Numerics: float32 from the coefficients on, rounded to x's dtype at the end.
        """
        n, B, L, _ = x_nBLD.shape
        mixing_BLnn = self.prediction(self._modalities(x_nBLD[self.active])).reshape(B, L, n, n).swapaxes(2, 3)
        wide_nBLD = x_nBLD.astype(mx.float32)
        mixed_BLDn = wide_nBLD.transpose(1, 2, 3, 0) @ mixing_BLnn
        return (mixed_BLDn.transpose(3, 0, 1, 2) + wide_nBLD).astype(x_nBLD.dtype)

    def correct(self, predicted_nBLD: mx.array, activated_BLD: mx.array) -> mx.array:
        """The predictions moved towards what the layer made of the active one; same shape and dtype.

        Numerics: the error is taken in the stream's dtype; its products and sums are float32, rounded at the end.
        """
        gains_nBL = (self.correction(self._modalities(activated_BLD)) + 1.0).moveaxis(2, 0)
        error_BLD = activated_BLD - predicted_nBLD[self.active]
        corrected_nBLD = error_BLD[None] * gains_nBL[..., None] + predicted_nBLD
        return corrected_nBLD.astype(activated_BLD.dtype)

    def _modalities(self, x_BLD: mx.array) -> mx.array:
        """The router's view of a copy, float32 [B, L, n] within -1 and 1."""
        return mx.tanh(self.router(self.router_norm(x_BLD) * self.width**-1.0).astype(mx.float32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copies:
    """From the embedding to n copies of the stream, and back to one.

    Attributes:
        spread: n - 1 projections [D, D], of the embedding to the further copies.
        gather: n - 1 projections [D, D], of the further copies to what is averaged.
    """

    spread: tuple[Linear, ...]
    gather: tuple[Linear, ...]

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, copies: int, width: int) -> "Copies":
        """Take the projections from the checkpoint; `path` is the model's."""

        def projections(name: str) -> tuple[Linear, ...]:
            return tuple(
                Linear.take(checkpoint, f"{path}.{name}.{i}", inputs=width, outputs=width) for i in range(copies - 1)
            )

        return cls(spread=projections("altup_projections"), gather=projections("altup_unembed_projections"))

    def split(self, x_BLD: mx.array) -> mx.array:
        """[n, B, L, D]: x itself, then its projections scaled to x's magnitude."""
        further = [projection(x_BLD) for projection in self.spread]
        return _levelled(x_BLD, further)

    def joined(self, x_nBLD: mx.array) -> mx.array:
        """[B, L, D]: the mean of the first copy and of the projections of the others, scaled to its magnitude."""
        further = [projection(x_nBLD[i + 1]) for i, projection in enumerate(self.gather)]
        return mx.mean(_levelled(x_nBLD[0], further), axis=0)


def _levelled(first_BLD: mx.array, further: list[mx.array]) -> mx.array:
    """[n, B, L, D]: the first as it is, the further ones with each position scaled to the first's root mean square."""
    further_nBLD = mx.stack(further)
    return mx.concatenate([first_BLD[None], further_nBLD * (_magnitude(first_BLD) / _magnitude(further_nBLD))])


def _magnitude(x: mx.array) -> mx.array:
    """Root mean square over the last axis, kept as an axis of 1.

    Numerics: square, mean and root are each rounded; nothing guards against a zero, as nothing does in the oracle, whose
        floor is the dtype's lowest (negative) value.
    """
    return mx.mean(x**2, axis=-1, keepdims=True) ** 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Laurel:
    """x + norm(right(left(x))): a learned residual of low rank.

    Attributes:
        path: Module path in the checkpoint.
        left: [R, D].
        right: [D, R].
        norm: Over D.
    """

    path: str
    left: Linear
    right: Linear
    norm: RMSNorm

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, width: int, rank: int, eps: float) -> "Laurel":
        """Take the two projections and the norm from the checkpoint."""
        return cls(
            path=path,
            left=Linear.take(checkpoint, f"{path}.linear_left", inputs=width, outputs=rank),
            right=Linear.take(checkpoint, f"{path}.linear_right", inputs=rank, outputs=width),
            norm=RMSNorm.take(checkpoint, f"{path}.post_laurel_norm", width=width, eps=eps),
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Same shape and dtype."""
        return tap(self.path, x_BLD + self.norm(self.right(self.left(x_BLD))))
