import argparse
import json
from pathlib import Path
from typing import Any, Never

import pytest

from oracles.registry import Oracle, find_oracle, load_oracles
from parity.errors import OracleError, UsageError
from parity.verbs import oracles

EVERY = list(load_oracles(on_demand=True))
BUILT_UNNAMED = ["mlx-lm", "mlx-optiq"]  # what the gate and the goldens of every platform need


def run(*arguments: str, as_json: bool = False) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    oracles.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args([*(["--json"] if as_json else []), "oracles", *arguments])
    return args.run(args)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path))


def test_list_names_version_state_and_pins_and_what_is_built_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    pins = " ".join(f"{name}=={version}" for name, version in find_oracle("mlx-lm").pins.items())
    assert f"mlx-lm 0.32.2  not built  {pins}" in lines
    assert "llama-cpp-python 0.3.36  not built, on demand  llama-cpp-python==0.3.36" in lines
    assert [line.split()[0] for line in lines] == EVERY


def test_a_terminal_shows_the_same_states(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    assert run("list") == 0
    out = capsys.readouterr().out
    assert "believed for" in out
    assert out.count("not built") == len(EVERY)
    assert out.count("not built, on demand") == len(EVERY) - len(BUILT_UNNAMED)


def test_an_environment_that_is_built_is_ready_on_demand_or_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracles, "is_ready", lambda _: True)
    assert run("list") == 0
    states = {line.split()[0]: line.split("  ")[1] for line in capsys.readouterr().out.splitlines()}
    assert (states["mlx-lm"], states["llama-cpp-python"]) == ("ready", "ready, on demand")


def test_list_as_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", as_json=True) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["oracles"]}
    for row in rows.values():
        assert set(row) == {"name", "version", "pins", "ready", "on_demand", "environment", "believed_for"}
    assert (rows["mlx-lm"]["ready"], rows["mlx-lm"]["pins"]["mlx"]) == (False, "0.32.4")
    assert (rows["mlx-lm"]["on_demand"], rows["llama-cpp-python"]["on_demand"]) == (False, True)


def test_sync_builds_what_is_named_and_tells_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def build(oracle: Oracle, *, on_line: Any) -> None:
        built.append(oracle.name)
        on_line("building")

    monkeypatch.setattr(oracles, "ensure_environment", build)
    assert run("sync", "mlx-lm") == 0
    said = capsys.readouterr()
    assert built == ["mlx-lm"]
    assert said.err == "building\n"
    assert said.out.startswith("mlx-lm 0.32.2")


@pytest.mark.parametrize(("named", "built"), [([], BUILT_UNNAMED), (["llama-cpp-python"], ["llama-cpp-python"])])
def test_sync_builds_what_is_on_demand_only_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch, *, named: list[str], built: list[str]
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(oracles, "ensure_environment", lambda oracle, **_: seen.append(oracle.name))
    assert run("sync", *named) == 0
    assert seen == built


def test_sync_of_an_unknown_oracle_names_the_near_ones() -> None:
    with pytest.raises(UsageError, match="unknown oracle 'mlx_lm'"):
        run("sync", "mlx_lm")


def test_a_build_that_fails_reaches_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_options: Any) -> Never:
        raise OracleError("could not be built", next_step="try again")

    monkeypatch.setattr(oracles, "ensure_environment", fail)
    with pytest.raises(OracleError, match="could not be built"):
        run("sync")
