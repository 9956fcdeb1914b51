"""A case: one thing to check, complete enough that an engine and an oracle can run it without knowing each other.

Guarantees: frozen, and equal after a round trip through JSON. A case names its snapshot; the bytes behind the name are
pinned by the golden. Cases are written in `parity/cases/*.toml` alone; `parity.matrix` reads them.
"""

import re
from dataclasses import dataclass
from typing import Literal, Self, get_args

from parity.batch import Batch
from parity.errors import CaseError
from parity.kv import KV, unknown
from parity.sampling import Sampling

DType = Literal["f32", "bf16", "f16"]
FeedMode = Literal["whole", "chunked", "tail-split"]
Tier = Literal["L1", "L2", "L3"]

__all__ = ["KV", "Case", "DType", "Feed", "FeedMode", "Tier"]


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
            raise unknown("feed", f"{self.mode}({self.chunk})", "whole, tail-split, chunkN")
        if self.chunk is not None and self.chunk < 1:
            raise unknown("feed", f"chunk{self.chunk}", "whole, tail-split, chunkN")

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
        raise unknown("feed", name, "whole, tail-split, chunkN")


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
        batch: Of a batch case: the sequences; prompt, forced ids and steps are then those of all, one after the other.
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
    batch: Batch | None = None

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
        if self.kv.tile is not None and not self.kv.lifted and self.dtype == "f32":
            raise CaseError(
                f"case {self.name} asks for tiles in float32, which the oracle silently leaves out",
                kv=self.kv.name,
                next_step=f"use bf16 or f16, or {self.kv.name}-lifted",
            )

        if self.batch is not None and (
            (sum(self.batch.lengths), sum(self.batch.steps)) != (len(self.prompt_ids), self.num_steps)
            or self.record
            or self.sampling is not None
            or (self.batch.fill != "left" and self.feed.mode == "whole")
        ):
            raise CaseError(
                f"case {self.name} does not fit its batch",
                prompts=f"{len(self.prompt_ids)} tokens for {sum(self.batch.lengths)}",
                steps=f"{self.num_steps} for {sum(self.batch.steps)}",
                feed=f"{self.feed.name}, filled {self.batch.fill}",
                next_step="give the ids and steps of all sequences, and nothing to draw or to record; feed whole fits left",
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
        if self.batch is not None:
            fields["batch"] = self.batch.to_json()
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
            if "batch" in values:
                values["batch"] = Batch.from_json(values["batch"])  # type: ignore[arg-type]
            return cls(**values)  # type: ignore[arg-type]
        except (KeyError, TypeError) as error:
            raise CaseError(
                "not a case of this version",
                case=values.get("name", "?"),
                reason=error,
                next_step="compare its fields with parity/case.py",
            ) from error
