"""Reading config.json into a family's own dataclass, with nothing silently ignored.

Guarantees: every key of the file is either a field of the family's `Config` or listed as irrelevant with a reason; every
field without a default is present; every value has the field's type. What the values mean is the family's business.
"""

import dataclasses
import difflib
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from engine.errors import ConfigError

C = TypeVar("C")

IRRELEVANT: Final[Mapping[str, str]] = {
    "_name_or_path": "where the file came from",
    "architectures": "the class name of another library; model_type decides",
    "attention_dropout": "dropout does nothing in inference",
    "bos_token_id": "the tokenizer's business",
    "dtype": "the dtype of the file; the checkpoint says it itself",
    "eos_token_id": "the generation loop's business, read from generation_config.json",
    "hidden_dropout": "dropout does nothing in inference",
    "initializer_range": "used in training",
    "max_window_layers": "read only together with use_sliding_window",
    "model_type": "it chose the family",
    "pad_token_id": "the tokenizer's business",
    "pretraining_tp": "how training was split over machines",
    "quantization": "read by engine.quantization",
    "quantization_config": "the hub's copy of quantization",
    "torch_dtype": "the dtype of the file; the checkpoint says it itself",
    "transformers_version": "which library wrote the file",
    "unk_token_id": "the tokenizer's business",
    "use_cache": "the caller decides",
}


def load_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: The file is missing or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file.name} cannot be read", file=file, reason=error, next_step="mend the file") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{file.name} is not a JSON object", file=file, found=type(value).__name__, next_step="mend the file"
        )
    return value


def read_config(family: type[C], raw: Mapping[str, Any], *, irrelevant: Mapping[str, str]) -> C:
    """Build a family's `Config` from config.json.

    Args:
        family: A dataclass whose field names are the config's keys.
        raw: Parsed config.json.
        irrelevant: Keys that the family knows and rightly ignores, each with the reason, beside `IRRELEVANT`.

    Raises:
        ConfigError: A key is unknown or missing, or a value has another type than its field.
    """
    hints = get_type_hints(family)
    fields = {field.name: field for field in dataclasses.fields(family)}  # type: ignore[arg-type]
    model_type = raw.get("model_type")
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key in fields:
            values[key] = _typed(key, value, hints[key], model_type)
        elif key not in IRRELEVANT and key not in irrelevant:
            raise ConfigError(
                f"config key {key!r} is unknown to model_type {model_type!r}",
                value=json.dumps(value),
                near=", ".join(difflib.get_close_matches(key, fields)) or "no known key",
                next_step="teach the family what it means, or list it as irrelevant with a reason",
            )
    required = [n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in values]:
        raise ConfigError(
            f"config.json lacks what model_type {model_type!r} needs",
            missing=", ".join(missing),
            next_step="take the config.json that belongs to these weights",
        )
    return family(**values)


def _typed(key: str, value: Any, hint: Any, model_type: object) -> Any:  # noqa: ANN401 - JSON values
    """Return `value` if it has the type `hint`; JSON's 8 and 8.0 are both fine where a float belongs."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        kind = get_origin(option) or option
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind is tuple and isinstance(value, list):
            (element,) = {hint for hint in get_args(option) if hint is not ...}
            return tuple(_typed(f"{key}[{i}]", item, element, model_type) for i, item in enumerate(value))
        if kind is Mapping or kind is dict or (isinstance(kind, type) and issubclass(kind, Mapping)):
            if isinstance(value, dict):
                return value
        elif isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
    raise ConfigError(
        f"config key {key!r} of model_type {model_type!r} has the wrong type",
        expected=" or ".join(getattr(option, "__name__", str(option)) for option in options),
        found=f"{type(value).__name__} {json.dumps(value)}",
        next_step="mend config.json",
    )
