"""Feed-forward layers without a gate, and experts of that kind behind a router with corrected choice.

The experts may work in a narrower space: one projection leads all of them into it, another one out of it.

Source: NVIDIA 2025 (Nemotron-H, Nemotron 3).
"""

from dataclasses import dataclass

import mlx.core as mx

from engine.activation import relu2
from engine.checkpoint import Checkpoint
from engine.linear import Linear
from engine.moe import ExpertLinear, UngatedExperts, weighted_sum
from engine.router import Choice, SigmoidRouter
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UngatedMLP:
    """down(relu2(up(x))).

    Attributes:
        path: Module path in the checkpoint.
        up: [F, D].
        down: [D, F].
    """

    path: str
    up: Linear
    down: Linear

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, width: int, inner: int, bias: bool) -> "UngatedMLP":
        """Take `up_proj` and `down_proj` from the checkpoint."""
        return cls(
            path=path,
            up=Linear.take(checkpoint, f"{path}.up_proj", inputs=width, outputs=inner, bias=bias),
            down=Linear.take(checkpoint, f"{path}.down_proj", inputs=inner, outputs=width, bias=bias),
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype."""
        return tap(self.path, self.down(relu2(self.up(x_BLD))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UngatedMoE:
    """The weighted sum of the chosen experts, plus a layer that every token goes through, unweighted.

    Attributes:
        path: Module path in the checkpoint.
        router: Chooses and weighs; it sees the layer's own input.
        narrow: Into the experts' space; None where they work in the model's.
        experts: The experts.
        widen: Out of their space; None where there is no `narrow`.
        shared: The common layer, which sees the layer's own input; None where there is none.
    """

    path: str
    router: SigmoidRouter
    narrow: Linear | None
    experts: UngatedExperts
    widen: Linear | None
    shared: UngatedMLP | None

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        path: str,
        *,
        width: int,
        latent: int | None,
        inner: int,
        shared_inner: int | None,
        choice: Choice,
        bias: bool,
    ) -> "UngatedMoE":
        """Take the layer from the checkpoint, with the experts stacked or, as on the hub, one by one.

        Args:
            checkpoint: Where from.
            path: Module path.
            width: D.
            latent: Width of the experts' space; None: D.
            inner: Width inside an expert.
            shared_inner: Width inside the common layer; None for none.
            choice: Numbers of the router.
            bias: Whether the projections that are not the experts' have biases.
        """

        def stack(stacked: str, alone: str, inputs: int, outputs: int) -> ExpertLinear:
            paths = [f"{path}.experts.{i}.{alone}" for i in range(choice.experts)]
            if f"{paths[0]}.weight" in checkpoint:
                return ExpertLinear.take_apart(checkpoint, paths, inputs=inputs, outputs=outputs)
            whole = f"{path}.switch_mlp.{stacked}"
            return ExpertLinear.take(checkpoint, whole, experts=choice.experts, inputs=inputs, outputs=outputs)

        def projection(name: str, inputs: int, outputs: int) -> Linear:
            return Linear.take(checkpoint, f"{path}.{name}", inputs=inputs, outputs=outputs, bias=bias)

        space = latent or width
        return cls(
            path=path,
            router=SigmoidRouter.take(checkpoint, f"{path}.gate", width=width, choice=choice),
            narrow=projection("fc1_latent_proj", width, latent) if latent else None,
            experts=UngatedExperts(
                path=f"{path}.switch_mlp",
                up=stack("fc1", "up_proj", space, inner),
                down=stack("fc2", "down_proj", inner, space),
                activation=relu2,
            ),
            widen=projection("fc2_latent_proj", latent, width) if latent else None,
            shared=None
            if shared_inner is None
            else UngatedMLP.take(checkpoint, f"{path}.shared_experts", width=width, inner=shared_inner, bias=bias),
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype."""
        experts_BLk, weights_BLk = self.router(x_BLD)
        narrowed = x_BLD if self.narrow is None else self.narrow(x_BLD)
        y = weighted_sum(self.experts(narrowed, experts_BLk), weights_BLk)
        y_BLD = y if self.widen is None else self.widen(y)
        return tap(self.path, y_BLD if self.shared is None else y_BLD + self.shared(x_BLD))
