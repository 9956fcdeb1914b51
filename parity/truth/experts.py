"""Decoders with experts in float64: qwen3_moe and mixtral.

The outputs of single experts are not kept: their order is that of an oracle's partition, which a sum in float64 does not have.

Source: spec/models.md sections 0 and 3; Jiang et al. 2024; Yang et al. 2025.
"""

import numpy as np
import numpy.typing as npt

from parity.truth.dense import Config, Heads, head, pre_norm, refuse, self_attention, stack
from parity.truth.forward import Forward, silu
from parity.truth.rotation import Rotation
from parity.truth.weights import Array


def softmax(x: Array) -> Array:
    """Along the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def highest(scores: Array, k: int) -> npt.NDArray[np.int64]:
    """The `k` highest a row, [L, k], in no promised order."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def weighted_experts(run: Forward, path: str, x: Array, chosen: npt.NDArray[np.int64], weights: Array) -> Array:
    """The sum over the chosen experts of weight times down(silu(gate) * up), [L, D]."""
    out = np.zeros_like(x)
    packed = run.weights.is_packed(f"{path}.gate_proj")
    gate, up, down = (run.weights.matrix(f"{path}.{name}_proj") for name in ("gate", "up", "down"))
    for expert in np.unique(chosen):
        rows, slot = np.nonzero(chosen == expert)
        y = x[rows]
        inner = run.rounded(
            run.rounded(silu(run.product(y, gate[expert], packed=packed))) * run.product(y, up[expert], packed=packed)
        )
        out[rows] += run.rounded(run.product(inner, down[expert], packed=packed) * weights[rows, slot][:, None])
    return run.rounded(out)


def qwen3_moe(run: Forward, config: Config, *, published: bool) -> Array:
    """Softmax over all experts, the most probable chosen, their shares made to sum to one where the config says so."""
    refuse(config, {"hidden_act": "silu", "use_sliding_window": False})
    sizes, eps = Heads.of(config), config["rms_norm_eps"]
    rotation = Rotation.of(sizes.width, config["rope_theta"], config.get("rope_scaling") if published else None)

    def norm(path: str, x: Array) -> Array:
        return run.rms(path, x, eps)

    def experts(path: str, x: Array) -> Array:
        shares = run.rounded(softmax(run.linear(f"{path}.gate", x)))
        chosen = highest(shares, config["num_experts_per_tok"])
        weights = np.take_along_axis(shares, chosen, axis=-1)
        if config["norm_topk_prob"]:
            weights = run.rounded(weights / weights.sum(axis=-1, keepdims=True))
        return run.keep(path, weighted_experts(run, f"{path}.switch_mlp", x, chosen, weights))

    def layer(i: int, path: str, x: Array) -> Array:
        due = config["num_experts"] > 0 and (i + 1) % config["decoder_sparse_step"] == 0
        routed = due and i not in config["mlp_only_layers"]
        return pre_norm(
            run,
            path,
            x,
            norm=norm,
            attention=lambda at, y: self_attention(run, at, y, sizes, rotation=rotation, head_norm=norm),
            feed_forward=experts if routed else lambda at, y: run.gated(at, y, silu),
        )

    return head(run, stack(run, config, layer, norm=norm), tied=config["tie_word_embeddings"])


def mixtral(run: Forward, config: Config, *, published: bool) -> Array:
    """The highest scores chosen, a softmax over the chosen ones alone."""
    refuse(config, {"hidden_act": "silu"})
    sizes, eps = Heads.of(config), config.get("rms_norm_eps", 1e-5)
    rotation = Rotation.of(
        sizes.width, config.get("rope_theta", 1e6), config.get("rope_scaling") if published else None
    )
    window = config.get("sliding_window") if published else None

    def norm(path: str, x: Array) -> Array:
        return run.rms(path, x, eps)

    def layer(_: int, path: str, x: Array) -> Array:
        mixed = self_attention(
            run, f"{path}.self_attn", norm(f"{path}.input_layernorm", x), sizes, rotation=rotation, window=window
        )
        x = run.add(x, mixed)
        at = f"{path}.block_sparse_moe"
        y = norm(f"{path}.post_attention_layernorm", x)
        scores = run.linear(f"{at}.gate", y)
        chosen = highest(scores, config["num_experts_per_tok"])
        weights = run.rounded(softmax(np.take_along_axis(scores, chosen, axis=-1)))
        return run.add(x, run.keep(at, weighted_experts(run, f"{at}.switch_mlp", y, chosen, weights)))

    return head(run, stack(run, config, layer, norm=norm), tied=config.get("tie_word_embeddings", False))
