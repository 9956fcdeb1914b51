"""Dense decoders in float64: llama and its kin, each a few lines over the layers of `forward`.

Each function leaves the outputs of its modules in the forward and returns logits [L, V]. Where an oracle is known to leave out
what a config asks for, `published` decides: False computes as the oracle does, True as the config says.

Source: spec/models.md sections 1, 2 and 8 and the papers named there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.truth.forward import Activation, Forward, gelu, gelu_tanh, heads, silu
from parity.truth.rotation import Rotation
from parity.truth.weights import Array, NoTruthError

Config = Mapping[str, Any]
Layer = Callable[[int, str, Array], Array]


def refuse(config: Config, known: Mapping[str, object]) -> None:
    """Refuse a config that asks for another value than the one that is written here.

    Raises:
        NoTruthError: It does.
    """
    for key, value in known.items():
        if config.get(key, value) != value:
            raise NoTruthError(f"{key} = {config[key]!r} has no float64 truth")


def stack(
    run: Forward, config: Config, layer: Layer, *, norm: Callable[[str, Array], Array], embedding: float = 1.0,
    root: str = "model",
) -> Array:  # fmt: skip
    """Embedding, layers, final norm: hidden states [L, D]."""
    x = run.scaled(run.embedding(f"{root}.embed_tokens"), embedding)
    for i in range(config["num_hidden_layers"]):
        path = f"{root}.layers.{i}"
        x = run.keep(path, layer(i, path, x))
    return run.keep(root, norm(f"{root}.norm", x))


def head(run: Forward, hidden: Array, *, tied: bool, root: str = "") -> Array:
    """Logits by `lm_head`, or by the embedding."""
    if tied:
        return run.head(f"{root}model.embed_tokens", hidden)
    return run.keep(f"{root}lm_head", run.head(f"{root}lm_head", hidden))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Sizes of attention, as a config has them."""

    query: int
    key: int
    width: int

    @classmethod
    def of(cls, config: Config) -> "Heads":
        """From the usual keys and their usual defaults."""
        query = config["num_attention_heads"]
        return cls(
            query=query,
            key=config.get("num_key_value_heads") or query,
            width=config.get("head_dim") or config["hidden_size"] // query,
        )


def self_attention(
    run: Forward,
    path: str,
    x: Array,
    sizes: Heads,
    *,
    rotation: Rotation | None,
    scale: float | None = None,
    window: int | None = None,
    cap: float | None = None,
    head_norm: Callable[[str, Array], Array] | None = None,
    whole_norm: Callable[[str, Array], Array] | None = None,
) -> Array:
    """Four projections around attention; norms of each head's query and key, or of all of them together, where given."""
    q, k, v = (run.linear(f"{path}.{name}_proj", x) for name in "qkv")
    if whole_norm is not None:
        q, k = whole_norm(f"{path}.q_norm", q), whole_norm(f"{path}.k_norm", k)
    q, k, v = (heads(part, sizes.width) for part in (q, k, v))
    if head_norm is not None:
        q, k = head_norm(f"{path}.q_norm", q), head_norm(f"{path}.k_norm", k)
    mixed = run.attend(
        q, k, v, scale=sizes.width**-0.5 if scale is None else scale, rotation=rotation, window=window, cap=cap
    )
    return run.keep(path, run.linear(f"{path}.o_proj", mixed))


def pre_norm(
    run: Forward,
    path: str,
    x: Array,
    *,
    norm: Callable[[str, Array], Array],
    attention: Callable[[str, Array], Array],
    feed_forward: Callable[[str, Array], Array],
    branch: float = 1.0,
) -> Array:
    """x + attention(norm(x)), then x + mlp(norm(x)), each branch times a factor."""
    x = run.add(x, run.scaled(attention(f"{path}.self_attn", norm(f"{path}.input_layernorm", x)), branch))
    return run.add(x, run.scaled(feed_forward(f"{path}.mlp", norm(f"{path}.post_attention_layernorm", x)), branch))


def llama(run: Forward, config: Config, *, published: bool) -> Array:
    """llama, mistral, qwen2, qwen3, smollm3, granite and minicpm: they differ by constants, norms and which layers rotate."""
    kind = config["model_type"]
    refuse(config, {"hidden_act": "silu", "use_sliding_window": False})
    sizes, eps = Heads.of(config), config["rms_norm_eps"]
    rotation = Rotation.of(
        sizes.width,
        float(config.get("rope_theta") or {"qwen2": 1e6, "minicpm": 1e6}.get(kind, 1e4)),
        config.get("rope_scaling"),
        neighbours=config.get("rope_traditional", False),
        max_positions=config.get("max_position_embeddings"),
    )
    windows = _windows(config, published=published)
    skips = _without_rotation(config) if kind == "smollm3" else frozenset()

    def norm(path: str, x: Array) -> Array:
        return run.rms(path, x, eps)

    def layer(i: int, path: str, x: Array) -> Array:
        return pre_norm(
            run,
            path,
            x,
            norm=norm,
            attention=lambda at, y: self_attention(
                run,
                at,
                y,
                sizes,
                rotation=None if i in skips else rotation,
                window=windows[i],
                scale=config.get("attention_multiplier"),
                head_norm=norm if kind == "qwen3" else None,
            ),
            feed_forward=lambda at, y: run.gated(at, y, silu),
            branch=_branch(config),
        )

    hidden = stack(
        run, config, layer, norm=norm, embedding=config.get("embedding_multiplier", config.get("scale_emb", 1.0))
    )
    if "dim_model_base" in config:
        hidden = run.rounded(hidden / (config["hidden_size"] / config["dim_model_base"]))
    tied = config.get("tie_word_embeddings", kind not in ("qwen3", "minicpm"))
    logits = head(run, hidden, tied=tied)
    return run.rounded(logits / config["logits_scaling"]) if "logits_scaling" in config else logits


def phi3(run: Forward, config: Config, *, published: bool) -> Array:
    """A llama with fused projections and a rotation stretched pair by pair."""
    refuse(config, {"hidden_act": "silu"})
    sizes, eps = Heads.of(config), config["rms_norm_eps"]
    scaling = config.get("rope_scaling")
    context = config.get("original_max_position_embeddings", 4096)
    if scaling is not None:
        scaling = {**scaling, "original_max_position_embeddings": context}
        if published and len(run.ids) <= context:
            scaling["long_factor"] = scaling["short_factor"]
    rotation = Rotation.of(
        int(sizes.width * config.get("partial_rotary_factor", 1.0)),
        config.get("rope_theta", 1e4),
        scaling,
        max_positions=config.get("max_position_embeddings", 131072),
    )

    def norm(path: str, x: Array) -> Array:
        return run.rms(path, x, eps)

    def attention(path: str, x: Array) -> Array:
        cuts = np.cumsum([sizes.query * sizes.width, sizes.key * sizes.width])
        q, k, v = (heads(p, sizes.width) for p in np.split(run.linear(f"{path}.qkv_proj", x), cuts, axis=-1))
        window = config.get("sliding_window") if published else None
        mixed = run.attend(q, k, v, scale=sizes.width**-0.5, rotation=rotation, window=window)
        return run.keep(path, run.linear(f"{path}.o_proj", mixed))

    def layer(_: int, path: str, x: Array) -> Array:
        return pre_norm(
            run, path, x, norm=norm, attention=attention, feed_forward=lambda at, y: run.fused_gated(at, y, silu)
        )

    return head(run, stack(run, config, layer, norm=norm), tied=config.get("tie_word_embeddings", False))


def olmo(run: Forward, config: Config, *, published: bool) -> Array:
    """olmo2 and olmo3: norms after each branch, and over all heads of queries and keys together."""
    refuse(config, {"hidden_act": "silu"})
    sizes, eps = Heads.of(config), config["rms_norm_eps"]
    base, scaling = config.get("rope_theta", 1e4), config.get("rope_scaling")
    windowed = _windows(config, published=published) if config["model_type"] == "olmo3" else {}
    if config["model_type"] == "olmo3" and config.get("layer_types") is None:
        windowed = {
            i: None if (i + 1) % 4 == 0 else config["sliding_window"] for i in range(config["num_hidden_layers"])
        }
    full, near = Rotation.of(sizes.width, base, scaling), Rotation.of(sizes.width, base)

    def norm(path: str, x: Array) -> Array:
        return run.rms(path, x, eps)

    def layer(i: int, path: str, x: Array) -> Array:
        window = windowed.get(i)
        mixed = self_attention(
            run,
            f"{path}.self_attn",
            x,
            sizes,
            rotation=full if window is None else near,
            window=window,
            whole_norm=norm,
        )
        x = run.add(x, norm(f"{path}.post_attention_layernorm", mixed))
        return run.add(x, norm(f"{path}.post_feedforward_layernorm", run.gated(f"{path}.mlp", x, silu)))

    return head(run, stack(run, config, layer, norm=norm), tied=config.get("tie_word_embeddings", False))


def starcoder2(run: Forward, config: Config, *, published: bool) -> Array:
    """Norms with mean and bias, biases everywhere, a feed-forward layer without a gate."""
    sizes, eps = Heads.of(config), config.get("norm_epsilon", 1e-5)
    rotation = Rotation.of(sizes.width, config.get("rope_theta", 1e5))
    activation: Activation = gelu_tanh if published and config.get("hidden_act") == "gelu_pytorch_tanh" else gelu

    def norm(path: str, x: Array) -> Array:
        return run.layer_norm(path, x, eps)

    def feed_forward(path: str, x: Array) -> Array:
        inner = run.rounded(activation(run.linear(f"{path}.c_fc", x)))
        return run.keep(path, run.linear(f"{path}.c_proj", inner))

    def layer(_: int, path: str, x: Array) -> Array:
        return pre_norm(
            run,
            path,
            x,
            norm=norm,
            attention=lambda at, y: self_attention(run, at, y, sizes, rotation=rotation),
            feed_forward=feed_forward,
        )

    return head(run, stack(run, config, layer, norm=norm), tied=config.get("tie_word_embeddings", True))


def glm4(run: Forward, config: Config, *, published: bool) -> Array:
    """A norm before and after each branch; part of each head rotates, neighbours as pairs."""
    refuse(config, {"hidden_act": "silu", "tie_word_embeddings": False})
    sizes, eps = Heads.of(config), config["rms_norm_eps"]
    rotation = Rotation.of(
        int(sizes.width * config.get("partial_rotary_factor", 0.5)),
        config["rope_theta"],
        config.get("rope_scaling") if published else None,
        neighbours=config.get("rope_traditional", True),
    )

    def norm(path: str, x: Array) -> Array:
        return run.rms(path, x, eps)

    def layer(_: int, path: str, x: Array) -> Array:
        mixed = self_attention(run, f"{path}.self_attn", norm(f"{path}.input_layernorm", x), sizes, rotation=rotation)
        x = run.add(x, norm(f"{path}.post_self_attn_layernorm", mixed))
        fed = run.fused_gated(f"{path}.mlp", norm(f"{path}.post_attention_layernorm", x), silu)
        return run.add(x, norm(f"{path}.post_mlp_layernorm", fed))

    return head(run, stack(run, config, layer, norm=norm), tied=False)


def _windows(config: Config, *, published: bool) -> dict[int, int | None]:
    """Positions that each layer sees. As published, a mistral sees its window in every layer, named or not."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    everywhere = published and config["model_type"] == "mistral" and kinds is None
    return {
        i: window if everywhere or (kinds is not None and kinds[i] == "sliding_attention") else None
        for i in range(config["num_hidden_layers"])
    }


def _without_rotation(config: Config) -> frozenset[int]:
    listed = config.get("no_rope_layers")
    layers = range(config["num_hidden_layers"])
    if listed is not None:
        return frozenset(i for i in layers if not listed[i])
    return frozenset(i for i in layers if (i + 1) % config.get("no_rope_layer_interval", 4) == 0)


def _branch(config: Config) -> float:
    if "scale_depth" in config:
        return float(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
    return float(config.get("residual_multiplier", 1.0))
