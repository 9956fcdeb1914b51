"""The tiny snapshots: one a config and weight format, each with the digests that drawing it must give.

`configs/NAME.json` is a config.json; `NAME.tensors.json` lists the tensors that the oracle's model has for it (written by
`oracles.mlx_lm.tensor_layout`); `NAME.digests.json` pins what is drawn, format by format (written by
`parity.models.pin_tiny`). `NAME-tiny` has bfloat16 weights, `NAME-q4g32-tiny` packed ones, `NAME-hub-tiny` the names and
shapes of the hub where the oracle's own differ.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from parity.models.hub_layouts import has_hub_layout, hub_config, to_hub
from parity.models.tiny import build_tiny, pack_tiny, write_snapshot
from parity.models.weight_format import FORMATS

DRAWN: Final = "bf16"
HUB: Final = "hub"
PACKED: Final = (*FORMATS, "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySource:
    """Drawn from a seed.

    Attributes:
        config: Stem of a file in `configs/`.
        form: `bf16`, a packed format, or `hub`.
        seed: Part of every tensor's own seed.
    """

    config: str
    form: str = DRAWN
    seed: int = 0

    @property
    def name(self) -> str:
        """`qwen3-tiny`, `qwen3-mxfp4-tiny`."""
        return f"{self.config}-tiny" if self.form == DRAWN else f"{self.config}-{self.form}-tiny"


def config_names() -> list[str]:
    """Stems of the configs that have a list of tensors."""
    folder = files(__package__) / "configs"
    return sorted(f.name.removesuffix(".tensors.json") for f in folder.iterdir() if f.name.endswith(".tensors.json"))


def forms_of(config: str) -> tuple[str, ...]:
    """The forms in which a config is drawn."""
    hub = (HUB,) if has_hub_layout(read(config)["model_type"]) else ()
    return (DRAWN, *PACKED, *hub)


def read(config: str, part: str = "") -> dict[str, Any]:
    """A config, or with `part` its `.tensors` or `.digests`; empty where that part is not there."""
    file = files(__package__) / "configs" / f"{config}{part}.json"
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found


def digests() -> dict[str, tuple[TinySource, Mapping[str, str]]]:
    """Every pinned tiny snapshot by name: how it is drawn and what its files must be."""
    found = {}
    for config in config_names():
        for form, pinned in read(config, ".digests").items():
            source = TinySource(config=config, form=form)
            found[source.name] = (source, pinned)
    return found


def write(source: TinySource, folder: Path) -> None:
    """Draw a snapshot into `folder`."""
    config, layout = read(source.config), read(source.config, ".tensors")
    shapes = {name: tuple(shape) for name, shape in layout["tensors"].items()}
    tensors = build_tiny(shapes, seed=source.seed, model_type=config["model_type"])
    if source.form == HUB:
        config, tensors = hub_config(config), to_hub(config, tensors)
    elif source.form != DRAWN:
        config, tensors = pack_tiny(config, tensors, layout["packable"], source.form)
    write_snapshot(folder, config, tensors)
