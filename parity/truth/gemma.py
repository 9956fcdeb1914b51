"""Gemma's first three generations in float64: norms by 1 + w, scaled embeddings, gated gelu, a tied head.

`published` decides where the oracle is known to depart from the published model: gemma2 sees all positions in every layer in
the oracle, in every second one as published; gemma3's embedding scale is rounded to bfloat16 in the oracle, whatever the dtype.

Source: spec/models.md section 8; Gemma Team 2024, 2024, 2025.
"""

import numpy as np

from parity.truth.dense import Config, Heads, head, refuse, self_attention, stack
from parity.truth.forward import Forward, gelu, gelu_tanh
from parity.truth.rotation import Rotation
from parity.truth.weights import Array, to_dtype


def gemma(run: Forward, config: Config, *, published: bool) -> Array:
    """The first: two norms a layer, gelu with the error function in the oracle, with tanh as published."""
    sizes, eps = Heads.of(config), config["rms_norm_eps"]
    rotation = Rotation.of(sizes.width, config.get("rope_theta", 1e4))

    def norm(path: str, x: Array) -> Array:
        return run.rms(path, x, eps, plus_one=True)

    def layer(_: int, path: str, x: Array) -> Array:
        mixed = self_attention(run, f"{path}.self_attn", norm(f"{path}.input_layernorm", x), sizes, rotation=rotation)
        x = run.add(x, mixed)
        activation = gelu_tanh if published and config.get("hidden_activation") == "gelu_pytorch_tanh" else gelu
        return run.add(x, run.gated(f"{path}.mlp", norm(f"{path}.post_attention_layernorm", x), activation))

    hidden = stack(run, config, layer, norm=norm, embedding=_scale(run, config))
    return head(run, hidden, tied=True)


def gemma2(run: Forward, config: Config, *, published: bool) -> Array:
    """The second: four norms a layer, soft caps on scores and logits."""
    refuse(config, {"attention_bias": False})
    sizes, eps = Heads.of(config), config["rms_norm_eps"]
    rotation = Rotation.of(sizes.width, config.get("rope_theta", 1e4))

    def norm(path: str, x: Array) -> Array:
        return run.rms(path, x, eps, plus_one=True)

    def layer(i: int, path: str, x: Array) -> Array:
        mixed = self_attention(
            run,
            f"{path}.self_attn",
            norm(f"{path}.input_layernorm", x),
            sizes,
            rotation=rotation,
            scale=config.get("query_pre_attn_scalar", 144.0) ** -0.5,
            cap=config.get("attn_logit_softcapping", 50.0),
            window=config["sliding_window"] if published and i % 2 == 0 else None,
        )
        x = run.add(x, norm(f"{path}.post_attention_layernorm", mixed))
        fed = run.gated(f"{path}.mlp", norm(f"{path}.pre_feedforward_layernorm", x), gelu_tanh)
        return run.add(x, norm(f"{path}.post_feedforward_layernorm", fed))

    hidden = stack(run, config, layer, norm=norm, embedding=_scale(run, config))
    cap = config.get("final_logit_softcapping", 30.0)
    return run.rounded(np.tanh(head(run, hidden, tied=True) / cap) * cap)


def gemma3(run: Forward, config: Config, *, published: bool) -> Array:
    """The third: norms of heads, windows with a full layer after every few, two rotations."""
    refuse(config, {"attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    sizes, eps = Heads.of(config), config.get("rms_norm_eps", 1e-6)
    near = Rotation.of(sizes.width, config.get("rope_local_base_freq", 1e4))
    far = Rotation.of(sizes.width, config.get("rope_theta", 1e6), config.get("rope_scaling"))
    every = config.get("sliding_window_pattern", 6)

    def norm(path: str, x: Array) -> Array:
        return run.rms(path, x, eps, plus_one=True)

    def layer(i: int, path: str, x: Array) -> Array:
        sliding = (i + 1) % every != 0
        mixed = self_attention(
            run,
            f"{path}.self_attn",
            norm(f"{path}.input_layernorm", x),
            sizes,
            rotation=near if sliding else far,
            scale=config.get("query_pre_attn_scalar", 256.0) ** -0.5,
            window=config.get("sliding_window", 512) if sliding else None,
            head_norm=norm,
        )
        x = run.add(x, norm(f"{path}.post_attention_layernorm", mixed))
        fed = run.gated(f"{path}.mlp", norm(f"{path}.pre_feedforward_layernorm", x), gelu_tanh)
        return run.add(x, norm(f"{path}.post_feedforward_layernorm", fed))

    scale = np.array([config["hidden_size"] ** 0.5])
    if not published:
        scale = to_dtype(scale, "bf16")
    hidden = stack(run, config, layer, norm=norm, embedding=float(to_dtype(scale, run.weights.dtype)[0]))
    return head(run, hidden, tied="lm_head.weight" not in run.weights)


def _scale(run: Forward, config: Config) -> float:
    return float(to_dtype(np.array([config["hidden_size"] ** 0.5]), run.weights.dtype)[0])
