"""The runner of mlx-optiq: `python -m oracles.mlx_optiq.run REQUEST.json` in its environment, from the repository root.

Rows of a model come from mlx-lm's loader and loop, as they stand after `import optiq`; draws from mlx-optiq's own engine.
Request, traces and events are those of `oracles.runner_loop`. The provenance's switches name the patch set under `patches`.
"""

import sys
from dataclasses import replace
from typing import Final

from oracles.mlx_lm.run import Models
from oracles.mlx_optiq.patches import install
from oracles.runner_loop import RunCase, serve
from parity.provenance import Provenance

PACKAGES: Final = ("mlx", "mlx-cpu", "mlx-metal", "mlx-lm", "mlx-optiq")


def start() -> tuple[RunCase, Provenance]:
    """Import mlx-optiq, which takes seconds and patches mlx-lm."""
    patches = install()
    import mlx.core as mx  # noqa: PLC0415 - as the docstring says

    from oracles.mlx_lm.capture import capture  # noqa: PLC0415 - likewise, and after the patches
    from oracles.mlx_optiq.sampling import sample  # noqa: PLC0415 - likewise

    provenance = Provenance.capture(PACKAGES, device=mx.default_device().type.name)
    switches = dict(sorted({**provenance.switches, "patches": patches}.items()))
    return Models(capture, sample).run, replace(provenance, switches=switches)


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], start))
