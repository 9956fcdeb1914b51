"""Goldens of another project's format, as mlx-bun writes them, read as rows of logits.

A golden is a file `PREFIX-parity.json` and beside it `PREFIX-logits-step<i>.bin` for i from 0: little-endian float32,
`vocab_size` values, no header. Rows were widened to float32 after the model, so a bfloat16 row must be widened (`widened`)
before it is compared with one. Data only: what made it, on which machine, is not in the files.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from parity.errors import UsageError
from parity.tensor import Tensor

SUFFIX = "-parity.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignGolden:
    """What such a golden holds.

    Attributes:
        name: Its prefix.
        model: Repository id of the model.
        token_ids: The id that followed each row.
        promised: Rows that the JSON speaks of.
        rows: Rows found on disk, [1, V] F32, from step 0 on without a gap.
    """

    name: str
    model: str
    token_ids: tuple[int, ...]
    promised: int
    rows: tuple[Tensor, ...]


def is_foreign(path: Path) -> bool:
    """Whether a path names such a golden: its JSON, its prefix, or a folder that holds at least one."""
    return path.name.endswith(SUFFIX) or _manifest(path).is_file() or (path.is_dir() and any(path.glob(f"*{SUFFIX}")))


def load_foreign(path: Path) -> ForeignGolden:
    """Read a golden by its JSON file, its prefix or a folder that holds exactly one.

    Raises:
        UsageError: There are several, a file is missing or malformed, or a row is not as long as the vocabulary.
    """
    manifest = path if path.name.endswith(SUFFIX) else _manifest(path)
    if not manifest.is_file() and path.is_dir():
        found = sorted(path.glob(f"*{SUFFIX}"))
        if len(found) != 1:
            raise UsageError(
                f"{path.name} holds {len(found)} foreign goldens",
                found="\n".join(file.name for file in found) or "none",
                next_step="name one of these files",
            )
        manifest = found[0]
    prefix = manifest.name.removesuffix(SUFFIX)
    try:
        raw = json.loads(manifest.read_text(encoding="utf-8"))
        vocabulary, steps = int(raw["vocab_size"]), int(raw["logit_steps"])
        golden_ids = tuple(int(i) for i in raw["greedy_ids"])
        model = str(raw["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _malformed(manifest, f"{type(error).__name__}: {error}") from error
    rows = []
    for step in range(steps):
        file = manifest.with_name(f"{prefix}-logits-step{step}.bin")
        if not file.is_file():
            break
        data = file.read_bytes()
        if len(data) != 4 * vocabulary:
            raise _malformed(file, f"{len(data)} bytes where {4 * vocabulary} belong")
        rows.append(Tensor(dtype="F32", shape=(1, vocabulary), data=data))
    if not rows:
        raise _malformed(manifest, f"no {prefix}-logits-step0.bin beside it")
    return ForeignGolden(name=prefix, model=model, token_ids=golden_ids[:steps], promised=steps, rows=tuple(rows))


def widened(row: Tensor) -> Tensor:
    """A BF16 or F16 row as F32, exactly; others as they are."""
    if row.dtype not in ("BF16", "F16"):
        return row
    return Tensor.of(row.values().astype("<f4"))


def _manifest(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}{SUFFIX}") if prefix.name else prefix


def _malformed(file: Path, reason: str) -> UsageError:
    return UsageError("a foreign golden cannot be read", file=file.name, reason=reason, next_step="restore the file")
