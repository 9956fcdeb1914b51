"""The draw: from logits and a key to ids, as mlx 0.32.4 does it.

One row [1, V] is drawn by walking its cumulative sum up to a uniform; several rows, and a vector [V], by adding Gumbel noise
and taking the largest. So a row draws another id alone than in a batch, from the same key: both follow its distribution.

Guarantees: logits need not be normalised and may hold -inf, whose tokens are never drawn.
Source: spec/oracles.md section 5.
"""

import mlx.core as mx


def draw(logits_BV: mx.array, key: mx.array) -> mx.array:
    """Ids drawn from softmax(logits), uint32 [B]; of a vector a scalar.

    Args:
        logits_BV: [B, V], or a vector [V]; any floating dtype; temperature and filters already applied.
        key: uint32 [2].

    Numerics: B = 1: e = exp(l - max) in float32, sums sequential in float32, the id is the number of sums <= u * total.
        B > 1, or a vector: argmax of logits + Gumbel noise; the lowest id on a tie.
    """
    return mx.random.categorical(logits_BV, key=key)


def uniforms_behind(ids_B: mx.array, vocabulary: int, key: mx.array) -> mx.array:
    """The uniform behind each id, float32 [B]: what to look at first when two draws disagree.

    Args:
        ids_B: What `draw` gave for this key.
        vocabulary: V.
        key: The key of that draw.

    Returns:
        B = 1: the one uniform that the cumulative sum was walked to. B > 1: the uniform that became the Gumbel noise of the
        id, one of B * V.
    """
    rows = ids_B.shape[0]
    if rows == 1:
        return mx.random.uniform(shape=(1,), key=key)
    drawn_BV = mx.random.uniform(shape=(rows, vocabulary), key=key)
    return mx.take_along_axis(drawn_BV, ids_B[:, None], axis=-1)[:, 0]
