from pathlib import Path

import pytest

from parity.errors import UsageError
from parity.models.catalogue import entries
from parity.models.names import HubRepo, LocalFolder, parse_name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("hub:org/some-Model_1.5", HubRepo(repo_id="org/some-Model_1.5")),
        ("hub:org/name@main", HubRepo(repo_id="org/name", revision="main")),
        ("hub:org/name@refs/pr/3", HubRepo(repo_id="org/name", revision="refs/pr/3")),
        ("/a/b", LocalFolder(path=Path("/a/b"))),
        ("llama-tiny", entries()["llama-tiny"]),
    ],
)
def test_a_name_means_one_thing(name: str, meant: object) -> None:
    assert parse_name(name) == meant


@pytest.mark.parametrize("name", ["./folder", "folder/", "some/folder", "."])
def test_a_relative_folder_is_made_absolute(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_name(name) == LocalFolder(path=tmp_path / name)


def test_a_bare_word_is_never_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm").mkdir()
    with pytest.raises(UsageError, match="no snapshot is called 'smollm'"):
        parse_name("smollm")


@pytest.mark.parametrize("name", ["hub:", "hub:name", "hub:a/b/c", "hub:a/b@", "hub:../x y"])
def test_a_hub_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_name(name)
    assert str(caught.value) == (
        f"{name!r} does not name a hub repository\n"
        "  form  hub:org/name or hub:org/name@revision\n"
        "  next  write it in this form"
    )
