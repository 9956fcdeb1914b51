import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity.errors import GoldenError
from parity.golden import Golden, golden_path
from tests.oracles.shop import Shop, cases_of, do, make_case, statuses


def test_bits_that_change_unexplained_are_refused_and_nothing_is_written(shop: Shop) -> None:
    case = make_case()
    do(shop, [case])
    before = shop.files()
    shop.faults(salt="another kernel")
    recording = do(shop, [case])
    assert statuses(recording) == ["refused"]
    assert not recording.complete
    assert shop.files() == before
    golden = Golden.load(golden_path(case, version="1.0", root=shop.goldens))
    error = recording.results[0].error
    assert isinstance(error, GoldenError)
    lines = str(error).splitlines()
    assert lines[0] == f"the golden of {case.name} would change, and nothing explains it"
    assert lines[1] == "  first changed  logits/0"
    assert lines[2] == f"  committed      {golden.digests['logits/0']}"
    assert lines[3].startswith("  recorded       ")
    assert lines[3].split()[1] != golden.digests["logits/0"]
    assert lines[4] == "  also changed   nothing: case, weights and packages are the same"
    assert lines[5] == "  golden         p3.json is kept as it is"
    assert lines[6] == f"  next           find out why; if it is meant: assay record '{case.name}' --reason '...'"


def test_a_refusal_names_what_else_changed(shop: Shop) -> None:
    case = make_case()
    do(shop, [case])
    (shop.snapshot / "model.safetensors").write_bytes(b"other weights")
    shop.faults(salt="other weights")
    error = do(shop, [replace(case, num_steps=3)]).results[0].error
    assert "also changed   case field num_steps, snapshot file model.safetensors" in str(error)


def test_a_reason_explains_changed_bits_and_stays_in_the_history(shop: Shop) -> None:
    case = make_case()
    do(shop, [case])
    shop.faults(salt="another kernel")
    assert statuses(do(shop, [case], reason="kernel mended upstream")) == ["changed"]
    golden = Golden.load(golden_path(case, version="1.0", root=shop.goldens))
    assert [entry.reason for entry in golden.history] == ["first recording", "kernel mended upstream"]
    assert golden.history[0].bits != golden.history[1].bits
    before = shop.files()
    assert statuses(do(shop, [case])) == ["unchanged"]
    assert shop.files() == before


def test_a_reason_leaves_unchanged_goldens_byte_identical(shop: Shop) -> None:
    case = make_case()
    do(shop, [case])
    before = shop.files()
    assert statuses(do(shop, [case], reason="not needed")) == ["unchanged"]
    assert shop.files() == before


def edit_manifest(file: Path, change: Any) -> None:
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def test_a_changed_pin_explains_changed_bits(shop: Shop) -> None:
    case = make_case()
    do(shop, [case])
    file = golden_path(case, version="1.0", root=shop.goldens)
    edit_manifest(file, lambda raw: raw["provenance"]["packages"].update(mlx="0.1.0"))
    shop.faults(salt="another mlx")
    assert statuses(do(shop, [case])) == ["changed"]
    pinned = shop.oracle.pins["mlx"]
    reason = Golden.load(file).history[-1].reason
    assert reason == f"pinned version changed: mlx 0.1.0 to {pinned}"


def test_a_changed_pin_with_unchanged_bits_is_said_to_have_changed_nothing(shop: Shop) -> None:
    case = make_case()
    do(shop, [case])
    file = golden_path(case, version="1.0", root=shop.goldens)
    edit_manifest(file, lambda raw: raw["provenance"]["packages"].update(mlx="0.1.0"))
    assert statuses(do(shop, [case])) == ["changed"]
    assert Golden.load(file).history[-1].reason.endswith("; bits unchanged")


def test_a_new_oracle_version_carries_the_history_on_and_frees_the_old_golden(shop: Shop) -> None:
    case, other = cases_of(2)
    do(shop, [case, other])
    old = golden_path(case, version="1.0", root=shop.goldens)
    old_other = golden_path(other, version="1.0", root=shop.goldens)
    for file in (old, old_other):
        edit_manifest(file, lambda raw: raw["provenance"]["packages"].update(mlx="0.1.0"))
    shop.oracle = replace(shop.oracle, version="1.1")
    shop.faults(salt="1.1")
    recording = do(shop, [case], all_cases=[case, other])
    history = Golden.load(golden_path(case, version="1.1", root=shop.goldens)).history
    assert [entry.oracle for entry in history] == ["fake 1.0", "fake 1.1"]
    assert recording.unused == (old,)


def test_a_case_that_asks_for_more_keeps_its_bits_without_a_reason(shop: Shop) -> None:
    case = make_case(num_steps=2)
    do(shop, [case])
    file = golden_path(case, version="1.0", root=shop.goldens)

    def as_if_row_1_had_not_been_asked_for(raw: Any) -> None:
        raw["entries"].pop(1)
        raw["history"][-1]["bits"] = "those of row 0"

    edit_manifest(file, as_if_row_1_had_not_been_asked_for)
    assert statuses(do(shop, [case])) == ["changed"]
    assert Golden.load(file).history[-1].reason == "the case asks for more; every tensor from before is unchanged"


def test_an_unreadable_manifest_needs_a_reason(shop: Shop) -> None:
    case = make_case()
    do(shop, [case])
    file = golden_path(case, version="1.0", root=shop.goldens)
    file.write_text("{")
    recording = do(shop, [case])
    assert statuses(recording) == ["refused"]
    assert "cannot be read, so it is not known which bits it held" in str(recording.results[0].error)
    assert file.read_text() == "{"
    assert statuses(do(shop, [case], reason="disk fault")) == ["changed"]
    assert Golden.load(file).history[-1].reason == "disk fault (the manifest before could not be read)"


def test_a_rotten_side_file_is_mended_because_the_manifest_decides(shop: Shop) -> None:
    case = make_case()
    do(shop, [case])
    file = golden_path(case, version="1.0", root=shop.goldens)
    before = shop.files()
    file.with_suffix(".safetensors").write_bytes(b"rot")
    assert statuses(do(shop, [case])) == ["unchanged"]
    assert shop.files() == before
