"""The gated delta rule in float64: qwen3_next, qwen3_5 and qwen3_5_moe.

The recurrence is float32 in every run, whatever the dtype; its own rounding is put in at the end of each read.

Source: spec/models.md section 4; Yang et al. 2024 (gated delta networks).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.truth.dense import Config, Heads, head, stack
from parity.truth.experts import highest, softmax, weighted_experts
from parity.truth.forward import Forward, heads, sigmoid, silu
from parity.truth.rotation import Rotation
from parity.truth.weights import Array, NoTruthError

UNIT_EPS = 1e-6  # added to the sum of squares of a query or a key


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Heads of the linear layers: K of queries and keys of width E, H of values of width V; positions of the convolution."""

    K: int
    H: int
    E: int
    V: int
    kernel: int

    @classmethod
    def of(cls, config: Config) -> "DeltaSizes":
        """From the config."""
        return cls(
            K=config["linear_num_key_heads"],
            H=config["linear_num_value_heads"],
            E=config["linear_key_head_dim"],
            V=config["linear_value_head_dim"],
            kernel=config["linear_conv_kernel_dim"],
        )


def qwen3_5(run: Forward, config: Config, *, published: bool) -> Array:
    """qwen3_5 and qwen3_5_moe: the text model inside a wrapper, projections one by one."""
    del published
    text = {**config["text_config"], "tied": config.get("tie_word_embeddings", False)}
    if "tie_word_embeddings" in config["text_config"]:
        text["tied"] = config["text_config"]["tie_word_embeddings"]
    rope = dict(text.get("rope_parameters") or {})
    return _hybrid(run, text, rope, root="language_model.")


def qwen3_next(run: Forward, config: Config, *, published: bool) -> Array:
    """qwen3_next: two fused projections into the mixer, experts with a shared one beside them."""
    del published
    rope = {
        **(config.get("rope_scaling") or {}),
        "rope_theta": config["rope_theta"],
        "partial_rotary_factor": config["partial_rotary_factor"],
    }
    return _hybrid(run, {**config, "tied": config.get("tie_word_embeddings", False)}, rope, root="")


def _hybrid(run: Forward, config: Config, rope: Mapping[str, Any], *, root: str) -> Array:
    if any(name.endswith("conv1d.weight") and run.weights.vector(name).shape[-1] != 1 for name in run.weights.tensors):
        raise NoTruthError("the snapshot has the hub's layout")
    eps, sizes = config["rms_norm_eps"], Heads.of(config)
    part = float(rope.get("partial_rotary_factor", 0.25))
    scaling = {k: v for k, v in rope.items() if k in ("rope_type", "factor", "original_max_position_embeddings")}
    rotation = Rotation.of(int(sizes.width * part), float(rope.get("rope_theta", 1e5)), scaling)

    def norm(path: str, x: Array) -> Array:
        return run.rms(path, x, eps)

    def layer(i: int, path: str, x: Array) -> Array:
        y = norm(f"{path}.input_layernorm", x)
        if (i + 1) % config.get("full_attention_interval", 4) == 0:
            x = run.add(x, _gated_attention(run, f"{path}.self_attn", y, sizes, rotation=rotation, eps=eps))
        else:
            x = run.add(x, _mixer(run, f"{path}.linear_attn", y, DeltaSizes.of(config), eps))
        return run.add(x, _feed_forward(run, f"{path}.mlp", norm(f"{path}.post_attention_layernorm", x), config))

    hidden = stack(run, config, layer, norm=norm, root=f"{root}model")
    logits = head(run, hidden, tied=config["tied"], root=root)
    return run.keep("language_model", logits) if root else logits


def _gated_attention(run: Forward, path: str, x: Array, sizes: Heads, *, rotation: Rotation, eps: float) -> Array:
    """Attention whose output is multiplied by a sigmoid of a second half of the query projection."""
    q, gate = np.split(heads(run.linear(f"{path}.q_proj", x), 2 * sizes.width), 2, axis=-1)
    k, v = (heads(run.linear(f"{path}.{name}_proj", x), sizes.width) for name in "kv")
    q, k = run.rms(f"{path}.q_norm", q, eps), run.rms(f"{path}.k_norm", k, eps)
    mixed = run.attend(q, k, v, scale=sizes.width**-0.5, rotation=rotation)
    opened = run.rounded(mixed * run.rounded(sigmoid(gate.reshape(mixed.shape))))
    return run.keep(path, run.linear(f"{path}.o_proj", opened))


def _mixer(run: Forward, path: str, x: Array, sizes: DeltaSizes, eps: float) -> Array:
    """Projections, convolution, delta rule, gated norm, projection."""
    L = x.shape[0]
    qkv, z, b, a = _projected(run, path, x, sizes)
    filters = run.weights.vector(f"{path}.conv1d.weight")[..., 0]  # [C, kernel]
    padded = np.concatenate([np.zeros((sizes.kernel - 1, qkv.shape[1])), qkv])
    windows = np.stack([padded[i : i + L] for i in range(sizes.kernel)], axis=-1)  # [L, C, kernel]
    mixed = run.keep(f"{path}.conv1d", run.rounded((windows * filters).sum(axis=-1)))
    q, k, v = np.split(run.rounded(silu(mixed)), np.cumsum([sizes.K * sizes.E] * 2), axis=-1)
    q, k, v = heads(q, sizes.E), heads(k, sizes.E), heads(v, sizes.V)
    unit_eps = UNIT_EPS / sizes.E
    q, k = run.unit(q, unit_eps) / sizes.E, run.unit(k, unit_eps) * sizes.E**-0.5
    group = sizes.H // sizes.K
    q, k = np.repeat(q, group, axis=1), np.repeat(k, group, axis=1)
    A_log, dt_bias = (run.weights.vector(f"{path}.{name}") for name in ("A_log", "dt_bias"))
    decay = np.exp(-np.exp(A_log) * np.logaddexp(run.rounded(a + dt_bias), 0.0))
    strength = run.rounded(sigmoid(b))
    state = np.zeros((sizes.H, sizes.V, sizes.E))
    reads = np.empty((L, sizes.H, sizes.V))
    for i in range(L):
        state = state * decay[i][:, None, None]
        correction = (v[i] - (state * k[i][:, None]).sum(axis=-1)) * strength[i][:, None]
        state = state + correction[..., None] * k[i][:, None]
        reads[i] = (state * q[i][:, None]).sum(axis=-1)
    y = run.rounded(reads)
    weight = run.weights.vector(f"{path}.norm.weight")
    gated = run.rounded(run.rounded(run.unit(y, eps) * weight) * silu(heads(z, sizes.V)))
    run.keep(f"{path}.norm", gated)
    return run.keep(path, run.linear(f"{path}.out_proj", gated.reshape(L, -1)))


def _projected(run: Forward, path: str, x: Array, sizes: DeltaSizes) -> tuple[Array, Array, Array, Array]:
    """Channels of queries, keys and values; gate; strength; decay. Fused projections are grouped by key head."""
    if f"{path}.in_proj_qkvz.weight" not in run.weights:
        qkv, z, b, a = (run.linear(f"{path}.in_proj_{name}", x) for name in ("qkv", "z", "b", "a"))
        return qkv, z, b, a
    L, group = x.shape[0], sizes.H // sizes.K
    fused = run.linear(f"{path}.in_proj_qkvz", x).reshape(L, sizes.K, -1)
    cuts = np.cumsum([sizes.E, sizes.E, group * sizes.V])
    q, k, v, z = (part.reshape(L, -1) for part in np.split(fused, cuts, axis=-1))
    b, a = (
        part.reshape(L, -1)
        for part in np.split(run.linear(f"{path}.in_proj_ba", x).reshape(L, sizes.K, -1), 2, axis=-1)
    )
    return np.concatenate([q, k, v], axis=-1), z, b, a


def _feed_forward(run: Forward, path: str, x: Array, config: Config) -> Array:
    """Dense, or experts with a shared one."""
    if f"{path}.gate.weight" not in run.weights:
        return run.gated(path, x, silu)
    shares = run.rounded(softmax(run.linear(f"{path}.gate", x)))
    chosen = highest(shares, config["num_experts_per_tok"])
    weights = np.take_along_axis(shares, chosen, axis=-1)
    if config.get("norm_topk_prob", True):
        weights = run.rounded(weights / weights.sum(axis=-1, keepdims=True))
    routed = weighted_experts(run, f"{path}.switch_mlp", x, chosen, weights)
    shared = run.gated(f"{path}.shared_expert", x, silu)
    opened = run.rounded(run.rounded(sigmoid(run.linear(f"{path}.shared_expert_gate", x))) * shared)
    return run.keep(path, run.add(routed, opened))
