"""Opening a snapshot: only a family that stands in the table, and only with its own config.json."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.families import FAMILIES, family_module
from engine.model import open_model


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_the_table_has_a_model(name: str) -> None:
    assert family_module(name).Model


@pytest.mark.parametrize(
    ("model_type", "near"), [("lama", "llama"), ("LLAMA", "none"), (None, "none"), (3, "none"), (["llama"], "llama")]
)
def test_a_model_type_that_is_not_in_the_table_is_refused(
    write_llama: Callable[..., Path], edit_json: Callable[..., None], model_type: object, near: str
) -> None:
    folder = write_llama()
    edit_json(folder / "config.json", model_type=model_type)
    with pytest.raises(ConfigError) as caught:
        open_model(folder, dtype="f32")
    assert str(caught.value) == (
        f"model_type {model_type!r} is not supported\n"
        f"  supported  {', '.join(FAMILIES)}\n"
        f"  near       {near}\n"
        "  next       use a snapshot of a supported family"
    )


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json cannot be read\n"):
        open_model(tmp_path, dtype="f32")


def test_a_malformed_quantization_entry_is_refused(
    write_llama: Callable[..., Path], edit_json: Callable[..., None]
) -> None:
    folder = write_llama()
    edit_json(folder / "config.json", quantization={"bits": 4})
    with pytest.raises(ConfigError, match=r"^the quantization entry of config\.json is malformed\n"):
        open_model(folder, dtype="f32")
