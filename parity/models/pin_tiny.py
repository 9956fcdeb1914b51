"""Pin the digests of tiny snapshots: `python -m parity.models.pin_tiny [CONFIG ...]`, all configs without an argument.

Draws every form of each config and writes `configs/CONFIG.digests.json`. A digest that changes makes the goldens of that
snapshot stale, which is why pinning is a command of its own and its result is reviewed.
"""

import json
import sys
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from parity.atomic_file import write_atomically
from parity.models.tiny_catalogue import TinySource, config_names, forms_of, write
from parity.snapshot import Snapshot


def pin(config: str, target: Path) -> None:
    """Draw every form of a config and write its digests into the folder `target`."""
    pinned = {}
    for form in forms_of(config):
        with TemporaryDirectory() as folder:
            write(TinySource(config=config, form=form), Path(folder))
            pinned[form] = dict(Snapshot.read(Path(folder)).files)
    write_atomically(target / f"{config}.digests.json", json.dumps(pinned, indent=1).encode() + b"\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or config_names():
        pin(name, Path(str(files("parity.models") / "configs")))
        print(name)  # noqa: T201 - a command
