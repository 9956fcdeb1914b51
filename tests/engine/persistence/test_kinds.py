"""The format's README lists every kind with its fields, and what cannot be described is refused."""

import re
from dataclasses import fields
from pathlib import Path

import mlx.core as mx
import pytest

from engine.cache.group import CacheGroup
from engine.cache.plain import PlainCache
from engine.cache.recurrent import RecurrentCache
from engine.persistence import kinds
from engine.persistence.kinds import KINDS, describe, rebuild

README = (Path(kinds.__file__).parent / "README.md").read_text(encoding="utf-8")


def test_the_readme_lists_every_kind_with_its_fields() -> None:
    table = README.split("| kind | fields |")[1].split("\n\n")[0]
    told = {
        kind: re.findall(r"`(\w+)`", row)
        for kind, row in re.findall(r"^\| `([\w-]+)` \| (.+) \|$", table, re.MULTILINE)
    }
    assert told == {word: [field.name for field in fields(kind.type)] for word, kind in KINDS.items()}


def test_every_kind_has_a_class_of_its_own() -> None:
    assert len({kind.type for kind in KINDS.values()}) == len(KINDS)


def test_a_description_is_json_with_arrays_by_name() -> None:
    arrays: dict[str, mx.array] = {}
    new = mx.ones((1, 1, 3, 2))
    plain, *_ = PlainCache().append(new, new)
    group = CacheGroup(members=(RecurrentCache(state=(None, mx.zeros((1, 4))), offset=3), plain))
    assert describe(group, "7", arrays) == {
        "kind": "list",
        "members": [
            {
                "kind": "recurrent",
                "state": [None, {"array": "7.members.0.state.1"}],
                "offset": 3,
                "padding": None,
                "lengths": None,
                "rows": 1,
            },
            {
                "kind": "plain",
                "keys": {"array": "7.members.1.keys"},
                "values": {"array": "7.members.1.values"},
                "offset": 3,
            },
        ],
    }
    assert arrays["7.members.1.keys"].shape == (1, 1, 3, 2)
    again = rebuild(describe(group, "7", {}), arrays)
    assert (again.kind, again.offset) == ("list[arrays-2,plain]", 3)


@pytest.mark.parametrize("description", [{"kind": "spiral"}, {}, {"kind": None}])
def test_an_unknown_kind_is_refused_with_the_known_ones(description: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"known are plain, quantized, .*turboquant-vlm-vectors"):
        rebuild(description, {})
