"""Files that appear whole or not at all.

Guarantees: after a crash or kill -9 at any moment the path holds the old content or the new, never a mixture; what is
left behind is at most a file that ends in `.partial`, which nothing reads.
"""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile


def write_atomically(path: Path, data: bytes) -> None:
    """Write a temporary neighbour, flush it to the disk, rename it over `path`; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".partial", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
