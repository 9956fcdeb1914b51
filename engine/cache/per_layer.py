"""Widths by layer, as a `kv_config.json` lists them: some caches packed, each in its own width, the others as computed.

The file is a JSON list of `{"layer_idx": int, "bits": int, "group_size": int}`; `group_size` is 64 where it is absent.
`layer_idx` counts the caches that the model makes, not its layers: where layers have no keys and values of their own (Gemma's
shared ones, the feed-forward layers of Nemotron-H) the two differ. Of two entries for one cache the last one counts.

Guarantees: a file that is not such a list is refused, and so is an unknown key: a width that is not read would be a cache
that stays as it is without a word.
Source: spec/kv.md section 5.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.quantization import AFFINE_BITS, AFFINE_GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWidth:
    """How one cache is packed.

    Attributes:
        cache: Place in the list of caches that the model makes.
        bits: Width of a stored element.
        group_size: Elements of a head that share a scale and a bias.
    """

    cache: int
    bits: int
    group_size: int = 64


def read_kv_config(file: Path) -> tuple[LayerWidth, ...]:
    """Read a kv_config.json.

    Returns:
        One width a listed cache, by place.

    Raises:
        ConfigError: The file is missing, not JSON, or not such a list.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file.name} cannot be read", reason=error, next_step="give a kv_config.json") from error
    return layer_widths(raw, name=file.name)


def layer_widths(raw: Any, *, name: str = "kv_config.json") -> tuple[LayerWidth, ...]:  # noqa: ANN401 - any JSON value
    """The widths that a parsed kv_config.json lists, by place.

    Args:
        raw: What the file holds.
        name: What a message calls it.

    Raises:
        ConfigError: It is no list of entries with known widths.
    """
    if not isinstance(raw, list) or not raw:
        found = "an empty list" if raw == [] else type(raw).__name__
        raise ConfigError(f"{name} must be a list of entries", found=found, next_step="list one entry a cache")
    widths = {width.cache: width for width in (_entry(entry, name=f"{name}, entry {i}") for i, entry in enumerate(raw))}
    return tuple(widths[cache] for cache in sorted(widths))


def as_kv_config(widths: Sequence[LayerWidth]) -> list[dict[str, int]]:
    """What a kv_config.json with these widths holds."""
    return [{"layer_idx": width.cache, "bits": width.bits, "group_size": width.group_size} for width in widths]


def _entry(raw: Any, *, name: str) -> LayerWidth:  # noqa: ANN401 - any JSON value
    known = {"layer_idx", "bits", "group_size"}
    fields = {"group_size": 64, **raw} if isinstance(raw, dict) else {}
    if set(fields) != known or any(type(value) is not int for value in fields.values()):
        raise ConfigError(
            f"{name} is not a width",
            found=json.dumps(raw),
            known="layer_idx, bits and, if it is not 64, group_size; whole numbers",
            next_step="mend the entry",
        )
    width = LayerWidth(cache=fields["layer_idx"], bits=fields["bits"], group_size=fields["group_size"])
    if width.cache < 0 or width.bits not in AFFINE_BITS or width.group_size not in AFFINE_GROUPS:
        raise ConfigError(
            f"{name} is not a width that a cache can have",
            found=json.dumps(raw),
            known=f"bits in {AFFINE_BITS}, group_size in {AFFINE_GROUPS}, layer_idx of 0 or more",
            next_step="mend the entry",
        )
    return width
