"""The README tells the truth about the tree and the commands."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from parity.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(heading: str) -> list[str]:
    match = re.search(rf"## {heading}\n.*?```\n(.*?)```", README, flags=re.DOTALL)
    assert match is not None
    return match[1].splitlines()


def told_folders() -> set[str]:
    """Folders of the README's tree, as paths."""
    told, parent = set(), ""
    for line in block("The tree"):
        name = line.split()[0].rstrip("/")
        if line.startswith("  "):
            told.add(f"{parent}/{name}")
        else:
            parent = name
            told.add(name)
    return told


def real_folders() -> set[str]:
    """Folders that git knows: the top level, and one level below it in the packages."""
    git = shutil.which("git")
    assert git is not None, "the tree is compared with what git knows"
    listed = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(line) for line in listed.splitlines()]
    top = {path.parts[0] for path in paths if len(path.parts) > 1 and not path.parts[0].startswith(".")}
    packages = {"engine", "oracles", "parity", "bench"}
    below = {"/".join(p.parts[:2]) for p in paths if len(p.parts) > 2 and p.parts[0] in packages}
    return top | below


def test_the_tree_is_the_real_one() -> None:
    assert told_folders() == real_folders()


def test_every_make_target_of_the_readme_exists_and_says_what_it_does() -> None:
    told = set(re.findall(r"^make (\w+)", README, flags=re.MULTILINE))
    described = set(re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))

    assert told
    assert told <= described


@pytest.mark.parametrize("verb", sorted(set(re.findall(r"\.venv/bin/assay (\w+)", README))))
def test_every_verb_of_the_readme_exists(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])

    assert ended.value.code == 0
    assert f"assay {verb}" in capsys.readouterr().out
