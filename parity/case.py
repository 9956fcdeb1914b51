"""A case: one thing to check, complete enough that an engine and an oracle can run it without knowing each other.

Guarantees: frozen, and equal after a round trip through JSON. A case names its snapshot; the bytes behind the name are
pinned by the golden. Cases are written in `parity/cases/*.toml` alone; `parity.matrix` reads them.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

from parity.errors import CaseError
from parity.sampling import Sampling

DType = Literal["f32", "bf16", "f16"]
FeedMode = Literal["whole", "chunked", "tail-split"]
Tier = Literal["L1", "L2", "L3"]

KV_BITS: Final = (2, 3, 4, 5, 6, 8)
KV_GROUPS: Final = (32, 64, 128)
_KV_NAME: Final = re.compile(r"kv(?P<bits>\d+)-g(?P<group>\d+)(?:-s(?P<start>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """How the prompt reaches the model.

    Attributes:
        mode: `whole` = one forward over all of it; `tail-split` = L-1 tokens, then the last one alone, as mlx-lm's loop
            does; `chunked` = as `tail-split` with the first part in pieces of at most `chunk` tokens.
        chunk: Tokens a piece, for `chunked` only.
    """

    mode: FeedMode
    chunk: int | None = None

    def __post_init__(self) -> None:
        """Refuse a chunk where none belongs, or none where one does."""
        if self.mode not in get_args(FeedMode) or (self.mode == "chunked") != (self.chunk is not None):
            raise _unknown("feed", f"{self.mode}({self.chunk})", "whole, tail-split, chunkN")
        if self.chunk is not None and self.chunk < 1:
            raise _unknown("feed", f"chunk{self.chunk}", "whole, tail-split, chunkN")

    @property
    def name(self) -> str:
        """`whole`, `tail-split` or `chunk5`."""
        return self.mode if self.chunk is None else f"chunk{self.chunk}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read what `name` writes."""
        if match := re.fullmatch(r"chunk(\d+)", name):
            return cls(mode="chunked", chunk=int(match[1]))
        if name == "whole":
            return cls(mode="whole")
        if name == "tail-split":
            return cls(mode="tail-split")
        raise _unknown("feed", name, "whole, tail-split, chunkN")


@dataclass(frozen=True, slots=True, kw_only=True)
class KV:
    """The KV mode: `fp`, or uniform affine quantisation from a threshold on.

    Attributes:
        bits: Width of a stored element; None keeps keys and values as computed.
        group_size: Elements of a head that share a scale and a bias.
        start: A cache is converted once it holds at least this many tokens (mlx-lm's `quantized_kv_start`).
    """

    bits: int | None = None
    group_size: int = 64
    start: int = 0

    def __post_init__(self) -> None:
        """Refuse widths and groups that no cache stores."""
        if self.bits is not None and (self.bits not in KV_BITS or self.group_size not in KV_GROUPS):
            raise _unknown("KV mode", self.name, f"fp, or kvB-gG with B in {KV_BITS} and G in {KV_GROUPS}")

    @property
    def name(self) -> str:
        """`fp`, `kv8-g64`, or `kv4-g32-s16` where conversion starts at 16 tokens."""
        if self.bits is None:
            return "fp"
        return f"kv{self.bits}-g{self.group_size}" + (f"-s{self.start}" if self.start else "")

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read what `name` writes."""
        if name == "fp":
            return cls()
        if match := _KV_NAME.fullmatch(name):
            return cls(bits=int(match["bits"]), group_size=int(match["group"]), start=int(match["start"] or 0))
        raise _unknown("KV mode", name, "fp, kv8-g64, kv4-g32-s16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question put to the oracle and to the engine alike.

    Attributes:
        name: A path, unique: `llama-tiny/f32/kv8-g64/greedy/p40-whole`.
        snapshot: Name in the catalogue of models.
        dtype: Every floating checkpoint tensor is cast to it before the first forward.
        prompt_ids: Token ids; text is never enough.
        forced_ids: One id a step, taken instead of the sampler's (teacher forcing); None runs freely.
        feed: How the prompt is fed.
        kv: KV mode.
        sampler: `greedy` (argmax, lowest id on a tie).
        num_steps: Rows of logits recorded; row 0 follows the prompt.
        tier: L1, L2 or L3 (design: tiers).
        oracle: Name in `oracles/registry.toml`.
        record: Shell globs over module paths whose outputs are recorded at every step, last position only.
        full_rows: The golden commits its rows in full however long they are, for others to draw from.
        sampling: Of a sampler case: `num_steps` draws from a few rows, which are rounded to `dtype`; `sampler` names it.
    """

    name: str
    snapshot: str
    dtype: DType
    prompt_ids: tuple[int, ...]
    forced_ids: tuple[int, ...] | None
    feed: Feed
    kv: KV
    sampler: str = "greedy"
    num_steps: int
    tier: Tier = "L1"
    oracle: str = "mlx-lm"
    record: tuple[str, ...] = ()
    full_rows: bool = False
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        """Refuse a case that no runner could run."""
        if not self.prompt_ids or self.num_steps < 1:
            raise CaseError(
                f"case {self.name} asks for nothing",
                prompt=f"{len(self.prompt_ids)} tokens",
                steps=self.num_steps,
                next_step="give it at least one token and one step",
            )
        if self.forced_ids is not None and len(self.forced_ids) != self.num_steps:
            raise CaseError(
                f"case {self.name} does not force one token a step",
                forced=len(self.forced_ids),
                steps=self.num_steps,
                next_step="make forced_ids as long as num_steps",
            )

    @property
    def num_rows(self) -> int:
        """Rows of logits in a trace: one a step, or those that a sampler case draws from."""
        return self.num_steps if self.sampling is None else self.sampling.num_rows

    @property
    def num_ids(self) -> int:
        """Token ids in a trace: one a step and, of a sampler case, batch element."""
        return self.num_steps * (1 if self.sampling is None else self.sampling.batch)

    def to_json(self) -> dict[str, object]:
        """Plain values, in a fixed order; `from_json` reads them back to an equal case."""
        fields: dict[str, object] = {
            "name": self.name,
            "snapshot": self.snapshot,
            "dtype": self.dtype,
            "prompt_ids": list(self.prompt_ids),
            "forced_ids": None if self.forced_ids is None else list(self.forced_ids),
            "feed": self.feed.name,
            "kv": self.kv.name,
            "sampler": self.sampler,
            "num_steps": self.num_steps,
            "tier": self.tier,
            "oracle": self.oracle,
            "record": list(self.record),
        }
        if self.full_rows:
            fields["full_rows"] = True
        if self.sampling is not None:
            fields["sampling"] = self.sampling.to_json()
        return fields

    @classmethod
    def from_json(cls, raw: dict[str, object]) -> Self:
        """Read what `to_json` wrote.

        Raises:
            CaseError: A field is missing, unknown or of the wrong kind.
        """
        values = dict(raw)
        try:
            values["prompt_ids"] = tuple(values["prompt_ids"])  # type: ignore[arg-type]
            forced = values["forced_ids"]
            values["forced_ids"] = None if forced is None else tuple(forced)  # type: ignore[arg-type]
            values["feed"] = Feed.parse(str(values["feed"]))
            values["kv"] = KV.parse(str(values["kv"]))
            values["record"] = tuple(values["record"])  # type: ignore[arg-type]
            if "sampling" in values:
                values["sampling"] = Sampling.from_json(values["sampling"])  # type: ignore[arg-type]
            return cls(**values)  # type: ignore[arg-type]
        except (KeyError, TypeError) as error:
            raise CaseError(
                "not a case of this version",
                case=values.get("name", "?"),
                reason=error,
                next_step="compare its fields with parity/case.py",
            ) from error


def _unknown(kind: str, name: str, known: str) -> CaseError:
    return CaseError(f"unknown {kind} {name!r}", known=known, next_step="correct it in parity/cases/*.toml")
