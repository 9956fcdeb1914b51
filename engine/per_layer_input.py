"""Per-layer inputs: every layer gets a small vector of its own for each token, looked up and projected beside the stream.

`PerLayerInputs` makes all of them once a forward; `PerLayerGate` lets one layer take its own in. Gemma 3n and the small
models of Gemma 4 have both. Source: spec/models.md section 5.
"""

from dataclasses import dataclass

import mlx.core as mx

from engine.activation import gelu_approx
from engine.checkpoint import Checkpoint
from engine.linear import Embedding, Linear
from engine.norm import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PerLayerInputs:
    """(norm(project(x) / sqrt(D)) + lookup(ids) * sqrt(P)) / sqrt(2), for P elements a layer.

    Attributes:
        embedding: [V', layers * P]; ids from V' on look up id 0.
        projection: [layers * P, D].
        norm: Over the P elements of one layer.
        vocabulary: V'.
        layers: Layers of the model.
        inner: P.
        width: D.
    """

    embedding: Embedding
    projection: Linear
    norm: RMSNorm
    vocabulary: int
    layers: int
    inner: int
    width: int

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, path: str, *, vocabulary: int, layers: int, inner: int, width: int, eps: float
    ) -> "PerLayerInputs":
        """Take the table, the projection and the norm from the checkpoint; `path` is the model's."""
        return cls(
            embedding=Embedding.take(
                checkpoint, f"{path}.embed_tokens_per_layer", vocabulary=vocabulary, width=layers * inner
            ),
            projection=Linear.take(
                checkpoint, f"{path}.per_layer_model_projection", inputs=width, outputs=layers * inner
            ),
            norm=RMSNorm.take(checkpoint, f"{path}.per_layer_projection_norm", width=inner, eps=eps),
            vocabulary=vocabulary,
            layers=layers,
            inner=inner,
            width=width,
        )

    def __call__(self, ids_BL: mx.array, x_BLD: mx.array) -> tuple[mx.array, ...]:
        """One [B, L, P] a layer.

        Args:
            ids_BL: Token ids.
            x_BLD: Their embeddings, already scaled.

        Numerics: the three factors are rounded to the arrays' dtype; each product and the sum are rounded.
        """
        known_BL = mx.where(ids_BL < self.vocabulary, ids_BL, mx.zeros_like(ids_BL))
        shape = (self.layers, self.inner)
        looked_up = mx.unflatten(self.embedding(known_BL) * self.inner**0.5, -1, shape)
        projected = self.norm(mx.unflatten(self.projection(x_BLD) * self.width**-0.5, -1, shape))
        inputs_BLNP = (projected + looked_up) * 2.0**-0.5
        return tuple(inputs_BLNP[:, :, i] for i in range(self.layers))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PerLayerGate:
    """norm(project(gelu(gate(x)) * input)): what a layer adds to the stream for its own input.

    Attributes:
        gate: [P, D].
        projection: [D, P].
        norm: Over D.
    """

    gate: Linear
    projection: Linear
    norm: RMSNorm

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, inner: int, width: int, eps: float) -> "PerLayerGate":
        """Take the layer's three modules from the checkpoint; `path` is the layer's."""
        return cls(
            gate=Linear.take(checkpoint, f"{path}.per_layer_input_gate", inputs=width, outputs=inner),
            projection=Linear.take(checkpoint, f"{path}.per_layer_projection", inputs=inner, outputs=width),
            norm=RMSNorm.take(checkpoint, f"{path}.post_per_layer_input_norm", width=width, eps=eps),
        )

    def __call__(self, x_BLD: mx.array, input_BLP: mx.array) -> mx.array:
        """What to add for x [B, L, D] and its input [B, L, P]; [B, L, D]."""
        return self.norm(self.projection(gelu_approx(self.gate(x_BLD)) * input_BLP))
