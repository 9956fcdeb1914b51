"""Every tiny snapshot has a name of its own and pinned digests, and drawing it gives them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity.models.catalogue import entries
from parity.models.hub_layouts import has_hub_layout
from parity.models.tiny import build_tiny, pack_tiny
from parity.models.tiny_catalogue import PACKED, TinySource, config_names, digests, forms_of, read, write
from parity.models.tiny_shapes import shapes
from parity.models.weight_format import FORMATS
from parity.snapshot import Snapshot
from parity.tensor import Tensor

every_config = pytest.mark.parametrize("config", config_names())


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (TinySource(config="llama"), "llama-tiny"),
        (TinySource(config="llama", form="bf16"), "llama-tiny"),
        (TinySource(config="qwen3", form="mxfp4"), "qwen3-mxfp4-tiny"),
        (TinySource(config="gemma4_text_moe", form="hub"), "gemma4_text_moe-hub-tiny"),
    ],
)
def test_a_name_says_config_and_form(source: TinySource, name: str) -> None:
    assert source.name == name


def test_the_forms_are_drawn_packed_and_where_it_differs_the_hubs() -> None:
    assert PACKED == ("q4g32", "q4g64", "q8g64", "mxfp4", "nvfp4", "mxfp8", "mixed")
    assert forms_of("llama") == ("bf16", *PACKED)
    for config in config_names():
        differs = has_hub_layout(read(config)["model_type"])
        assert forms_of(config) == (("bf16", *PACKED, "hub") if differs else ("bf16", *PACKED))


@every_config
def test_every_form_of_a_config_is_pinned_and_nothing_else(config: str) -> None:
    pinned = read(config, ".digests")
    assert list(pinned) == list(forms_of(config)), f"python -m parity.models.pin_tiny {config}"
    for files in pinned.values():
        assert sorted(files) == ["config.json", "model.safetensors"]
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in files.values())


@every_config
def test_two_forms_of_a_config_are_never_the_same_snapshot(config: str) -> None:
    weights = [files["model.safetensors"] for files in read(config, ".digests").values()]
    assert len(set(weights)) == len(weights)


@every_config
def test_a_config_names_its_family_and_its_packable_modules_have_weights(config: str) -> None:
    layout = read(config, ".tensors")
    assert re.fullmatch("[a-z0-9_]+", read(config)["model_type"])
    assert layout["packable"]
    assert {f"{path}.weight" for path in layout["packable"]} <= layout["tensors"].keys()
    assert "quantization" not in read(config)


def test_every_pinned_snapshot_is_in_the_catalogue_under_its_name() -> None:
    known = digests()
    assert len(known) == sum(len(read(config, ".digests")) for config in config_names())
    for name, (source, files) in known.items():
        assert source.name == name
        assert entries()[name].source == source
        assert entries()[name].files == files


def test_a_part_that_is_not_there_is_empty() -> None:
    assert read("llama", ".nothing") == {}
    assert read("alpaca") == {}


@pytest.mark.parametrize("name", ["llama-mixed-tiny", "qwen2-nvfp4-tiny", "gemma2-q4g64-tiny"])
def test_drawing_gives_the_pinned_digests(name: str, tmp_path: Path) -> None:
    source, files = digests()[name]
    write(source, tmp_path)
    assert Snapshot.read(tmp_path).files == files


def test_another_seed_is_another_snapshot(tmp_path: Path) -> None:
    source, files = digests()["llama-tiny"]
    write(TinySource(config=source.config, seed=1), tmp_path)
    drawn = Snapshot.read(tmp_path).files
    assert drawn["config.json"] == files["config.json"]
    assert drawn["model.safetensors"] != files["model.safetensors"]


def test_our_list_of_a_llamas_tensors_is_the_oracles() -> None:
    listed = {name: tuple(shape) for name, shape in read("llama", ".tensors")["tensors"].items()}
    assert shapes(read("llama")) == listed


# packing what was drawn


CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 64}
SHAPES = {"a.weight": (8, 64), "b.weight": (8, 64), "c.weight": (8, 48), "norm.weight": (64,)}


def packed(form: str, packable: list[str]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    tensors = build_tiny(SHAPES)
    config, out = pack_tiny(CONFIG, tensors, packable, form)
    return config, tensors, out


@pytest.mark.parametrize("form", FORMATS)
def test_packable_weights_are_packed_and_the_rest_stays_as_drawn(form: str) -> None:
    config, drawn, out = packed(form, ["a"])
    assert config == CONFIG | {"quantization": FORMATS[form].entry()}
    assert out["a.weight"].dtype == "U32"
    assert ("a.biases" in out) == (FORMATS[form].mode == "affine")
    assert {name: out[name] for name in ("b.weight", "c.weight", "norm.weight")} == {
        name: drawn[name] for name in ("b.weight", "c.weight", "norm.weight")
    }
    assert "b.scales" not in out
    assert CONFIG == {"model_type": "llama", "hidden_size": 64}


@pytest.mark.parametrize("form", [*FORMATS, "mixed"])
def test_a_row_that_no_group_divides_stays_as_drawn(form: str) -> None:
    config, drawn, out = packed(form, ["c"])
    assert out == drawn
    assert config["quantization"].get("c", False) is False


def test_a_mixture_names_every_module_that_is_not_the_default() -> None:
    tensors = build_tiny({f"m{i}.weight": (8, 64) for i in range(9)})
    config, out = pack_tiny(CONFIG, tensors, [f"m{i}" for i in range(9)], "mixed")
    entry = config["quantization"]
    assert {key: entry[key] for key in ("bits", "group_size", "mode")} == {
        "bits": 4,
        "group_size": 64,
        "mode": "affine",
    }
    own = {key: value for key, value in entry.items() if key.startswith("m") and key != "mode"}
    assert own["m3"] is False
    assert "m1" not in own  # the default itself
    for i in range(9):
        form = own.get(f"m{i}", entry)
        if form is False:
            assert out[f"m{i}.weight"] == tensors[f"m{i}.weight"]
        else:
            assert out[f"m{i}.weight"].shape == (8, 64 * form["bits"] // 32)
            assert out[f"m{i}.scales"].shape == (8, 64 // form["group_size"])


def test_stacked_experts_are_packed_row_by_row() -> None:
    tensors = build_tiny({"x.weight": (3, 8, 64)})
    _, out = pack_tiny(CONFIG, tensors, ["x"], "q4g32")
    assert out["x.weight"].shape == (3, 8, 8)
    flat = {"x.weight": Tensor(dtype="BF16", shape=(24, 64), data=tensors["x.weight"].data)}
    _, as_matrix = pack_tiny(CONFIG, flat, ["x"], "q4g32")
    for leaf in ("weight", "scales", "biases"):
        assert np.array_equal(out[f"x.{leaf}"].bits().reshape(24, -1), as_matrix[f"x.{leaf}"].bits())
