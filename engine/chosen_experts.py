"""Experts chosen by the largest logits and weighed by a softmax over these logits alone."""

from dataclasses import dataclass

import mlx.core as mx

from engine.linear import Linear
from engine.moe import GatedExperts, weighted_sum
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenExperts:
    """The weighted sum of the chosen experts.

    Attributes:
        path: Module path in the checkpoint.
        router: [X, D], at `<path>.router.layer`; the ids of the chosen experts are the tap `<path>.router`.
        chosen: k, experts a token.
        experts: The experts.
    """

    path: str
    router: Linear
    chosen: int
    experts: GatedExperts

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype.

        Numerics: logits in x's dtype; the chosen keep the order in which the partition leaves them, which is the order of the
            sum; the softmax is accumulated in float32 and rounded.
        """
        logits_BLX = self.router(x_BLD)
        chosen_BLk = mx.argpartition(logits_BLX, kth=-self.chosen, axis=-1)[..., -self.chosen :]
        chosen_BLk = tap(f"{self.path}.router", chosen_BLk)
        weights_BLk = mx.softmax(mx.take_along_axis(logits_BLX, chosen_BLk, axis=-1), axis=-1, precise=True)
        return tap(self.path, weighted_sum(self.experts(x_BLD, chosen_BLk), weights_BLk))
