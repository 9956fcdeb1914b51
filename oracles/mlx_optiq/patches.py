"""What mlx-optiq changes in mlx-lm in this process, said and checked; one patch set a process.

The patch set is `import optiq`: importing any part of mlx-optiq registers its models and rebinds parts of mlx-lm, and cannot be
undone. Nothing else is installed. What draws tokens is not among what it rebinds.

Guarantees: `install` refuses a process in which mlx-optiq's own settings are set, mlx-optiq is loaded already, its registration
failed (it swallows the reason), or a function that draws was replaced. mlx-optiq's home is an empty folder.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

HOME: Final = "OPTIQ_HOME"
PATCHES: Final = "import optiq"
DRAWS: Final = {  # module to the names in it that a draw goes through
    "mlx.core": ("argmax", "softmax", "log"),
    "mlx.core.random": ("categorical", "seed", "split", "uniform"),
    "mlx_lm.sample_utils": ("apply_top_k", "apply_top_p", "apply_min_p", "categorical_sampling"),
}


def install() -> str:
    """Import mlx-optiq in a home of its own.

    Returns:
        The patch set, for the provenance.

    Raises:
        RuntimeError: The process is not clean, or afterwards not what the patch set says.
    """
    if "optiq" in sys.modules:
        raise RuntimeError("mlx-optiq is loaded already: what it has patched is unknown")
    use_empty_home(os.environ)
    before = drawing_functions()
    importlib.import_module("optiq")
    check_registered(importlib.import_module("optiq.mlx_lm_patches._register"))
    check_untouched(before, drawing_functions())
    return PATCHES


def use_empty_home(environ: "os._Environ[str] | dict[str, str]") -> None:
    """Point mlx-optiq at a new folder, where it finds no configuration.

    Raises:
        RuntimeError: Other settings of mlx-optiq are set.
    """
    if found := sorted(name for name in environ if name.startswith("OPTIQ_")):
        raise RuntimeError(f"settings of mlx-optiq are set: {', '.join(found)}")
    environ[HOME] = str(Path(mkdtemp(prefix="optiq-")))  # in the private folder that TMPDIR names; removed with it


def drawing_functions() -> dict[str, Any]:
    """What draws tokens now, by name."""
    modules = {name: importlib.import_module(name) for name in DRAWS}
    return {f"{name}.{each}": getattr(modules[name], each) for name, names in DRAWS.items() for each in names}


def check_registered(register: Any) -> None:  # noqa: ANN401 - a module of mlx-optiq
    """Refuse a registration that did not reach its end.

    Raises:
        RuntimeError: It did not.
    """
    if register._REGISTERED is not True:  # noqa: SLF001 - the only sign that it gives
        raise RuntimeError("mlx-optiq did not register its models: the patch set is not what the provenance would say")


def check_untouched(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse draws that go through other functions than mlx's and mlx-lm's.

    Raises:
        RuntimeError: Some do.
    """
    if replaced := [name for name, function in before.items() if after[name] is not function]:
        raise RuntimeError(f"importing mlx-optiq replaced {', '.join(replaced)}")
