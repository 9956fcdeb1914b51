import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.errors import SnapshotError
from parity.models.layout import INDEX, check_layout, check_weight_map


def test_plain_file_names_pass_and_come_back_once_each() -> None:
    weight_map = {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    assert check_weight_map(weight_map, name="x") == ("model-1.safetensors", "model-2.safetensors")


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "x.safetensors\0.safetensors",
        ".hidden.safetensors",
        "..",
        "",
        "model.bin",
        7,
        None,
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(file: object) -> None:
    with pytest.raises(SnapshotError) as caught:
        check_weight_map({"good": "model.safetensors", "w": file}, name="x")
    assert str(caught.value) == (
        "the index of snapshot 'x' is refused\n"
        "  index   model.safetensors.index.json\n"
        "  tensor  w\n"
        f"  file    {file!r}\n"
        "  reason  only safetensors files in the snapshot's own folder are read\n"
        "  next    take the snapshot from a source that you trust"
    )


@given(st.text(max_size=20).map(lambda text: text + ".safetensors"))
def test_whatever_passes_stays_in_the_folder(file: str) -> None:
    try:
        check_weight_map({"w": file}, name="x")
    except SnapshotError:
        return
    assert (Path("/folder") / file).parent == Path("/folder")
    assert Path(file).name == file


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_no_weight_map_is_refused(weight_map: object) -> None:
    with pytest.raises(SnapshotError, match="no weight_map, or an empty one"):
        check_weight_map(weight_map, name="x")


def test_a_folder_without_an_index_passes(tmp_path: Path) -> None:
    check_layout(tmp_path, "x")


def test_an_index_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(SnapshotError, match="reason  not JSON"):
        check_layout(tmp_path, "x")


def test_a_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (tmp_path / "1.safetensors").touch()
    with pytest.raises(SnapshotError, match=r"lacks weights that its index names\n  absent  2\.safetensors\n"):
        check_layout(tmp_path, "x")
    (tmp_path / "2.safetensors").touch()
    check_layout(tmp_path, "x")
