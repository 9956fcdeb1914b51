"""Notebooks: executed from nothing, checked for leftovers, rendered as pages of the report's looks.

Guarantees: a notebook runs in a fresh kernel of this Python, from top to bottom, in the checkout's root; the first cell that
fails stops it and names itself. In git a notebook holds no outputs (`stripped`). A rendered page needs no network.

`python -m parity.reporting.notebooks notebooks reports/notebooks` executes and renders all of a folder.
"""

import sys
import time
from pathlib import Path
from typing import Any, Final

import nbformat
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

from parity.atomic_file import write_atomically
from parity.errors import AssayError, UsageError

ROOT: Final = Path(__file__).resolve().parents[2]
SECONDS: Final = 600  # for one cell; the slowest takes a fraction of it


def executed(file: Path) -> Any:  # noqa: ANN401 - nbformat's NotebookNode has no types
    """The notebook with its outputs; the file stays as it is.

    Raises:
        AssayError: A cell failed.
    """
    notebook = nbformat.read(file, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=40"],
        resources={"metadata": {"path": str(ROOT)}},
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise AssayError(
            f"notebook {file.name} does not run through",
            reason=f"{error.ename}: {error.evalue}",
            next_step=f"run its cells one by one: jupyter lab notebooks/{file.name}",
        ) from error
    return notebook


def rendered(notebook: Any, *, title: str) -> str:  # noqa: ANN401 - as above
    """An executed notebook as one self-contained HTML page."""
    exporter = HTMLExporter(template_name="basic")  # type: ignore[no-untyped-call]
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    body, _ = exporter.from_notebook_node(notebook)
    environment = Environment(
        loader=PackageLoader("parity.reporting"), autoescape=select_autoescape(), undefined=StrictUndefined
    )
    page = environment.get_template("notebook.html.j2")
    return page.render(title=title, body=Markup(body))  # noqa: S704 - nbconvert has sanitised and escaped it


def stripped(notebook: Any) -> bool:  # noqa: ANN401 - as above
    """Whether a notebook holds nothing that a run has left."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return all(not cell.outputs and cell.execution_count is None for cell in code)


def main(arguments: list[str]) -> int:
    """Execute and render every notebook of a folder.

    Raises:
        UsageError: The folder has none.
    """
    source, target = (Path(argument) for argument in arguments)
    files = sorted(source.glob("*.ipynb"))
    if not files:
        raise UsageError("there are no notebooks", looked_at=source, next_step="name the folder that holds them")
    for file in files:
        start = time.monotonic()
        page = rendered(executed(file), title=file.stem.partition("-")[2].replace("-", " "))
        written = target / f"{file.stem}.html"
        write_atomically(written, page.encode())
        print(f"{written}  {time.monotonic() - start:.1f} s", flush=True)  # noqa: T201 - a command of its own
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AssayError as told:
        print(told, file=sys.stderr)  # noqa: T201 - as above
        sys.exit(2)
