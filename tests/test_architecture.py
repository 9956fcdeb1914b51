"""The imports obey the architecture: engine <- parity <- oracles, bench; and an oracle's process needs numpy alone of ours."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "parity", "oracles", "bench")
IN_ORACLE = {"numpy", "safetensors", "mlx", "mlx_lm"}  # what a runner may import beside ours and the standard library


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports, wherever the import stands."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} imports relatively"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if file_of(name) else str(node.module)


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def reached(file: Path) -> dict[str, Path]:
    """Every module of ours that importing `file` loads, with its packages, and third-party names with the importing file."""
    found: dict[str, Path] = {}
    todo = [file]
    while todo:
        here = todo.pop()
        for name in imports(here):
            parts = name.split(".")
            if parts[0] not in PACKAGES:
                found.setdefault(parts[0], here)
                continue
            for prefix in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
                target = file_of(prefix)
                if target is not None and prefix not in found:
                    found[prefix] = here
                    todo.append(target)
    return found


@pytest.mark.parametrize("file", modules("engine"), ids=lambda f: str(f.relative_to(ROOT)))
def test_the_engine_imports_nothing_else_of_ours(file: Path) -> None:
    assert {name.split(".")[0] for name in imports(file)}.isdisjoint({"parity", "oracles", "bench", "tests"})


@pytest.mark.parametrize("file", modules("oracles"), ids=lambda f: str(f.relative_to(ROOT)))
def test_oracles_never_reach_the_engine_or_the_bench(file: Path) -> None:
    assert {name.split(".")[0] for name in imports(file)}.isdisjoint({"engine", "bench"})
    if file.parent.name != "oracles":  # code that runs inside an oracle's process
        outside = {name: by for name, by in reached(file).items() if name.split(".")[0] in {"engine", "bench"}}
        assert outside == {}


@pytest.mark.parametrize(
    "file", [f for f in modules("oracles") if f.parent.name != "oracles"], ids=lambda f: str(f.relative_to(ROOT))
)
def test_an_oracle_process_needs_of_ours_only_what_numpy_can_run(file: Path) -> None:
    outside = {
        name
        for name in reached(file)
        if name.split(".")[0] not in {*PACKAGES, *IN_ORACLE} and name not in sys.stdlib_module_names
    }

    assert outside == set()


@pytest.mark.parametrize("file", modules("parity"), ids=lambda f: str(f.relative_to(ROOT)))
def test_only_the_verbs_put_oracles_and_bench_together(file: Path) -> None:
    if file.parent.name != "verbs":
        assert {name.split(".")[0] for name in imports(file)}.isdisjoint({"oracles", "bench"})


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_opens_with_its_contract(package: str) -> None:
    without = [str(f.relative_to(ROOT)) for f in modules(package) if not ast.get_docstring(ast.parse(f.read_text()))]

    assert without == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_is_named_after_nothing(package: str) -> None:
    nameless = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}

    assert [f.name for f in modules(package) if f.stem in nameless or f.parent.name in nameless] == []


def test_the_import_reader_sees_what_a_file_imports(tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text("def f():\n    from engine.generate import steps\n    import oracles.registry\n")

    assert list(imports(file)) == ["engine.generate", "oracles.registry"]
    assert "engine.cache.plain" in reached(file), "follows imports through our modules"
