"""Sweep mlx-optiq: `python -m oracles.mlx_optiq.sweep REQUEST.json` in its environment, from the repository root.

mlx-optiq patches mlx-lm, so what is asked is mlx-lm as it is after `import optiq` and the patches of uniformly packed keys and
values, which also reach ring caches. One process carries them for every row, those of `fp` among them.
"""

import sys
from typing import Final

from oracles.mlx_lm.sweep import serve
from parity.kv import KV

PATCHED_FOR: Final = "kv8-g32"


def main(file: str) -> int:
    """Import, patch, answer."""
    from oracles.mlx_optiq import patches  # noqa: PLC0415 - rebinds names of mlx-lm

    patches.install(KV.parse(PATCHED_FOR))
    from oracles.mlx_lm.sweep_subject import MlxLmSubject  # noqa: PLC0415 - it takes functions by name, so after the patches

    return serve(file, MlxLmSubject)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
