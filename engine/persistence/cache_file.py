"""Own cache files: the caches of one sequence, the tokens in them, and the model that they belong to.

A valid safetensors file. Its metadata holds `format` (`mlx-assay-kv-1`), `header` (JSON: `tokens`, `fingerprints`, `caches` as
`engine.persistence.kinds` describes them, `digests` of the tensors by name) and `header_digest` (SHA-256 of the header's UTF-8
bytes, in hex). A tensor's digest is SHA-256 over three things: its safetensors dtype name and a line feed, its shape as a JSON
list and a line feed, its bytes. Caches that hold nothing yet are saved like any other.

Guarantees: written atomically; equal caches give equal bytes; loading gives every cache back bit for bit or refuses the file,
naming what is wrong. A file is never used in part.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from engine.cache.group import CacheGroup
from engine.cache.protocol import Batched, Cache, settled
from engine.cache.recurrent import RecurrentCache
from engine.errors import RequestError
from engine.persistence.atomic_write import write_atomically
from engine.persistence.fingerprints import Fingerprints
from engine.persistence.kinds import describe, rebuild
from engine.persistence.refusal import CacheFileError, damaged, read_file
from engine.persistence.tensor_bytes import decode, dtype_name, encode, to_bytes

FORMAT: Final = "mlx-assay-kv-1"

Tokens = tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedCaches:
    """What a file holds.

    Attributes:
        caches: As the model made them, one a layer that has any.
        tokens: Exactly those whose keys and values are in the caches; of a batch, those of each row.
        fingerprints: Of the model that filled them.
    """

    caches: tuple[Cache, ...]
    tokens: Tokens
    fingerprints: Fingerprints


def save_caches(
    path: Path,
    caches: Sequence[Cache],
    *,
    tokens: Sequence[int] | Sequence[Sequence[int]],
    fingerprints: Fingerprints | None = None,
) -> None:
    """Save the caches of a sequence, or of a batch.

    Args:
        path: The file; an old one is replaced whole or not at all.
        caches: After a forward; evaluated here if they are not.
        tokens: Exactly those that were fed to them; of a batch, those of each row, padding left out.
        fingerprints: Of the model; none known by default.

    Raises:
        RequestError: There are not as many tokens as a cache has seen.
        TypeError: A kind that no file holds.
    """
    told, caches = _told(tokens), settled(caches)
    if wrong := [(place, cache) for place, cache in enumerate(caches) if not _fits(cache, told)]:
        place, cache = wrong[0]
        raise RequestError(
            "the tokens are not those in the caches",
            tokens=_counts(told),
            cache=f"number {place} has seen {_seen(cache)}",
            next_step="give the prompt and every token that was fed after it, and no other",
        )
    arrays: dict[str, mx.array] = {}
    described = [describe(cache, str(place), arrays) for place, cache in enumerate(caches)]
    mx.eval(arrays)
    header = json.dumps(
        {
            "tokens": told,
            "fingerprints": asdict(fingerprints or Fingerprints()),
            "caches": described,
            "digests": {name: _digest(array) for name, array in arrays.items()},
        },
        separators=(",", ":"),
        sort_keys=True,
    )
    metadata = {"format": FORMAT, "header": header, "header_digest": hashlib.sha256(header.encode()).hexdigest()}
    write_atomically(path, encode(arrays, metadata))


def load_caches(path: Path, *, expected: Fingerprints | None = None, num_caches: int | None = None) -> SavedCaches:
    """Load a file that `save_caches` wrote.

    Args:
        path: The file.
        expected: Of the model that is to continue; parts that either side does not know are not compared.
        num_caches: How many the model makes.

    Raises:
        CacheFileError: The file is missing, cut short, damaged, of another format or of another model.
    """
    try:
        arrays, metadata = decode(read_file(path))
    except ValueError as error:
        raise damaged(path, str(error)) from error
    header = _header(path, metadata)
    try:
        _check_digests(arrays, header["digests"])
        found = Fingerprints.from_json(header["fingerprints"])
        _check_model(path, expected, found, num_caches, len(header["caches"]))
        caches = tuple(rebuild(description, arrays) for description in header["caches"])
    except ValueError as error:
        raise damaged(path, str(error)) from error
    return SavedCaches(caches=caches, tokens=_told(header["tokens"]), fingerprints=found)


def _told(tokens: Sequence[Any]) -> Tokens:
    if any(isinstance(row, Sequence) for row in tokens):
        return tuple(tuple(map(int, row)) for row in tokens)
    return tuple(map(int, tokens))


def _counts(tokens: Tokens) -> str:
    rows = [len(row) for row in tokens if isinstance(row, tuple)]
    return str(rows) if rows else str(len(tokens))


def _fits(cache: Cache, tokens: Tokens) -> bool:
    """Whether a cache has seen as many tokens; a recurrent one of a batch counts columns and is not asked."""
    if isinstance(cache, CacheGroup):
        return all(_fits(member, tokens) for member in cache.members)
    if isinstance(cache, RecurrentCache) and cache.rows > 1:
        return cache.rows == len(tokens)
    return _seen(cache) == _counts(tokens)


def _seen(cache: Cache) -> str:
    return str(list(cache.row_offsets) if isinstance(cache, Batched) else cache.offset)


def _header(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise CacheFileError(
            "not a cache file of this format",
            file=path.name,
            format=metadata.get("format", "none"),
            known=FORMAT,
            next_step="read files of mlx-lm or mlx-bun with engine.persistence.mlx_lm_file or mlx_bun_file",
        )
    text = metadata.get("header", "")
    if hashlib.sha256(text.encode()).hexdigest() != metadata.get("header_digest"):
        raise damaged(path, "the header does not have the digest that was written with it")
    header: dict[str, Any] = json.loads(text)
    return header


def _check_digests(arrays: dict[str, mx.array], digests: dict[str, str]) -> None:
    if set(arrays) != set(digests):
        raise ValueError(
            f"tensors {sorted(set(arrays) ^ set(digests))[:3]} are in the file or in its header, not in both"
        )
    for name, array in arrays.items():
        if _digest(array) != digests[name]:
            raise ValueError(f"tensor {name} does not have the digest that was written with it")


def _check_model(
    path: Path, expected: Fingerprints | None, found: Fingerprints, num_caches: int | None, held: int
) -> None:
    if expected is not None and (names := expected.differing(found)):
        raise CacheFileError(
            "the cache file belongs to another model",
            file=path.name,
            **{
                name: f"expected {_short(getattr(expected, name))}, found {_short(getattr(found, name))}"
                for name in names
            },
            next_step="load it on the model that saved it, or prefill the prompt again",
        )
    if num_caches is not None and num_caches != held:
        raise CacheFileError(
            "the cache file belongs to another model",
            file=path.name,
            caches=f"expected {num_caches}, found {held}",
            next_step="load it on the model that saved it, or prefill the prompt again",
        )


def _digest(array: mx.array) -> str:
    digest = hashlib.sha256(f"{dtype_name(array)}\n{json.dumps(array.shape)}\n".encode())
    digest.update(to_bytes(array))
    return digest.hexdigest()


def _short(text: str) -> str:
    return repr(text if len(text) <= 12 else f"{text[:12]}...")
