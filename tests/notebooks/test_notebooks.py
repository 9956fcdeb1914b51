"""The notebooks run through in a fresh kernel, hold no outputs in git, and reach for nothing that is private."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from parity.errors import AssayError, UsageError
from parity.reporting.notebooks import executed, main, rendered, stripped

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
OURS = ("engine", "parity", "oracles", "bench")
RESULTS = {  # what a reader must find in the outputs
    "1-read-a-golden": r"What is the capital of France\?.*perplexity 1\.\d+",
    "2-where-two-runs-part": r"IDENTICAL.*step 0: model\.layers\.0\.self_attn\.o_proj",
    "3-what-a-kv-mode-costs": r"bytes a token.*kv8.*top-1 flips",
    "4-what-a-sampler-keeps": r"top-k 40.*40.*min-p 0\.2",
    "5-another-engine-s-goldens": r"agree up to step 60, of 100.*agree up to step 3\b.*IDENTICAL",
    "6-how-fast": r"decode/.*figures with logits had the same bits",
}

pytestmark = [
    # the kernel's client on this side opens sockets that it closes late, and its loop warns about its policy
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def sources(file: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]


def told(notebook: Any) -> str:
    """Everything that a run has put out as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(one.get("text", "") or one.get("data", {}).get("text/plain", "") for one in outputs)


def test_there_are_six_and_the_readme_names_each() -> None:
    readme = (ROOT / "notebooks" / "README.md").read_text()

    assert [file.stem for file in FILES] == list(RESULTS)
    assert all(f"| `{file.stem}` |" in readme for file in FILES)


@pytest.mark.model
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_it_runs_through_and_its_page_stands_alone(file: Path) -> None:
    notebook = executed(file)

    assert re.search(RESULTS[file.stem], told(notebook), flags=re.DOTALL), told(notebook)
    streams = [o for cell in notebook.cells for o in cell.get("outputs", []) if o.get("name") == "stderr"]
    assert streams == [], "nothing warns"
    page = rendered(notebook, title=file.stem)
    assert "<img" in page, "a figure is there"
    assert not re.search(r'(?:src|href)="(?!data:|#)', page), "nothing is loaded"
    assert "<script" not in page
    assert str(ROOT) not in page, "no path of this machine"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_in_git_it_holds_no_outputs(file: Path) -> None:
    assert stripped(nbformat.read(file, as_version=4))


def test_outputs_that_were_left_are_seen() -> None:
    notebook = nbformat.read(FILES[0], as_version=4)
    next(cell for cell in notebook.cells if cell.cell_type == "code").execution_count = 1

    assert not stripped(notebook)


def private_names(source: str) -> list[str]:
    """Names of ours that begin with an underscore: modules, what is imported from them, attributes."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            names += [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            names.append(node.attr)
    return [name for name in names if name.startswith("_")]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_it_uses_only_what_is_public(file: Path) -> None:
    assert [name for source in sources(file) for name in private_names(source)] == []


def test_a_private_name_is_seen() -> None:
    assert private_names("from parity.judge import _different\nx._y") == ["_different", "_y"]


def test_a_cell_that_fails_stops_the_notebook_and_is_named(tmp_path: Path) -> None:
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("raise ValueError('planted')")])
    file = tmp_path / "broken.ipynb"
    nbformat.write(broken, file)

    with pytest.raises(AssayError) as stopped:
        executed(file)

    assert str(stopped.value).splitlines() == [
        "notebook broken.ipynb does not run through",
        "  reason  ValueError: planted",
        "  next    run its cells one by one: jupyter lab notebooks/broken.ipynb",
    ]


def test_a_folder_without_notebooks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there are no notebooks"):
        main([str(tmp_path), str(tmp_path / "out")])


def test_the_command_renders_each_notebook_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# Small"), nbformat.v4.new_code_cell("'<script>' + str(6 * 7)")]
    )
    (tmp_path / "in").mkdir()
    nbformat.write(small, tmp_path / "in" / "1-a-small-one.ipynb")

    assert main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0

    page = (tmp_path / "out" / "1-a-small-one.html").read_text()
    assert "<title>mlx-assay: a small one</title>" in page
    assert "&lt;script&gt;42" in page
    assert "1-a-small-one.html" in capsys.readouterr().out
    assert json.loads((tmp_path / "in" / "1-a-small-one.ipynb").read_text())["cells"][1]["outputs"] == []
