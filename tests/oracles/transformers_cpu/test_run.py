"""What of the runner needs neither torch nor transformers."""

from dataclasses import replace
from pathlib import Path

import pytest

from oracles.registry import find_oracle, load_oracles
from oracles.transformers_cpu.run import Models, check_loading
from parity.case import KV
from tests.oracles.shop import make_case


def test_a_model_that_takes_every_tensor_is_accepted() -> None:
    check_loading({"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []})


@pytest.mark.parametrize("kind", ["missing_keys", "unexpected_keys", "mismatched_keys"])
def test_a_tensor_that_is_not_used_or_not_there_is_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"^the snapshot is not in transformers' layout: {kind} a, b, c$"):
        check_loading({kind: {"d", "c", "b", "a"}})


def test_packed_keys_are_refused_before_anything_is_loaded() -> None:
    case = replace(make_case(), kv=KV(bits=8, group_size=64))
    with pytest.raises(NotImplementedError, match="keys and values as computed"):
        Models().run(case, Path("nowhere"))


def test_nothing_builds_its_environment_unless_it_is_named() -> None:
    assert "transformers" not in load_oracles()
    assert find_oracle("transformers").on_demand


def test_its_lock_has_a_hash_for_everything_and_names_no_host() -> None:
    text = find_oracle("transformers").lock.read_text()
    entries = [entry for entry in text.split("\n") if "==" in entry and not entry.startswith((" ", "#"))]
    assert len(entries) > 30
    assert all(entry.endswith("\\") for entry in entries)
    assert "://" not in text
    assert not [entry for entry in entries if entry.startswith(("nvidia", "cuda", "triton"))]
