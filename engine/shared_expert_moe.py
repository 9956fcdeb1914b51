"""Experts beside one that every token goes through, gated by a sigmoid: the feed-forward layer of qwen3_next and qwen3_5_moe.

Source: spec/models.md sections 3 and 4.
"""

from dataclasses import dataclass

import mlx.core as mx

from engine.activation import swiglu
from engine.checkpoint import Checkpoint
from engine.linear import Linear
from engine.mlp import GatedMLP
from engine.moe import ExpertPath, GatedExperts, weighted_sum
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """Sizes of the layer.

    Attributes:
        experts: How many there are.
        chosen: Experts a token.
        inner: Width inside an expert.
        shared_inner: Width inside the shared expert.
        normalised: The weights of a token's experts are made to sum to one.
    """

    experts: int
    chosen: int
    inner: int
    shared_inner: int
    normalised: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedExpertMoE:
    """Weighted sum of the chosen experts, plus sigmoid(gate) * shared expert.

    Attributes:
        path: Module path in the checkpoint, such as `model.layers.0.mlp`.
        router: [X, D].
        experts: The experts.
        shared: The shared expert.
        shared_gate: [1, D].
        sizes: How many are chosen, and how they are weighed.
    """

    path: str
    router: Linear
    experts: GatedExperts
    shared: GatedMLP
    shared_gate: Linear
    sizes: ExpertSizes

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, path: str, *, width: int, sizes: ExpertSizes, apart: ExpertPath | None = None
    ) -> "SharedExpertMoE":
        """Take the layer's tensors from the checkpoint; `apart` is as in `GatedExperts.take`."""
        return cls(
            path=path,
            router=Linear.take(checkpoint, f"{path}.gate", inputs=width, outputs=sizes.experts),
            experts=GatedExperts.take(
                checkpoint,
                f"{path}.switch_mlp",
                experts=sizes.experts,
                width=width,
                inner=sizes.inner,
                activation=swiglu,
                apart=apart,
            ),
            shared=GatedMLP.take(checkpoint, f"{path}.shared_expert", width=width, inner=sizes.shared_inner),
            shared_gate=Linear.take(checkpoint, f"{path}.shared_expert_gate", inputs=width, outputs=1),
            sizes=sizes,
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype.

        Numerics: the softmax over all experts accumulates in float32 and is rounded to x's dtype; weights are divided by their
            rounded sum; the experts' outputs are weighed, then summed in the order of the choice, which is that of mlx's
            partition and not that of the weights.
        """
        weights_BLX = mx.softmax(self.router(x_BLD), axis=-1, precise=True)
        k = self.sizes.chosen
        chosen_BLk = mx.argpartition(weights_BLX, kth=-k, axis=-1)[..., -k:]
        weights_BLk = mx.take_along_axis(weights_BLX, chosen_BLk, axis=-1)
        if self.sizes.normalised:
            weights_BLk = weights_BLk / weights_BLk.sum(axis=-1, keepdims=True)
        routed_BLD = weighted_sum(self.experts(x_BLD, chosen_BLk), weights_BLk)
        shared_BLD = mx.sigmoid(self.shared_gate(x_BLD)) * self.shared(x_BLD)
        return tap(self.path, routed_BLD + shared_BLD)
