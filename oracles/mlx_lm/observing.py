"""What the facts about mlx-lm are tried on: tiny snapshots, also under another config, and the words for what was seen."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

Observed = tuple[bool, str]
SEED: Final = 7


class Snapshots:
    """The tiny snapshots, also with another config."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder = folder
        self._scratch = scratch

    def model(self, name: str, **changes: Any) -> Any:  # noqa: ANN401 - mlx-lm has no types
        """A model in float32."""
        folder = self.changed(name, **changes) if changes else self._folder / name
        model, _ = load_model(folder)
        model.set_dtype(mx.float32)
        return model

    def changed(self, name: str, **changes: Any) -> Path:  # noqa: ANN401 - JSON values
        """A copy with other config values and the same weights."""
        copy = Path(tempfile.mkdtemp(dir=self._scratch))
        for file in (self._folder / name).glob("*.safetensors"):
            (copy / file.name).symlink_to(file)
        config = json.loads((self._folder / name / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        text.update(changes)
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return copy


def ids_of(length: int) -> list[int]:
    """Token ids below 512, the same every time."""
    return [int(i) for i in np.random.PCG64(SEED).random_raw(length) % 512]


def logits(model: Any, length: int = 40) -> Any:  # noqa: ANN401 - numpy words
    """Bits of the last row of one forward."""
    row = model(mx.array([ids_of(length)]), cache=make_prompt_cache(model))[:, -1]
    return np.array(row.astype(mx.float32).view(mx.uint32))


def raises(kind: type[BaseException], words: str, act: Callable[[], object]) -> Observed:
    """Whether an act raises that, with these words."""
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - SystemExit is among what is looked for
        return isinstance(error, kind) and words in str(error), f"{type(error).__name__}: {str(error)[:90]}"
    return False, "nothing is raised"
