import ensurepip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from oracles import environment
from oracles.environment import COMPLETE, ensure_environment, environment_folder, installed_versions, is_ready
from oracles.registry import Oracle
from parity.errors import OracleError


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.fixture
def local(oracle: Oracle, tmp_path: Path) -> Oracle:
    """An oracle whose whole environment is one small wheel on disk."""
    wheel = tmp_path / "gold-1.0-py3-none-any.whl"
    files = {
        "gold.py": "",
        "gold-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: gold\nVersion: 1.0\n",
        "gold-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("gold-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in files))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    oracle.lock.write_text(f"gold @ {wheel.as_uri()} --hash=sha256:{digest}\n")
    return replace(oracle, pins={"gold": "1.0"})


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pip and nothing else; pip is unpacked into it, since having it installed takes seconds."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    shelves = [
        Path(ensurepip.__file__).parent / "_bundled",
        Path(sysconfig.get_config_var("WHEEL_PKG_DIR") or "/nowhere"),
    ]
    (wheel,) = (file for shelf in shelves for file in shelf.glob("pip-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(next(folder.glob("lib/python*/site-packages")))
    caching = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--help"]  # leaves its compiled modules for the copies
    subprocess.run(pip, check=True, stdout=subprocess.DEVNULL, env=caching)
    return folder


@pytest.fixture
def copied(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let builds copy `bare` instead of making a virtual environment of their own; pip runs as it does."""
    real = environment._step

    def step(oracle: Oracle, command: list[str]) -> None:
        if command[1:3] == ["-m", "venv"]:
            shutil.copytree(bare, command[3], symlinks=True)
        else:
            real(oracle, command)

    monkeypatch.setattr(environment, "_step", step)


@pytest.mark.usefixtures("copied")
def test_an_environment_is_built_once_checked_and_rebuilt_when_altered(local: Oracle) -> None:
    lines = []
    python = ensure_environment(local, on_line=lines.append)
    assert python.is_file()
    assert is_ready(local)
    assert installed_versions(local, environment_folder(local)) == {"gold": "1.0"}
    assert ensure_environment(local, on_line=lines.append) == python
    assert lines == ["building the environment of fake 1.0"]
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "gold"], check=True)
    assert not is_ready(local)
    ensure_environment(local, on_line=lines.append)
    assert lines[1:] == ["removing an unfinished or altered environment of fake 1.0", lines[0]]
    assert is_ready(local)


@pytest.mark.usefixtures("copied")
def test_an_environment_that_was_killed_while_being_built_is_not_used(local: Oracle) -> None:
    folder = environment_folder(local)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    assert not is_ready(local)
    ensure_environment(local)
    assert json.loads((folder / COMPLETE).read_text())["pins"] == {"gold": "1.0"}
    (folder / COMPLETE).unlink()  # killed after the pinned distributions, before the rest of the lock
    assert not is_ready(local)


@pytest.mark.usefixtures("copied")
def test_a_wrong_hash_fails_with_the_last_lines_of_pip(local: Oracle) -> None:
    local.lock.write_text(local.lock.read_text().replace("sha256:", "sha256:0")[:-2] + "\n")
    with pytest.raises(OracleError) as failed:
        ensure_environment(local)
    lines = str(failed.value).splitlines()
    assert lines[0] == "the environment of oracle fake 1.0 could not be built"
    assert lines[1] == "  step  -m pip install"
    assert "DO NOT MATCH THE HASHES" in str(failed.value)
    assert lines[-1] == "  next  see that PyPI can be reached, then assay oracles sync fake"
    assert not is_ready(local)


@pytest.mark.usefixtures("copied")
def test_a_distribution_without_a_hash_is_not_installed(local: Oracle) -> None:
    local.lock.write_text(local.lock.read_text().split(" --hash")[0] + "\n")
    with pytest.raises(OracleError, match="Hashes are required in --require-hashes mode"):
        ensure_environment(local)


@pytest.mark.usefixtures("copied")
def test_versions_other_than_pinned_are_an_error_and_leave_nothing_usable(local: Oracle) -> None:
    wrong = replace(local, pins={"gold": "2.0"})
    with pytest.raises(OracleError) as failed:
        ensure_environment(wrong)
    assert str(failed.value).splitlines()[:3] == [
        "the environment of oracle fake 1.0 does not hold its pins",
        "  expected  gold 2.0",
        "  found     gold 1.0",
    ]
    assert not (environment_folder(wrong) / COMPLETE).exists()


def test_the_folder_is_named_after_version_lock_and_python(local: Oracle, home: Path) -> None:
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    assert environment_folder(local) == home / "oracles" / f"fake-1.0-{local.lock_digest[:12]}-{python}"
    before = environment_folder(local)
    local.lock.write_text("other")
    assert environment_folder(local) != before


def test_a_step_that_cannot_start_is_an_oracle_error(local: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.sys, "executable", "/nonexistent/python")
    with pytest.raises(OracleError, match="could not be built"):
        ensure_environment(local)
