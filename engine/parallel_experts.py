"""Experts that run beside a dense feed-forward layer: a router with a norm of its own, and their weighted sum.

The router normalises what the dense layer sees un-normalised, scores, takes the k best and turns those k scores alone into
weights, each times a learned factor of its expert. Gemma 4 has it. Source: spec/models.md section 5.
"""

from dataclasses import dataclass

import mlx.core as mx

from engine.activation import geglu_approx
from engine.checkpoint import Checkpoint
from engine.linear import Linear
from engine.moe import ExpertLinear, GatedExperts
from engine.norm import RMSNorm
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledRouter:
    """Scores experts and weighs the best.

    Attributes:
        path: Module path in the checkpoint; the ids of the chosen experts are its tap.
        projection: [X, D].
        scale: [D]: the norm's weight, before it is divided by sqrt(D).
        expert_scale: [X].
        chosen: Experts a token.
        eps: Of the norm.
    """

    path: str
    projection: Linear
    scale: mx.array
    expert_scale: mx.array
    chosen: int
    eps: float

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, path: str, *, experts: int, chosen: int, width: int, eps: float
    ) -> "ScaledRouter":
        """Take the projection and the two scales from the checkpoint."""
        return cls(
            path=path,
            projection=Linear.take(checkpoint, f"{path}.proj", inputs=width, outputs=experts),
            scale=checkpoint.take(f"{path}.scale", (width,)),
            expert_scale=checkpoint.take(f"{path}.per_expert_scale", (experts,)),
            chosen=chosen,
            eps=eps,
        )

    def __call__(self, x_BLD: mx.array) -> tuple[mx.array, mx.array]:
        """The chosen experts and their weights, both [B, L, k], in the order in which the partition leaves them.

        Numerics: the order of the k experts, and so of the sum over them, is that of mlx's argpartition; the softmax over the
            k scores runs in the scores' dtype.
        """
        D = x_BLD.shape[-1]
        normed_BLD = mx.fast.rms_norm(x_BLD, self.scale * D**-0.5, self.eps)
        scores_BLX = self.projection(normed_BLD)
        experts_BLk = mx.argpartition(scores_BLX, kth=-self.chosen, axis=-1)[..., -self.chosen :]
        weights_BLk = mx.softmax(mx.take_along_axis(scores_BLX, experts_BLk, axis=-1), axis=-1)
        return tap(self.path, experts_BLk), weights_BLk * self.expert_scale[experts_BLk]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedExperts:
    """The weighted sum of the chosen experts' outputs.

    Attributes:
        path: Module path in the checkpoint.
        experts: With the tanh form of gelu on the gate.
    """

    path: str
    experts: GatedExperts

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, experts: int, width: int, inner: int) -> "WeightedExperts":
        """Take the experts from the checkpoint, in the layout that it has.

        The hub keeps gate above up in one tensor `<path>.gate_up_proj` [X, 2F, D], never packed; converted snapshots keep
        them apart below `<path>.switch_glu`.
        """
        inside = f"{path}.switch_glu"
        if f"{path}.gate_up_proj" not in checkpoint:
            return cls(
                path=path,
                experts=GatedExperts.take(
                    checkpoint, inside, experts=experts, width=width, inner=inner, activation=geglu_approx
                ),
            )
        joined_XFD = checkpoint.take(f"{path}.gate_up_proj", (experts, 2 * inner, width))
        return cls(
            path=path,
            experts=GatedExperts(
                path=inside,
                gate=ExpertLinear(weight=mx.contiguous(joined_XFD[:, :inner])),
                up=ExpertLinear(weight=mx.contiguous(joined_XFD[:, inner:])),
                down=ExpertLinear(weight=checkpoint.take(f"{path}.down_proj", (experts, width, inner))),
                activation=geglu_approx,
            ),
        )

    def __call__(self, x_BLD: mx.array, experts_BLk: mx.array, weights_BLk: mx.array) -> mx.array:
        """[B, L, D], summed over the k experts in the router's order."""
        weighted_BLkD = mx.expand_dims(weights_BLk, -1) * self.experts(x_BLD, experts_BLk)
        return tap(self.path, weighted_BLkD.sum(-2))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParallelExperts:
    """norm(dense) + norm(experts(norm(h), router(h))).

    Attributes:
        dense_norm: After the dense feed-forward layer.
        router: Sees the stream without a norm before it.
        input_norm: Before the experts.
        experts: Weighted and summed.
        norm: After them.
    """

    dense_norm: RMSNorm
    router: ScaledRouter
    input_norm: RMSNorm
    experts: WeightedExperts
    norm: RMSNorm

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, path: str, *, experts: int, chosen: int, width: int, inner: int, eps: float
    ) -> "ParallelExperts":
        """Take router, experts and norms from the checkpoint; `path` is the layer's."""

        def norm(name: str) -> RMSNorm:
            return RMSNorm.take(checkpoint, f"{path}.{name}", width=width, eps=eps)

        return cls(
            dense_norm=norm("post_feedforward_layernorm_1"),
            router=ScaledRouter.take(
                checkpoint, f"{path}.router", experts=experts, chosen=chosen, width=width, eps=eps
            ),
            input_norm=norm("pre_feedforward_layernorm_2"),
            experts=WeightedExperts.take(checkpoint, f"{path}.experts", experts=experts, width=width, inner=inner),
            norm=norm("post_feedforward_layernorm_2"),
        )

    def __call__(self, h_BLD: mx.array, dense_BLD: mx.array) -> mx.array:
        """The sum for the stream h and the dense layer's output, both [B, L, D]."""
        dense_BLD = self.dense_norm(dense_BLD)
        experts_BLk, weights_BLk = self.router(h_BLD)
        return dense_BLD + self.norm(self.experts(self.input_norm(h_BLD), experts_BLk, weights_BLk))
