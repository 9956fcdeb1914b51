"""config.json is read with nothing silently ignored: unknown keys, wrong types and missing keys are refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import IRRELEVANT, load_json, read_config
from engine.errors import ConfigError

NEEDED = {"model_type": "toy", "width": 8, "eps": 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    width: int
    eps: float
    tied: bool = True
    heads: int | None = None
    scaling: Mapping[str, Any] | None = None
    layers: tuple[str, ...] | None = None
    name: str = "none"


def read(**changes: Any) -> Toy:
    return read_config(Toy, NEEDED | changes, irrelevant={"marker": "says nothing"})


def test_every_field_takes_the_value_of_its_key_and_keeps_its_default_without() -> None:
    assert read() == Toy(width=8, eps=1e-5)
    everything = {"tied": False, "heads": 2, "scaling": {"factor": 2}, "layers": ["a", "b"], "name": "x"}
    assert read(**everything) == Toy(
        width=8, eps=1e-5, tied=False, heads=2, scaling={"factor": 2}, layers=("a", "b"), name="x"
    )


def test_null_fits_an_optional_field() -> None:
    assert read(heads=None, scaling=None, layers=None) == Toy(width=8, eps=1e-5)


def test_an_unknown_key_is_refused_with_the_near_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        read(widht=9)
    assert str(caught.value) == (
        "config key 'widht' is unknown to model_type 'toy'\n"
        "  value  9\n"
        "  near   width\n"
        "  next   teach the family what it means, or list it as irrelevant with a reason"
    )


def test_an_unknown_key_that_resembles_none_says_so() -> None:
    with pytest.raises(ConfigError) as caught:
        read(zzz=None)
    assert str(caught.value) == (
        "config key 'zzz' is unknown to model_type 'toy'\n"
        "  value  null\n"
        "  near   no known key\n"
        "  next   teach the family what it means, or list it as irrelevant with a reason"
    )


@pytest.mark.parametrize("key", [*IRRELEVANT, "marker"])
def test_a_key_listed_as_irrelevant_may_hold_anything(key: str) -> None:
    assert read(**{key: {"any": ["thing"]}} if key != "model_type" else {}) == Toy(width=8, eps=1e-5)


@given(key=st.text(min_size=1), value=st.none() | st.booleans() | st.integers() | st.text())
@settings(max_examples=50)
def test_any_key_that_is_neither_field_nor_listed_is_refused(key: str, value: object) -> None:
    known = {*Toy.__dataclass_fields__, *IRRELEVANT, "marker"}
    if key not in known:
        with pytest.raises(ConfigError, match="is unknown to model_type 'toy'"):
            read(**{key: value})


@pytest.mark.parametrize(
    ("key", "value", "expected", "found"),
    [
        ("width", "8", "int", 'str "8"'),
        ("width", 8.0, "int", "float 8.0"),
        ("width", True, "int", "bool true"),
        ("width", None, "int", "NoneType null"),
        ("eps", "1e-5", "float", 'str "1e-5"'),
        ("eps", True, "float", "bool true"),
        ("tied", 1, "bool", "int 1"),
        ("tied", "false", "bool", 'str "false"'),
        ("heads", True, "int or NoneType", "bool true"),
        ("heads", [2], "int or NoneType", "list [2]"),
        ("scaling", [1], "Mapping or NoneType", "list [1]"),
        ("layers", "full", "tuple or NoneType", 'str "full"'),
        ("name", 3, "str", "int 3"),
    ],
)
def test_a_value_of_another_type_is_refused_with_both_types(key: str, value: object, expected: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**{key: value})
    assert str(caught.value) == (
        f"config key {key!r} of model_type 'toy' has the wrong type\n"
        f"  expected  {expected}\n"
        f"  found     {found}\n"
        "  next      mend config.json"
    )


def test_an_integer_where_a_float_belongs_becomes_that_float() -> None:
    value = read(eps=8).eps
    assert (type(value), value) == (float, 8.0)


def test_an_element_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError):
        read(layers=["a", 1])


def test_missing_keys_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(Toy, {"model_type": "toy"}, irrelevant={})
    assert str(caught.value) == (
        "config.json lacks what model_type 'toy' needs\n"
        "  missing  width, eps\n"
        "  next     take the config.json that belongs to these weights"
    )


def test_a_json_object_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [1, "é"]}', encoding="utf-8")
    assert load_json(tmp_path / "config.json") == {"a": [1, "é"]}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError) as caught:
        load_json(file)
    assert str(caught.value) == (
        "config.json cannot be read\n"
        f"  file    {file}\n"
        f"  reason  [Errno 2] No such file or directory: '{file}'\n"
        "  next    mend the file"
    )


@pytest.mark.parametrize("text", [b"", b"{", b"{'a': 1}", b'{"a": 1', b"\xff\xfe", b'{"a": 1} extra'])
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        load_json(file)
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["config.json cannot be read", f"  file    {file}"]
    assert lines[2].startswith("  reason  ")
    assert lines[3:] == ["  next    mend the file"]


@pytest.mark.parametrize(("text", "found"), [("[]", "list"), ("3", "int"), ('"x"', "str"), ("null", "NoneType")])
def test_json_that_is_not_an_object_is_refused(tmp_path: Path, text: str, found: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_json(file)
    assert str(caught.value) == (
        "config.json is not a JSON object\n"
        f"  file   {file}\n"
        f"  found  {found}\n"
        "  next   mend the file"
    )  # fmt: skip
