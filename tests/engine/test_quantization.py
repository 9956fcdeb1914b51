"""The quantization entry of config.json: default, module entries, and what is refused."""

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.quantization import AFFINE_BITS, AFFINE_GROUPS, Format, Quantization

FOUR = Format(bits=4, group_size=64)
KNOWN = (
    "affine with bits in (2, 3, 4, 5, 6, 8) and group_size in (32, 64, 128)\n"
    "              mxfp4 with bits 4 and group_size 32\n"
    "              nvfp4 with bits 4 and group_size 16\n"
    "              mxfp8 with bits 8 and group_size 32"
)


def read(entry: object, key: str = "quantization") -> Quantization:
    return Quantization.from_config({key: entry})


def unknown_format(mode: str, bits: object, group_size: object) -> str:
    return (
        "config.json asks for an unknown weight format\n"
        f"  mode        {mode}\n"
        f"  bits        {bits}\n"
        f"  group size  {group_size}\n"
        f"  known       {KNOWN}\n"
        "  next        quantise the snapshot to one of these"
    )


def test_without_an_entry_nothing_is_quantised() -> None:
    for raw in ({}, {"quantization": None}, {"quantization_config": None}):
        assert Quantization.from_config(raw).format_of("lm_head") is None


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_the_entry_or_its_copy_gives_every_module_the_default(key: str) -> None:
    assert read({"bits": 4, "group_size": 64, "mode": "affine"}, key).format_of("model.layers.0.mlp.up_proj") == FOUR


def test_the_entry_itself_goes_before_its_copy() -> None:
    both = {"quantization": {"bits": 4, "group_size": 64}, "quantization_config": {"bits": 8, "group_size": 32}}
    assert Quantization.from_config(both).format_of("lm_head") == FOUR


def test_a_module_entry_goes_before_the_default_and_false_means_unquantised() -> None:
    entry = {"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 32}, "model.norm": False}
    quantization = read(entry)
    assert quantization.format_of("lm_head") == Format(bits=8, group_size=32)
    assert quantization.format_of("model.norm") is None
    assert quantization.format_of("model") == FOUR  # whole paths, not prefixes


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("group_size", AFFINE_GROUPS)
def test_every_width_and_group_that_mlx_packs_is_known(bits: int, group_size: int) -> None:
    assert read({"bits": bits, "group_size": group_size}).default == Format(bits=bits, group_size=group_size)


@pytest.mark.parametrize(
    ("change", "mode", "bits", "group_size"),
    [
        ({"bits": 7}, "affine", 7, 64),
        ({"bits": 1}, "affine", 1, 64),
        ({"bits": "4"}, "affine", "4", 64),
        ({"group_size": 16}, "affine", 4, 16),
        ({"group_size": 0}, "affine", 4, 0),
        ({"group_size": None}, "affine", 4, None),
        ({"mode": "mxfp4"}, "mxfp4", 4, 64),
    ],
)
@pytest.mark.parametrize("where", ["default", "module"])
def test_an_unknown_format_is_refused(
    where: str, change: dict[str, Any], mode: str, bits: object, group_size: object
) -> None:
    good = {"bits": 4, "group_size": 64}
    with pytest.raises(ConfigError) as caught:
        read(good | change if where == "default" else {**good, "lm_head": good | change})
    assert str(caught.value) == unknown_format(mode, bits, group_size)


@pytest.mark.parametrize("entry", [[], "4", 4, True, {}, {"bits": 4}, {"group_size": 64}])
def test_a_malformed_entry_is_refused(entry: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read(entry)
    assert str(caught.value) == (
        "the quantization entry of config.json is malformed\n"
        f"  found     {entry}\n"
        '  expected  {"group_size": 64, "bits": 4, "mode": "affine", "<module path>": {...} or false}\n'
        "  next      mend config.json"
    )


def test_an_incomplete_module_entry_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        read({"bits": 4, "group_size": 64, "lm_head": {"bits": 8}})
    assert str(caught.value) == (
        "a module's quantization entry is not as expected\n"
        "  missing  group_size\n"
        "  unknown  nothing\n"
        "  next     mend config.json"
    )


@pytest.mark.parametrize("value", [True, 8, "affine", None, [8]])
def test_a_key_that_means_nothing_is_refused(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"bits": 4, "group_size": 64, "quant_method": value, "lm_head": False})
    assert str(caught.value) == (
        "the quantization entry of config.json has keys that mean nothing here\n"
        "  keys  quant_method\n"
        "  next  mend config.json"
    )


def test_a_key_that_means_nothing_in_a_module_entry_is_refused() -> None:
    with pytest.raises(ConfigError):
        read({"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 32, "bit": 2}})


def test_a_width_that_is_no_integer_is_refused() -> None:
    with pytest.raises(ConfigError):
        read({"bits": 4.0, "group_size": 64})


def test_the_hubs_word_for_a_format_that_mlx_has_is_read() -> None:
    entry = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    mxfp4 = Format(bits=4, group_size=32, mode="mxfp4")
    assert read(entry, "quantization_config").format_of("model.layers.0.mlp.experts") == mxfp4
    assert read({"quant_method": "mxfp4"}, "quantization_config").default == mxfp4


@pytest.mark.parametrize("entry", [{"quant_method": "fp8"}, {"quant_method": "mxfp4", "desc_act": False}])
def test_another_word_of_the_hub_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the quantization entry of config\.json is malformed"):
        read(entry, "quantization_config")
