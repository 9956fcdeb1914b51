"""A kv_config.json is read whole or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cache.per_layer import LayerWidth, as_kv_config, layer_widths, read_kv_config
from engine.errors import ConfigError


def test_widths_come_by_place_with_64_where_no_group_is_given(tmp_path: Path) -> None:
    file = tmp_path / "kv_config.json"
    file.write_text('[{"layer_idx": 5, "bits": 4, "group_size": 32}, {"layer_idx": 1, "bits": 8}]')
    assert read_kv_config(file) == (LayerWidth(cache=1, bits=8), LayerWidth(cache=5, bits=4, group_size=32))


def test_of_two_entries_for_one_cache_the_last_one_counts() -> None:
    raw = [{"layer_idx": 1, "bits": 8}, {"layer_idx": 0, "bits": 2}, {"layer_idx": 1, "bits": 4, "group_size": 128}]
    assert layer_widths(raw) == (LayerWidth(cache=0, bits=2), LayerWidth(cache=1, bits=4, group_size=128))


def test_what_is_read_can_be_written() -> None:
    widths = (LayerWidth(cache=0, bits=2), LayerWidth(cache=1, bits=4, group_size=128))
    assert layer_widths(json.loads(json.dumps(as_kv_config(widths)))) == widths


@pytest.mark.parametrize(
    ("raw", "found"), [({"layers": []}, "dict"), ([], "an empty list"), ("[]", "str"), (None, "NoneType")]
)
def test_anything_but_a_list_of_entries_is_refused(raw: Any, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layer_widths(raw)
    assert str(caught.value) == (
        f"kv_config.json must be a list of entries\n  found  {found}\n  next   list one entry a cache"
    )


@pytest.mark.parametrize(
    "entry",
    [
        {"layer_idx": 1}, {"bits": 8}, {"layer_idx": 1, "bits": "8"}, {"layer_idx": True, "bits": 8}, 7,
        {"layer_idx": 1, "bits": 8, "groups": 64}, {"layer_idx": 1, "bits": 8.0},
    ],
)  # fmt: skip
def test_an_entry_that_is_no_width_is_refused_and_shown(entry: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        layer_widths([{"layer_idx": 0, "bits": 8}, entry])
    assert str(caught.value) == (
        "kv_config.json, entry 1 is not a width\n"
        f"  found  {json.dumps(entry)}\n"
        "  known  layer_idx, bits and, if it is not 64, group_size; whole numbers\n"
        "  next   mend the entry"
    )


@pytest.mark.parametrize("change", [{"bits": 7}, {"group_size": 16}, {"layer_idx": -1}])
def test_a_width_that_no_cache_has_is_refused(change: dict[str, int]) -> None:
    entry = {"layer_idx": 0, "bits": 8, "group_size": 64, **change}
    with pytest.raises(ConfigError) as caught:
        layer_widths([entry], name="mine.json")
    assert str(caught.value) == (
        "mine.json, entry 0 is not a width that a cache can have\n"
        f"  found  {json.dumps(entry)}\n"
        "  known  bits in (2, 3, 4, 5, 6, 8), group_size in (32, 64, 128), layer_idx of 0 or more\n"
        "  next   mend the entry"
    )


@pytest.mark.parametrize("text", [None, "[{]"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "kv_config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"kv_config\.json cannot be read(?s:.*)next +give a kv_config\.json"):
        read_kv_config(file)
