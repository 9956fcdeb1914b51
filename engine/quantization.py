"""How the weights of a snapshot are packed: the `quantization` entry of config.json, module by module.

Holds widths and groups, no arithmetic. A module is stored quantised exactly where the checkpoint has `<path>.scales`; this
entry says how to read it. A module whose entry is `false` must not be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from engine.errors import ConfigError

AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS: Final = (32, 64, 128)
FLOATING: Final[Mapping[str, tuple[int, int]]] = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}  # bits, group
HUB_METHODS: Final = ("mxfp4",)  # values of `quant_method`, the hub's own word for a format that mlx has too
HUB_KEYS: Final = frozenset({"quant_method", "modules_to_not_convert"})  # the checkpoint's scales say what is packed
TILES: Final[Mapping[str, object]] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
TILE_KEYS: Final = frozenset({*TILES, "activation_scheme", "scale_fmt"})  # the last two: rounding of activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How one module's weight is stored.

    Attributes:
        bits: Width of an element.
        group_size: Elements of a row that share a scale (and, affine, a bias).
        mode: `affine`: w = scale * q + bias; `mxfp4`, `nvfp4`, `mxfp8`: w = scale * q, q a small float and the scale a byte.
    """

    bits: int
    group_size: int
    mode: str = "affine"

    def __post_init__(self) -> None:
        """Refuse what mlx does not store."""
        whole = all(type(number) is int for number in (self.bits, self.group_size))
        if self.mode == "affine":
            known = self.bits in AFFINE_BITS and self.group_size in AFFINE_GROUPS
        else:
            known = FLOATING.get(self.mode) == (self.bits, self.group_size)
        if not (whole and known):
            raise ConfigError(
                "config.json asks for an unknown weight format",
                mode=self.mode,
                bits=self.bits,
                group_size=self.group_size,
                known="\n".join(
                    [
                        f"affine with bits in {AFFINE_BITS} and group_size in {AFFINE_GROUPS}",
                        *(
                            f"{mode} with bits {bits} and group_size {group}"
                            for mode, (bits, group) in FLOATING.items()
                        ),
                    ]
                ),
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
        if isinstance(entry, dict) and entry.get("quant_method") in HUB_METHODS and entry.keys() <= HUB_KEYS:
            method = entry["quant_method"]
            bits, group_size = FLOATING[method]
            return cls(default=Format(bits=bits, group_size=group_size, mode=method))
        if isinstance(entry, dict) and entry.keys() <= TILE_KEYS and TILES.items() <= entry.items():
            return cls()  # engine.block_float8 unpacks these weights before anything is read
        if not isinstance(entry, dict) or not {"bits", "group_size"} <= entry.keys():
            raise ConfigError(
                "the quantization entry of config.json is malformed",
                found=entry,
                expected='{"group_size": 64, "bits": 4, "mode": "affine", "<module path>": {...} or false}',
                next_step="mend config.json",
            )
        default = _format(entry, more=True)
        overrides = {
            path: None if value is False else _format(value)
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


def _format(entry: Mapping[str, Any], *, more: bool = False) -> Format:
    """Read one format; with `more`, the entry holds those of modules as well."""
    missing = {"bits", "group_size"} - entry.keys()
    unknown = entry.keys() - {"bits", "group_size", "mode"}
    if missing or (unknown and not more):
        raise ConfigError(
            "a module's quantization entry is not as expected",
            missing=", ".join(sorted(missing)) or "nothing",
            unknown=", ".join(sorted(unknown)) or "nothing",
            next_step="mend config.json",
        )
    return Format(bits=entry["bits"], group_size=entry["group_size"], mode=entry.get("mode", "affine"))
