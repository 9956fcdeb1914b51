"""Where everything lives that is not committed: snapshots, oracle environments, full rows of recorded logits.

`ASSAY_HOME` names the folder; without it the user's cache folder is used. Deleting it loses nothing that the commands
cannot rebuild.
"""

import os
from pathlib import Path

import platformdirs


def assay_home() -> Path:
    """The folder, absolute; it need not exist yet."""
    named = os.environ.get("ASSAY_HOME")
    return (
        Path(named).expanduser().absolute()
        if named
        else Path(platformdirs.user_cache_dir("mlx-assay", appauthor=False))
    )
