"""The llama.cpp oracle as the registry and the environment see it: on demand, from source, hash for hash."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from oracles import environment
from oracles.environment import COMPLETE, environment_folder, is_ready
from oracles.registry import REGISTRY, Oracle, find_oracle, load_oracles
from parity.errors import OracleError

NAME = "llama-cpp-python"


@pytest.fixture
def oracle(tmp_path: Path) -> Oracle:
    lock = tmp_path / "requirements.lock"
    lock.write_text("gold==1.0 --hash=sha256:0\n")
    return replace(find_oracle(NAME), lock=lock, pins={"gold": "1.0"}, from_source={"gold": "-DPAN=ON"})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path / "home"))


def test_it_is_found_by_name_and_left_out_otherwise() -> None:
    assert NAME not in load_oracles()
    assert NAME in load_oracles(on_demand=True)
    assert find_oracle(NAME).from_source.keys() == {NAME}


def test_its_pins_are_what_the_lock_installs_and_everything_has_a_hash() -> None:
    oracle = find_oracle(NAME)
    text = oracle.lock.read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    assert oracle.pins.items() <= locked.items()
    assert oracle.pins[NAME] == oracle.version
    entries = re.split(r"\n(?=[a-z0-9-]+==)", text)
    assert len(entries) == len(locked)
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in text


def test_only_what_is_listed_is_built_from_source_and_with_its_arguments(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[list[str], str | None]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        environ = options["env"]
        ran.append((command, environ.get("CMAKE_ARGS") if isinstance(environ, dict) else None))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(environment.subprocess, "run", run)
    monkeypatch.setattr(environment, "installed_versions", lambda *_: {"gold": "1.0"})
    environment._build(oracle, environment_folder(oracle))
    command, arguments = ran[-1]
    assert command[-6:-2] == ["--only-binary", ":all:", "--no-binary", "gold"]
    assert arguments == "-DPAN=ON"
    wheels_alone = replace(oracle, from_source={})
    environment._build(wheels_alone, environment_folder(wheels_alone))
    command, arguments = ran[-1]
    assert "--no-binary" not in command
    assert arguments is None


def test_an_environment_built_with_other_arguments_is_not_used(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "installed_versions", lambda *_: {"gold": "1.0"})
    complete = environment_folder(oracle) / COMPLETE
    complete.parent.mkdir(parents=True)
    complete.write_text(json.dumps({"from_source": {"gold": "-DPAN=ON"}}))
    assert is_ready(oracle)
    assert not is_ready(replace(oracle, from_source={"gold": "-DPAN=OFF"}))
    assert not is_ready(replace(oracle, from_source={}))
    complete.write_text('{"torn')
    assert not is_ready(oracle)


def test_from_source_must_be_a_table(tmp_path: Path) -> None:
    broken = tmp_path / "registry.toml"
    text = REGISTRY.read_text()
    at = text.index(f"[{NAME}.from_source]")
    broken.write_text(text[:at].replace('believed_for = "ids', 'from_source = "all"\nbelieved_for = "ids'))
    with pytest.raises(OracleError, match=f"oracle '{NAME}' is not described as an oracle must be"):
        load_oracles(broken)
