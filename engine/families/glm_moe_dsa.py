"""glm_moe_dsa: the graph of deepseek_v32 in GLM's words.

Its config.json has the same sizes under the same keys, and three differences: rotary parameters stand in one entry, nothing
may be left to a default, and the indexer turns neighbouring pairs as attention does. The published models let some layers
reuse the selection of an earlier one; the oracle has an indexer in every layer, and so has this family.

Source: spec/models.md section 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.config_checks import check_fixed
from engine.families import deepseek_v32
from engine.rope_entry import read_rope_entry

FIXED: Final[Mapping[str, object]] = {**deepseek_v32.FIXED, "rope_interleave": True}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "ep_size": "how experts were spread over machines",
    "head_dim": "the width of the turned part, which qk_rope_head_dim says",
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "num_key_value_heads": "latent attention has no heads of keys and values",
    "qk_head_dim": "the sum of two keys",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """config.json of a glm_moe_dsa; field names are its keys."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    kv_lora_rank: int
    q_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_head_dim: int
    index_n_heads: int
    index_topk: int
    vocab_size: int
    n_routed_experts: int | None
    n_shared_experts: int | None
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    moe_layer_freq: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    attention_bias: bool
    indexer_rope_interleave: bool = True
    num_nextn_predict_layers: int = 1

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> deepseek_v32.Config:
        """Read config.json into the words of deepseek_v32; refuse what the family does not compute.

        Raises:
            ConfigError: An unknown or missing key, a wrong type or value, or sizes or experts that do not fit together.
        """
        config = read_config(cls, raw, irrelevant=IRRELEVANT)
        check_fixed(raw, FIXED)
        base, scaling = read_rope_entry(config.rope_parameters)
        same = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "rope_parameters"}
        return deepseek_v32.Config(**same, rope_theta=base, rope_scaling=scaling)


class Model:
    """How a glm_moe_dsa is built; what is built is deepseek_v32's model."""

    @staticmethod
    def build(raw: Mapping[str, Any], checkpoint: Checkpoint) -> deepseek_v32.Model:
        """Build from config.json and its checkpoint, using every tensor once.

        Raises:
            ConfigError: The config is not one that this family computes.
            CheckpointError: A tensor is missing, left over or misshapen.
        """
        return deepseek_v32.Model.of(Config.read(raw), checkpoint)
