"""A family's hub layout is found by its model_type and is another one than the oracle's."""

from importlib.resources import files
from pathlib import Path

import pytest

from parity.models import hub_layouts
from parity.models.hub_layouts import has_hub_layout, hub_config, to_hub
from parity.models.tiny import build_tiny
from parity.models.tiny_catalogue import config_names, read
from parity.tensor import Tensor

HUB_CONFIGS = [config for config in config_names() if has_hub_layout(read(config)["model_type"])]
TENSORS = {"a.weight": Tensor(dtype="U8", shape=(2,), data=b"\1\2")}


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The name of a family whose layout is written for this test."""
    (tmp_path / "planted_family.py").write_text(
        '"""A layout that renames."""\n\n\n'
        "def to_hub(config, tensors):\n"
        "    return {f\"{config['prefix']}.{name}\": tensor for name, tensor in tensors.items()}\n"
    )
    monkeypatch.setattr(hub_layouts, "__path__", [*hub_layouts.__path__, str(tmp_path)])
    return "planted_family"


@pytest.mark.parametrize("model_type", ["llama", "alpaca", ""])
def test_a_family_without_a_file_has_the_same_layout_in_both(model_type: str) -> None:
    assert not has_hub_layout(model_type)


def test_a_file_named_after_the_family_is_found_and_used(plant: str) -> None:
    assert has_hub_layout(plant)
    assert to_hub({"model_type": plant, "prefix": "hub"}, TENSORS) == {"hub.a.weight": TENSORS["a.weight"]}


def test_a_config_stays_as_it_is_where_the_layout_says_nothing(plant: str) -> None:
    config = {"model_type": plant, "prefix": "hub"}
    assert hub_config(config) == config


@pytest.mark.parametrize("config", HUB_CONFIGS)
def test_a_layout_is_another_than_the_oracles_and_draws_nothing_by_itself(config: str) -> None:
    raw, layout = read(config), read(config, ".tensors")
    tensors = build_tiny(
        {name: tuple(shape) for name, shape in layout["tensors"].items()}, model_type=raw["model_type"]
    )
    given = dict(tensors)
    hub = to_hub(raw, tensors)
    assert hub != given or hub_config(raw) != raw
    assert tensors == given, "the drawn tensors are left as they were"
    assert to_hub(raw, tensors) == hub
    assert raw == read(config)


def test_every_layout_of_a_family_belongs_to_a_config() -> None:
    families = {read(config)["model_type"] for config in config_names()}
    layouts = [file for file in files("parity.models.hub_layouts").iterdir() if file.name.endswith(".py")]
    own = {file.name.removesuffix(".py") for file in layouts if "\ndef to_hub(" in file.read_text("utf-8")}
    assert own - {"__init__"} <= families
