"""A golden: an oracle's trace on disk, small enough to review.

The JSON manifest decides: the case, the snapshot's digests, the SHA-256 of every tensor, the provenance and the history.
Beside it lies one safetensors file: every tensor in full where a row of logits is small (tiny snapshots), a sketch for
diagnosis where it is not. Full rows of large vocabularies live outside git (`parity.row_store`).

Guarantees: equal goldens give equal bytes on disk; a manifest is read whole or refused; a side file that does not match
its digests is refused, so half-written or rotten pairs are never believed. Only oracles' traces become goldens: nothing
here knows the engine.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from parity import safetensors_file
from parity.atomic_file import write_atomically
from parity.case import Case
from parity.errors import CaseError, GoldenError
from parity.platform_key import platform_key
from parity.provenance import Provenance
from parity.sketch import sketch
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace

FORMAT: Final = 1
FULL_ROW_BYTES: Final = 4096  # rows of logits up to this size are committed in full
GOLDENS: Final = Path(__file__).resolve().parent.parent / "goldens"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the trace as the manifest lists it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One entry of a golden's history: which pins gave which bits, and why they were recorded."""

    oracle: str
    mlx: str
    bits: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """Expected output of one case, with all that its bits rest on.

    Attributes:
        case: The question.
        snapshot_files: The snapshot's files that logits depend on, name to SHA-256.
        cache: The oracle's cache kinds after the run, in the words of `Trace.cache`.
        entries: Every tensor of the trace in execution order.
        token_ids: The id that follows each row.
        form: `full` where the side file holds the trace, `sketch` where it holds `parity.sketch`'s tensors, `draws` where it
            holds what a sampler case drew, without the rows, which another golden commits in full.
        side: SHA-256 of the tensors in the side file, by name.
        provenance: What the bits rest on.
        history: Oldest first; the last entry made these bits.
        tensors: The side file's content.
    """

    case: Case
    snapshot_files: Mapping[str, str]
    cache: tuple[str, ...]
    entries: tuple[TensorEntry, ...]
    token_ids: tuple[int, ...]
    form: str
    side: Mapping[str, str]
    provenance: Provenance
    history: tuple[Recording, ...]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        case: Case,
        trace: Trace,
        *,
        snapshot_files: Mapping[str, str],
        provenance: Provenance,
        history: tuple[Recording, ...],
    ) -> Self:
        """Make a golden of an oracle's trace."""
        full = case.full_rows or len(trace.logits(0).data) <= FULL_ROW_BYTES
        form = "full" if full else "sketch" if case.sampling is None else "draws"
        tensors = sketch(trace, case.num_steps) if form == "sketch" else dict(trace.tensors)
        if form == "draws":
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("logits/")}
        return cls(
            case=case,
            snapshot_files=dict(snapshot_files),
            cache=trace.cache,
            entries=tuple(
                TensorEntry(name=name, dtype=t.dtype, shape=t.shape, digest=t.digest)
                for name, t in trace.tensors.items()
            ),
            token_ids=trace.token_ids,
            form=form,
            side={name: tensors[name].digest for name in sorted(tensors)},
            provenance=provenance,
            history=history,
            tensors=tensors,
        )

    @property
    def digests(self) -> dict[str, str]:
        """Tensor name to SHA-256, in execution order."""
        return {entry.name: entry.digest for entry in self.entries}

    def save(self, file: Path) -> None:
        """Write the side file, then the manifest that names it; each appears whole or not at all."""
        write_atomically(file.with_suffix(".safetensors"), safetensors_file.dumps(self.tensors))
        write_atomically(file, self.manifest().encode())

    def manifest(self) -> str:
        """The manifest's text: a line a tensor, so that a review shows which rows changed."""
        fields: dict[str, object] = {
            "format": FORMAT,
            "case": self.case.to_json(),
            "snapshot_files": dict(self.snapshot_files),
            "cache": list(self.cache),
            "token_ids": list(self.token_ids),
            "form": self.form,
            "entries": [[e.name, e.dtype, list(e.shape), e.digest] for e in self.entries],
            "side": dict(self.side),
            "provenance": self.provenance.to_json(),
            "history": [{"oracle": r.oracle, "mlx": r.mlx, "bits": r.bits, "reason": r.reason} for r in self.history],
        }
        return "{\n" + ",\n".join(f" {json.dumps(name)}: {_lines(value)}" for name, value in fields.items()) + "\n}\n"

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read a golden and check every tensor beside it against its digest.

        Raises:
            GoldenError: It is missing, of another format, malformed or rotten.
        """
        name = file.stem
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise GoldenError("no golden", looked_at=file.name, next_step=f"assay record '*{name}'") from None
        except (OSError, ValueError) as error:
            raise _rotten(file, f"not JSON: {error}") from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else None
            raise _rotten(file, f"format {found!r} where this version reads {FORMAT}")
        try:
            golden = cls(
                case=Case.from_json(raw["case"]),
                snapshot_files=dict(raw["snapshot_files"]),
                cache=tuple(raw["cache"]),
                entries=tuple(TensorEntry(name=n, dtype=d, shape=tuple(s), digest=h) for n, d, s, h in raw["entries"]),
                token_ids=tuple(raw["token_ids"]),
                form=raw["form"],
                side=dict(raw["side"]),
                provenance=Provenance.from_json(raw["provenance"]),
                history=tuple(Recording(**entry) for entry in raw["history"]),
                tensors=_read_side(file),
            )
        except (KeyError, TypeError, ValueError, CaseError) as error:
            raise _rotten(file, f"malformed: {type(error).__name__}: {str(error).splitlines()[0]}") from error
        golden._check(file)
        return golden

    def _check(self, file: Path) -> None:
        """Refuse a side file, or a manifest, that contradicts itself."""
        if set(self.side) != set(self.tensors):
            raise _rotten(file, "the side file holds other tensors than the manifest lists")
        for name, digest in self.side.items():
            if self.tensors[name].digest != digest:
                raise _rotten(file, f"tensor {name} of the side file fails its digest")
        listed = Tensor.of(np.array(self.token_ids, dtype="<i4")).digest
        if self.digests.get(TOKEN_IDS) != listed:
            raise _rotten(file, "the digest of token_ids is not that of the token ids it lists")
        if self.form not in ("full", "sketch", "draws"):
            raise _rotten(file, f"form {self.form!r} is none of full, sketch and draws")
        held = [
            n for n in self.digests if self.form == "full" or (self.form == "draws" and not n.startswith("logits/"))
        ]
        if any(self.digests[n] != self.side.get(n) for n in held):
            raise _rotten(file, "the list of entries and the side file's digests disagree")
        steps = sum(entry.name.startswith("logits/") for entry in self.entries)
        if steps != self.case.num_rows:
            raise _rotten(file, f"{steps} rows of logits for {self.case.num_rows} steps")


def golden_path(case: Case, *, version: str, root: Path = GOLDENS, platform: str | None = None) -> Path:
    """Where the golden of a case lies: `<oracle>-<version>/<platform>/<case>.json` under `root`."""
    return root / f"{case.oracle}-{version}" / (platform or platform_key()) / f"{case.name}.json"


def _read_side(file: Path) -> dict[str, Tensor]:
    try:
        return safetensors_file.loads(file.with_suffix(".safetensors").read_bytes())
    except OSError as error:
        raise ValueError(f"its side file cannot be read ({error.strerror})") from error


def _rotten(file: Path, reason: str) -> GoldenError:
    return GoldenError(
        "a golden on disk cannot be believed",
        golden=f"{file.parent.name}/{file.name}",
        reason=reason,
        next_step=f"git checkout -- 'goldens/**/{file.stem}.*', or assay record",
    )


def _lines(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """JSON with one line an element of the outermost container and everything deeper kept compact."""
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
    return json.dumps(value)
