"""Names and shapes of a family's checkpoint tensors, as a pure function of its config.

Guarantees: exactly the tensors that a hub snapshot of that config carries, none optional. A new family is one function
and one row of `FAMILIES`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from parity.errors import SnapshotError

Shapes = dict[str, tuple[int, ...]]


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Every checkpoint tensor of a config, name to shape.

    Raises:
        SnapshotError: The model_type is not in `FAMILIES`, or the config lacks a key that shapes depend on.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise SnapshotError(
            f"no tiny snapshot of model_type {model_type!r} can be made",
            known=", ".join(FAMILIES),
            next_step="use one of these, or add the family to parity/models/tiny_shapes.py",
        )
    try:
        return family(config)
    except KeyError as error:
        raise SnapshotError(
            f"the config of a tiny {model_type} lacks a key",
            key=error.args[0],
            next_step="add it to the config",
        ) from error


def _llama(config: Mapping[str, Any]) -> Shapes:
    D, V, F, H = (config[k] for k in ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads"))
    K = config.get("num_key_value_heads", H)
    E = config.get("head_dim") or D // H
    out: Shapes = {"model.embed_tokens.weight": (V, D)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        out[f"{layer}.input_layernorm.weight"] = (D,)
        out |= _linear(f"{layer}.self_attn.q_proj", H * E, D, bias=config.get("attention_bias", False))
        out |= _linear(f"{layer}.self_attn.k_proj", K * E, D, bias=config.get("attention_bias", False))
        out |= _linear(f"{layer}.self_attn.v_proj", K * E, D, bias=config.get("attention_bias", False))
        out |= _linear(f"{layer}.self_attn.o_proj", D, H * E, bias=config.get("attention_bias", False))
        out[f"{layer}.post_attention_layernorm.weight"] = (D,)
        out |= _linear(f"{layer}.mlp.gate_proj", F, D, bias=config.get("mlp_bias", False))
        out |= _linear(f"{layer}.mlp.up_proj", F, D, bias=config.get("mlp_bias", False))
        out |= _linear(f"{layer}.mlp.down_proj", D, F, bias=config.get("mlp_bias", False))
    out["model.norm.weight"] = (D,)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (V, D)
    return out


def _linear(path: str, outputs: int, inputs: int, *, bias: bool) -> Shapes:
    weight: Shapes = {f"{path}.weight": (outputs, inputs)}
    return weight | {f"{path}.bias": (outputs,)} if bias else weight


FAMILIES: Final[Mapping[str, Callable[[Mapping[str, Any]], Shapes]]] = {"llama": _llama}
