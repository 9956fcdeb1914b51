"""Compiled code contracts nothing, uses the widest vectors there are, and is kept by the digest of its sources."""

import re
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from engine.kernels import driver as drivers
from engine.kernels.driver import Form, compiled, features, fuses, has_wide_vectors, shape_of, source_digest
from engine.kernels.memory import entry
from engine.kernels.tile import UNIT
from engine.kernels.verify import verify
from parity.home import assay_home
from tests.engine.kernels.conftest import FORMS


@pytest.mark.parametrize("form", [Form(stored="f32"), Form(stored="f32", bits=3)], ids=lambda form: form.name)
def test_products_and_sums_are_never_contracted(form: Form, tmp_path: Path) -> None:
    (assembly,) = compiled(form, tmp_path).inspect_asm().values()  # type: ignore[attr-defined]
    assert re.search(r"\bv?mulps\b", assembly)
    fused = len(re.findall(r"\bv?fn?m(?:add|sub)", assembly))
    shape = shape_of(form)
    # the scale and bias of a weight, in a tile of one row and in one of more rows; never x * w with its sum
    assert fused == (2 * UNIT * shape.vectors if fuses(form) else 0)
    assert ("%zmm" in assembly) == has_wide_vectors()


def test_code_is_kept_under_the_digest_of_its_sources(tmp_path: Path) -> None:
    compiled(Form(stored="f16"), tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == [source_digest()[:16]]
    assert list(tmp_path.rglob("*.nbc"))


@pytest.mark.parametrize("form", [Form(stored="bf16"), Form(stored="f32", bits=6)], ids=lambda form: form.name)
def test_the_flavour_for_narrow_vectors_is_bit_identical_too(
    form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "has_wide_vectors", lambda: False)
    verify(form, compiled(form, tmp_path))


def test_the_features_are_those_of_the_cpu_that_numba_is_told_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", "x86-64")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+avx,+f16c,-avx2")
    assert features.__wrapped__() == {"avx", "f16c"}
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "")
    assert features.__wrapped__() == frozenset()


def test_no_two_forms_have_one_name() -> None:
    names = {compiled(form, assay_home() / "kernels").py_func.__qualname__ for form in FORMS}  # type: ignore[attr-defined]
    assert len(names) == len(FORMS)


def test_forms_that_two_processes_compiled_stay_two(tmp_path: Path) -> None:
    four, eight = Form(stored="f32", bits=4), Form(stored="f32", bits=8)
    for form in (four, eight):
        code = f"compiled({form!r}, Path({str(tmp_path)!r}))"
        imports = "from pathlib import Path; from engine.kernels.driver import Form, compiled"
        subprocess.run([sys.executable, "-c", f"{imports}; {code}"], check=True)
    both = [compiled(form, tmp_path) for form in (four, eight)]
    assert [len(driver.stats.cache_hits) for driver in both] == [1, 1]  # type: ignore[attr-defined]
    assert entry(both[0]) != entry(both[1])
