"""What wraps the language models of qwen3_5 and qwen3_5_moe: where their config, their rotation and their tensors stand.

The wrapper is that of a model that sees; its vision part is neither computed nor read. Names of tensors are brought to the
oracle's: `language_model.model.*` and `language_model.lm_head.*`, whatever the checkpoint calls them.

Source: spec/models.md section 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.checkpoint import Checkpoint
from engine.config import read_config
from engine.errors import ConfigError
from engine.rope import Rope, make_rope

LANGUAGE_MODEL: Final = "language_model"
BODY: Final = "language_model.model"
HEAD: Final = "language_model.lm_head"
VISION: Final = ("vision_tower", "model.visual")

FIXED: Final[Mapping[str, object]] = {
    "attn_output_gate": True,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
}
IRRELEVANT: Final[Mapping[str, str]] = {
    **dict.fromkeys(FIXED, "one value only; another is refused"),
    "max_position_embeddings": "a promise about training; positions are not limited here",
    "mtp_num_hidden_layers": "layers of a head that predicts several tokens ahead, which is dropped",
    "mtp_use_dedicated_embeddings": "of the same head",
    "output_router_logits": "asks for another output in training",
    "router_aux_loss_coef": "used in training",
}
OUTER_IRRELEVANT: Final[Mapping[str, str]] = {
    "image_token_id": "of the vision part",
    "language_model_only": "whether the vision part was saved; it is not read",
    "video_token_id": "of the vision part",
    "vision_config": "of the vision part",
    "vision_end_token_id": "of the vision part",
    "vision_start_token_id": "of the vision part",
}
DROPPED: Final[Mapping[str, str]] = {
    r"(vision_tower|model\.visual).*": "the vision part",
    r"(.*\.)?mtp\..*": "a head that predicts several tokens ahead, which mlx-lm does not have",
}
IMAGE_AXES: Final = frozenset({"mrope_interleaved", "mrope_section"})  # a text has one position on all of them
ROTATION: Final = frozenset({"partial_rotary_factor", "rope_theta"})
THETA: Final = 100000.0
ROTATED_PART: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """The outer keys of config.json."""

    text_config: Mapping[str, Any]
    tie_word_embeddings: bool | None = None


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`text_config`, or all of a config that has none.

    Raises:
        ConfigError: The wrapper has an unknown key, or says otherwise than `text_config` whether the head is tied.
    """
    if "text_config" not in raw:
        return raw
    outer = read_config(Wrapper, raw, irrelevant=OUTER_IRRELEVANT)
    inner = outer.text_config.get("tie_word_embeddings", False)
    if outer.tie_word_embeddings not in (None, inner):
        raise ConfigError(
            "config.json and its text_config contradict each other",
            tie_word_embeddings=outer.tie_word_embeddings,
            in_text_config=inner,
            next_step="mend config.json",
        )
    return outer.text_config


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextRotation:
    """How the first elements of a head rotate.

    Attributes:
        width: Elements that rotate.
        base: `rope_theta`.
        scaling: What is left of `rope_parameters`.
    """

    width: int
    base: float
    scaling: Mapping[str, Any]

    @classmethod
    def read(cls, parameters: Mapping[str, Any] | None, *, head_width: int) -> "TextRotation":
        """Read `rope_parameters`; where it is absent, base and part are the oracle's own.

        Raises:
            ConfigError: Base or part is no positive number.
        """
        given = {"rope_theta": THETA, "partial_rotary_factor": ROTATED_PART, **(parameters or {})}
        for key in sorted(ROTATION):
            value = given[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(
                    "rope_parameters has a value that is no positive number",
                    key=key,
                    value=value,
                    next_step="mend config.json",
                )
        return cls(
            width=int(head_width * given["partial_rotary_factor"]),
            base=float(given["rope_theta"]),
            scaling={key: value for key, value in given.items() if key not in ROTATION | IMAGE_AXES},
        )

    @property
    def rope(self) -> Rope:
        """The rotation."""
        return make_rope(self.width, base=self.base, scaling=self.scaling)


def convert_names(checkpoint: Checkpoint) -> bool:
    """Give the language model's tensors the oracle's names, and say whether the checkpoint is as on the hub.

    Filters of a convolution tell: [C, 1, K] on the hub, [C, K, 1] once converted.

    Raises:
        CheckpointError: The checkpoint holds a tensor under two of its names.
    """
    for name in checkpoint.names:
        if name.startswith((*VISION, f"{LANGUAGE_MODEL}.")):
            continue
        wrapped = "model.language_model."
        inner = f"model.{name.removeprefix(wrapped)}" if name.startswith(wrapped) else name
        checkpoint.replace([name], [f"{LANGUAGE_MODEL}.{inner}"], lambda array: [array])
    filters = (checkpoint.shape(name) for name in checkpoint.names if name.endswith(".conv1d.weight"))
    return any(shape is not None and shape[-1] != 1 for shape in filters)
