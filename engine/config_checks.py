"""Checks that many families make on their config: keys that mean something else at one value only, and heads that fit.

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


def check_heads(*, heads: int, kv_heads: int, head_width: int, rotated: int | None = None) -> None:
    """Refuse heads that cannot be grouped, or rotated pairwise.

    Args:
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_width: Elements of a head.
        rotated: Elements of a head that rotate; all of them where absent.

    Raises:
        ConfigError: They do not fit together.
    """
    width = head_width if rotated is None else rotated
    if min(heads, kv_heads, width) < 1 or heads % kv_heads or width % 2 or width > head_width:
        raise ConfigError(
            "the heads of config.json do not fit together",
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_width,
            rotated=width,
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


def unscaled_theta(parameters: Mapping[str, Any] | None, *, otherwise: float) -> float:
    """The base that `rope_parameters` holds, for families whose rotation is never scaled.

    Args:
        parameters: `rope_parameters`, or None.
        otherwise: The base where it holds none.

    Raises:
        ConfigError: It asks for more than a base.
    """
    entry = dict(parameters or {})
    theta = entry.pop("rope_theta", otherwise)
    if entry not in ({}, {"rope_type": "default"}) or isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ConfigError(
            "rope_parameters is not as expected",
            found=dict(parameters or {}),
            expected='{"rope_theta": a number, "rope_type": "default"}',
            next_step="use a snapshot whose rotation is not scaled",
        )
    return float(theta)
