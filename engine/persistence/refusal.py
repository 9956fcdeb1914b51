"""The one error of cache files: the file is not there, not whole, not readable, or not of this model."""

from pathlib import Path
from typing import ClassVar

from engine.errors import EngineError


class CacheFileError(EngineError):
    """A cache file cannot be used, and nothing of it was."""

    kind: ClassVar[str] = "cache_file"


def damaged(path: Path, reason: str) -> CacheFileError:
    """The refusal of a file that is not as it was written."""
    return CacheFileError(
        "the cache file is damaged or cut short",
        file=path.name,
        reason=reason,
        next_step="delete it and prefill the prompt again",
    )


def read_file(path: Path) -> bytes:
    """All bytes of a file.

    Raises:
        CacheFileError: It is not there, or cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise CacheFileError(
            "the cache file cannot be read",
            file=path.name,
            reason=error.strerror or str(error),
            next_step="give the path of a saved cache",
        ) from error
