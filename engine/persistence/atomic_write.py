"""Files that appear whole or not at all, written piece by piece.

Guarantees: after a crash or kill -9 at any moment the path holds the old content or the new, never a mixture and never a part;
what is left behind is at most a file that ends in `.partial`, which nothing reads. No more than a piece is held in memory.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile


def write_atomically(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a temporary neighbour, flush it to the disk, rename it over `path`; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".partial", delete=False) as file:
        temporary = Path(file.name)
        try:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the rename durable
    finally:
        os.close(folder)
