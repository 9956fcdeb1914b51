"""One file a family, named after its model_type, each in the order Config, layers of its own, Block, Model.

`family_module` is the whole table: a model_type is supported if it stands here, and config.json is never sniffed for more.
"""

import difflib
from importlib import import_module
from types import ModuleType
from typing import Final

from engine.errors import ConfigError

FAMILIES: Final = (
    "cohere2",
    "deepseek_v3",
    "deepseek_v32",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n",
    "gemma4_text",
    "glm4",
    "glm4_moe",
    "glm_moe_dsa",
    "gpt_oss",
    "granite",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "llama",
    "mamba2",
    "minicpm",
    "minicpm3",
    "ministral3",
    "mistral",
    "mistral3",
    "mixtral",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
    "starcoder2",
)


def family_module(model_type: object) -> ModuleType:
    """The module that implements `model_type`.

    Raises:
        ConfigError: No family of that name.
    """
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported",
            supported=", ".join(FAMILIES),
            near=", ".join(difflib.get_close_matches(str(model_type), FAMILIES)) or "none",
            next_step="use a snapshot of a supported family",
        )
    return import_module(f"engine.families.{model_type}")
