import re
from pathlib import Path

import pytest

from oracles import registry
from oracles.registry import REGISTRY, Oracle, find_oracle, load_oracles
from parity.errors import OracleError, UsageError

NAME = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)


@pytest.mark.parametrize("oracle", load_oracles().values(), ids=lambda oracle: oracle.name)
def test_pins_are_what_the_lock_installs(oracle: Oracle) -> None:
    locked = dict(NAME.findall(oracle.lock.read_text()))
    assert oracle.pins.items() <= locked.items()
    assert oracle.pins[oracle.name] == oracle.version


@pytest.mark.parametrize("oracle", load_oracles().values(), ids=lambda oracle: oracle.name)
def test_every_distribution_in_the_lock_has_a_hash_and_no_index_is_named(oracle: Oracle) -> None:
    text = oracle.lock.read_text()
    entries = re.split(r"\n(?=[a-z0-9-]+==)", text[text.index("==") :])
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in text
    assert "--index" not in text


def test_an_unknown_oracle_lists_the_near_ones() -> None:
    with pytest.raises(UsageError) as unknown:
        find_oracle("mlxlm")
    assert (
        str(unknown.value)
        == "unknown oracle 'mlxlm'\n  near  mlx-lm, mlx-vlm, mlx-lm==0.31.3\n  next  assay oracles list"
    )


def test_a_table_with_a_key_missing_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "registry.toml"
    broken.write_text(REGISTRY.read_text().replace("entry =", "entrance ="))
    with pytest.raises(OracleError, match="oracle 'mlx-lm' is not described as an oracle must be"):
        load_oracles(broken)


def test_the_lock_digest_follows_the_lock(oracle: Oracle) -> None:
    before = oracle.lock_digest
    oracle.lock.write_text(oracle.lock.read_text() + "# changed\n")
    assert oracle.lock_digest != before


@pytest.mark.parametrize("changed", ["oracles/recording.py", "oracles/mlx_lm/capture.py", "parity/trace.py"])
def test_the_source_digest_covers_every_runner_and_what_it_stands_on(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    for name in ("oracles/recording.py", "oracles/mlx_lm/capture.py", "parity/trace.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    monkeypatch.setattr(registry, "REPOSITORY", tmp_path)
    before = oracle.source_digest
    (tmp_path / changed).write_text("after")

    assert oracle.source_digest != before
