"""The words for KV modes: how a run keeps its keys and values, and how it attends to packed ones.

A word is read from left to right, every part optional but one of `fp`, `max`, `kv` and `config`:

    fp                             as computed, in the caches that the model makes
    max16-k4                       in rings of 16 positions, the first 4 of which stay (mlx-lm's `max_kv_size`)
    kv8-g64                        packed in 8 bits, groups of 64, in the order of mlx-lm's loop: after every forward
    kv4-g32-s16                    likewise, a cache at a time, once it holds 16 tokens
    kv8-g64-after-prompt           packed once the whole prompt has run on plain keys and values
    kv8-g64-from-empty             packed from the first token on: the prompt itself attends to packed keys and values
    max16-k4-kv8-g64               packed rings
    config-8g64_0_2-4g32_3         caches 0 and 2 in 8 bits, cache 3 in 4 bits, the others as computed (kv_config.json)
    kv8-g64-tiled512               attention over packed keys in tiles of 512 positions, in 16-bit floats alone
    kv8-g64-tiled16-lifted         likewise, float32 admitted too, which no release of the oracle does

The three orders are three computations: a golden of one says nothing about another.
Guarantees: a mode equals what its word reads as, and there is one word a mode.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

from parity.errors import CaseError

KV_BITS: Final = (2, 3, 4, 5, 6, 8)
KV_GROUPS: Final = (32, 64, 128)
TILED_BITS: Final = (4, 8)
Order = Literal["after-forward", "after-prompt", "from-empty"]

_KNOWN: Final = "fp, kv8-g64, kv4-g32-s16, kv8-g64-after-prompt, max16-k4, config-8g64_0_2-4g32_3, kv8-g64-tiled512"
_RING: Final = r"max(?P<max_size>\d+)-k(?P<keep>\d+)"
_UNIFORM: Final = r"kv(?P<bits>\d+)-g(?P<group>\d+)"
_CONFIG: Final = r"config(?P<config>(?:-\d+g\d+(?:_\d+)+)+)"
_ORDER: Final = r"(?:-s(?P<start>\d+))?(?:-(?P<order>after-prompt|from-empty))?"
_TILE: Final = r"(?:-tiled(?P<tile>\d+)(?P<lifted>-lifted)?)?"
_WORD: Final = re.compile(rf"{_RING}|(?:{_RING.replace('?P<', '?P<ring_')}-)?(?:{_UNIFORM}|{_CONFIG}){_ORDER}{_TILE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWidth:
    """One line of a kv_config.json.

    Attributes:
        cache: Place in the list of caches that the model makes; layers without keys of their own are not counted.
        bits: Width of a stored element.
        group_size: Elements of a head that share a scale and a bias.
    """

    cache: int
    bits: int
    group_size: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KV:
    """A KV mode.

    Attributes:
        bits: Width of a stored element in every cache of keys and values; None where they are kept as computed.
        group_size: Elements of a head that share a scale and a bias.
        start: A cache is converted once it holds at least this many tokens (mlx-lm's `quantized_kv_start`).
        order: When conversion happens (see the table above).
        layers: Instead of `bits`: the caches that are packed, each with its width, by place.
        max_size: Positions of a ring in the place of every plain cache; None for no ring.
        keep: Of these, the first ones of the sequence that are never overwritten.
        tile: Positions a tile of attention; None for attention over all positions at once.
        lifted: The tiles admit float32 too.
    """

    bits: int | None = None
    group_size: int = 64
    start: int = 0
    order: Order = "after-forward"
    layers: tuple[LayerWidth, ...] = ()
    max_size: int | None = None
    keep: int = 4
    tile: int | None = None
    lifted: bool = False

    def __post_init__(self) -> None:
        """Refuse widths and groups that no cache stores, and parts that do not go together."""
        if reason := self._misfit():
            raise unknown("KV mode", self.name, reason)

    @property
    def packs(self) -> bool:
        """Whether anything is packed."""
        return self.bits is not None or bool(self.layers)

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Every (bits, group size) that is asked for."""
        if self.bits is not None:
            return ((self.bits, self.group_size),)
        return tuple(dict.fromkeys((layer.bits, layer.group_size) for layer in self.layers))

    @property
    def name(self) -> str:
        """The word; `parse` reads it back."""
        parts = [] if self.max_size is None else [f"max{self.max_size}-k{self.keep}"]
        if self.layers:
            parts.append("config")
            for bits, group in sorted(self.widths, key=lambda width: (-width[0], width[1])):
                caches = [str(w.cache) for w in self.layers if (w.bits, w.group_size) == (bits, group)]
                parts.append("_".join([f"{bits}g{group}", *caches]))
        elif self.bits is not None:
            parts.append(f"kv{self.bits}-g{self.group_size}")
        parts += [f"s{self.start}"] if self.start else []
        parts += [self.order] if self.order != "after-forward" else []
        parts += [] if self.tile is None else [f"tiled{self.tile}"]
        parts += ["lifted"] if self.lifted else []
        return "-".join(parts) or "fp"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read what `name` writes."""
        if name == "fp":
            return cls()
        match = _WORD.fullmatch(name)
        if match is None:
            raise unknown("KV mode", name, _KNOWN)
        ring, keep = (match[part] or match[f"ring_{part}"] for part in ("max_size", "keep"))
        layers = sorted(_layers(match["config"] or ""), key=lambda width: width.cache)
        mode = cls(
            bits=int(match["bits"]) if match["bits"] else None,
            group_size=int(match["group"] or 64),
            start=int(match["start"] or 0),
            order=match["order"] or "after-forward",  # type: ignore[arg-type]
            layers=tuple(layers),
            max_size=int(ring) if ring else None,
            keep=int(keep) if keep else 4,
            tile=int(match["tile"]) if match["tile"] else None,
            lifted=bool(match["lifted"]),
        )
        if mode.name != name:
            raise unknown("KV mode", name, f"{mode.name}, which says the same")
        return mode

    def _misfit(self) -> str | None:
        """Why there is no such mode; None where there is."""
        caches, plain_order = [width.cache for width in self.layers], self.order == "after-forward"
        checks = {
            "either kv or config": self.bits is not None and self.layers,
            f"fp, or kvB-gG with B in {KV_BITS} and G in {KV_GROUPS}": any(
                bits not in KV_BITS or group not in KV_GROUPS for bits, group in self.widths
            ),
            "each cache once, by place": caches != sorted(set(caches)) or any(cache < 0 for cache in caches),
            "maxN-kK with K below N": self.max_size is not None and not 0 <= self.keep < self.max_size,
            "a start, an order and tiles for packed keys and values alone": not self.packs
            and (self.start or not plain_order or self.tile is not None),
            "a start of 0 or more; the orders after-prompt and from-empty": self.start < 0
            or self.order not in get_args(Order),
            "an order of its own without a start, without config, without max": not plain_order
            and (self.start or self.layers or self.max_size is not None),
            "max with kv, not with config": self.layers and self.max_size is not None,
            f"tiles of 1 position or more, over {TILED_BITS} bits": self.tile is not None
            and (self.tile < 1 or any(bits not in TILED_BITS for bits, _ in self.widths)),
            "lifted tiles": self.lifted and self.tile is None,
        }
        return next((reason for reason, broken in checks.items() if broken), None)


def _layers(config: str) -> list[LayerWidth]:
    """The widths of `-8g64_0_2-4g32_3`, in the order in which they are written."""
    return [
        LayerWidth(cache=int(cache), bits=int(bits), group_size=int(group))
        for bits, group, caches in re.findall(r"-(\d+)g(\d+)_([\d_]+)", config)
        for cache in caches.split("_")
    ]


def unknown(kind: str, name: str, known: str) -> CaseError:
    """The error for a word of a case that nothing is known for."""
    return CaseError(f"unknown {kind} {name!r}", known=known, next_step="correct it in parity/cases/*.toml")
