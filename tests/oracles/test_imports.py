"""What may import what: read from the sources, so that it holds for modules that no test loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oracles.registry import REPOSITORY

SOURCES = sorted((REPOSITORY / "oracles").rglob("*.py"))
IN_THE_ORACLES_ENVIRONMENT = [
    "oracles.runner_loop",
    "oracles.mlx_lm.run",
    "oracles.mlx_lm.taps",
    "oracles.mlx_lm.cache_words",
]
NOT_THERE = ("rich", "platformdirs", "filelock", "mlx", "engine", "huggingface_hub", "gguf", "jinja2", "tokenizers")


def imports_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_there_are_sources_to_read() -> None:
    assert len(SOURCES) > 10


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.relative_to(REPOSITORY).as_posix())
def test_no_oracle_imports_the_engine_or_the_bench(file: Path) -> None:
    assert not [name for name in imports_of(file) if name.split(".")[0] in ("engine", "bench")]


def test_only_verbs_import_oracles() -> None:
    others = [f for f in (REPOSITORY / "parity").rglob("*.py") if "verbs" not in f.parts]
    guilty = [
        f.name
        for f in [*others, *(REPOSITORY / "engine").rglob("*.py")]
        if any(n.split(".")[0] == "oracles" for n in imports_of(f))
    ]
    assert guilty == []


@pytest.mark.parametrize("module", IN_THE_ORACLES_ENVIRONMENT)
def test_runner_modules_need_numpy_and_safetensors_alone(module: str) -> None:
    program = f"import sys\nfor name in {NOT_THERE!r}:\n    sys.modules[name] = None\nimport {module}\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
