"""Checks that many families make on their config: keys with one possible value, heads, experts and layers that fit.

Guarantees: what passes can be computed as the family's file says; nothing is mended or guessed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import ConfigError


def check_fixed(raw: Mapping[str, Any], fixed: Mapping[str, object]) -> None:
    """Refuse a key whose value asks for what the family does not compute.

    Args:
        raw: Parsed config.json.
        fixed: Keys and the one value that each may have; a key may also be absent or null.

    Raises:
        ConfigError: A key has another value.
    """
    for key, value in fixed.items():
        if raw.get(key) not in (None, value):
            raise ConfigError(
                f"{raw.get('model_type')} computes {key} {json.dumps(value)} only",
                found=json.dumps(raw[key]),
                next_step="use a snapshot whose config.json says so",
            )


def check_heads(
    *, heads: int, kv_heads: int, head_width: int, rotated: int | None = None, width: int | None = None
) -> None:
    """Refuse heads that cannot be grouped, or rotated pairwise, or that do not share out the model's width.

    Args:
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_width: Elements of a head.
        rotated: Elements of a head that rotate; all of them where absent.
        width: The model's width, in families whose query heads share it out; not compared where absent.

    Raises:
        ConfigError: They do not fit together.
    """
    turned = head_width if rotated is None else rotated
    shared_out = width is None or heads * head_width == width
    if min(heads, kv_heads, turned) < 1 or heads % kv_heads or turned % 2 or turned > head_width or not shared_out:
        raise ConfigError(
            "the heads of config.json do not fit together",
            **({} if width is None else {"hidden_size": width}),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_width,
            rotated=turned,
            next_step="mend config.json",
        )


def check_layer_types(
    raw: Mapping[str, Any], kinds: Sequence[str], *, layers: int, window: int | None = None, slides: bool = True
) -> None:
    """Refuse a list that does not say of every layer what it sees, or says what the family does not compute.

    Args:
        raw: Parsed config.json, for the message.
        kinds: `layer_types`, or what the family takes for it where it is absent.
        layers: Layers of the model.
        window: `sliding_window`.
        slides: The family computes `sliding_attention` too.

    Raises:
        ConfigError: Another number of entries, another kind, or layers that slide over a window of no positions.
    """
    known = {"full_attention", "sliding_attention"} if slides else {"full_attention"}
    windowless = "sliding_attention" in kinds and (window or 0) < 1
    if len(kinds) != layers or set(kinds) - known or windowless:
        raise ConfigError(
            f"{raw.get('model_type')} has no such layers",
            layer_types=f"{len(kinds)} of kind {', '.join(sorted(set(kinds))) or 'none'}",
            num_hidden_layers=layers,
            **({"sliding_window": window} if slides else {}),
            known="full_attention" + (", or sliding_attention with a sliding_window of at least 1" if slides else ""),
            next_step="mend config.json",
        )


def check_experts(*, experts: int, chosen: int) -> None:
    """Refuse a choice that there are not enough experts for.

    Raises:
        ConfigError: Less than one is chosen, or more than there are.
    """
    if not 1 <= chosen <= experts:
        raise ConfigError(
            "the experts of config.json do not fit together",
            experts=experts,
            num_experts_per_tok=chosen,
            next_step="mend config.json",
        )


def check_full_attention(*, layers: int, interval: int, layer_types: Sequence[str] | None) -> None:
    """Refuse a list of layers that is not full attention every `interval`-th layer and linear attention elsewhere.

    Raises:
        ConfigError: The interval is no count, or `layer_types` is there and says something else.
    """
    if interval < 1:
        raise ConfigError(
            "full_attention_interval counts layers", full_attention_interval=interval, next_step="mend config.json"
        )
    meant = [f"{'linear' if (layer + 1) % interval else 'full'}_attention" for layer in range(layers)]
    if layer_types is not None and list(layer_types) != meant:
        raise ConfigError(
            "layer_types and full_attention_interval contradict each other",
            layer_types=", ".join(layer_types),
            full_attention_interval=interval,
            which_means=", ".join(meant),
            next_step="mend config.json",
        )
