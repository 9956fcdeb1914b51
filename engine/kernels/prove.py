"""`python -m engine.kernels.prove [NAME ...]`: hold every compiled product and the fused step to mlx, on this machine and now.

Guarantees: nothing is read from disk and nothing is kept; a line each, IDENTICAL or with what differs. Exit code 0 if all are
identical, else 1. For a new machine, a new mlx or another architecture, before anyone relies on the kernels there.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from numba.core.errors import NumbaError

from engine.kernels.driver import SMALL_FLOATS, Driver, Form, compiled, has_half_precision
from engine.kernels.layout import WIDTHS
from engine.kernels.step import step_code
from engine.kernels.tile import STORED
from engine.kernels.verify import KernelError, verify
from engine.kernels.verify_step import verify_step

FORMS: Final = (
    *(Form(stored=stored, bits=bits) for stored in STORED for bits in (None, *WIDTHS)),
    *(Form(stored=stored, bits=bits, mode=mode) for stored in STORED for mode, (bits, _) in SMALL_FLOATS.items()),
)
STEP: Final = "fused-step"


def prove(
    names: Sequence[str], *, say: Callable[[str], None], compile_form: Callable[[Form, Path], Driver] = compiled
) -> int:
    """Hold kernels to mlx.

    Args:
        names: Such as `packed-4-f32` or `fused-step`; none for all.
        say: Takes a line a kernel.
        compile_form: From a form and a folder to its compiled product.

    Returns:
        0 if all are identical, 1 if one is not, 2 if a name is unknown; then nothing was compiled.
    """
    known = [*(form.name for form in FORMS), STEP]
    if unknown := [name for name in names if name not in known]:
        say(f"unknown kernels: {', '.join(unknown)}\n  known  {', '.join(known)}")
        return 2
    worst = 0
    with TemporaryDirectory(prefix="assay-kernels-") as scratch:
        folder = Path(scratch)

        def one(name: str, hold: Callable[[], None]) -> int:
            if names and name not in names:
                return 0
            if name.endswith("-f16") and not has_half_precision():
                say(f"{name}: left out, this processor converts no float16")
                return 0
            try:
                hold()
            except (KernelError, NumbaError, RuntimeError, OSError) as error:
                say(f"{name}: {error}")
                return 1
            say(f"{name}: IDENTICAL")
            return 0

        for form in FORMS:
            worst = max(worst, one(form.name, lambda form=form: verify(form, compile_form(form, folder))))  # type: ignore[misc]
        return max(worst, one(STEP, lambda: verify_step(step_code(folder))))


def _line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(prove(sys.argv[1:], say=_line))
