"""How the weights of a snapshot are quantised: the `quantization` entry of config.json, module by module.

Holds widths and groups, no arithmetic. A module is stored quantised exactly where the checkpoint has `<path>.scales`; this
entry says how to read it. A module whose entry is `false` must not be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from engine.errors import ConfigError

AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS: Final = (32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How one module's weight is stored.

    Attributes:
        bits: Width of an element, one of 2 3 4 5 6 8.
        group_size: Elements of a row that share a scale and a bias: 32, 64 or 128.
        mode: `affine`: w = scale * q + bias.
    """

    bits: int
    group_size: int
    mode: str = "affine"

    def __post_init__(self) -> None:
        """Refuse what mlx does not store."""
        if self.mode != "affine" or self.bits not in AFFINE_BITS or self.group_size not in AFFINE_GROUPS:
            raise ConfigError(
                "config.json asks for an unknown weight format",
                mode=self.mode,
                bits=self.bits,
                group_size=self.group_size,
                known=f"affine with bits in {AFFINE_BITS} and group_size in {AFFINE_GROUPS}",
                next_step="quantise the snapshot to one of these",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The formats of all modules.

    Attributes:
        default: Format of quantised modules without an entry of their own; None where nothing is quantised.
        overrides: Module path to its own format, or None where it must be unquantised.
    """

    default: Format | None = None
    overrides: Mapping[str, Format | None] = field(default_factory=dict)

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> Self:
        """Read the `quantization` entry (or the hub's copy of it, `quantization_config`) of a config.

        Raises:
            ConfigError: It is malformed or asks for an unknown format.
        """
        entry = raw.get("quantization", raw.get("quantization_config"))
        if entry is None:
            return cls()
        if not isinstance(entry, dict) or not {"bits", "group_size"} <= entry.keys():
            raise ConfigError(
                "the quantization entry of config.json is malformed",
                found=entry,
                expected='{"group_size": 64, "bits": 4, "mode": "affine", "<module path>": {...} or false}',
                next_step="mend config.json",
            )
        default = _format(entry)
        overrides = {
            path: None if value is False else _format({"mode": default.mode, **value})
            for path, value in entry.items()
            if value is False or isinstance(value, dict)
        }
        scalars = entry.keys() - overrides.keys() - {"bits", "group_size", "mode"}
        if scalars:
            raise ConfigError(
                "the quantization entry of config.json has keys that mean nothing here",
                keys=", ".join(sorted(scalars)),
                next_step="mend config.json",
            )
        return cls(default=default, overrides=overrides)

    def format_of(self, path: str) -> Format | None:
        """Format of the module at `path` if it is stored quantised; None where it must not be."""
        return self.overrides.get(path, self.default)


def _format(entry: Mapping[str, Any]) -> Format:
    try:
        return Format(bits=entry["bits"], group_size=entry["group_size"], mode=entry.get("mode", "affine"))
    except KeyError as error:
        raise ConfigError(
            "a module's quantization entry is incomplete",
            missing=error,
            found=dict(entry),
            next_step="mend config.json",
        ) from error
