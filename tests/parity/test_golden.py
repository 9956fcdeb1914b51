import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from parity.case import Case
from parity.errors import GoldenError
from parity.golden import Golden, golden_path
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, logits_name


@pytest.fixture
def tiny(
    make_case: Callable[..., Case],
    make_trace: Callable[..., Trace],
    make_snapshot: Callable[..., Snapshot],
    make_golden: Callable[..., Golden],
) -> Golden:
    case = make_case()
    return make_golden(case, make_trace(case, modules=("model.norm",)), make_snapshot())


@pytest.fixture
def large(
    make_case: Callable[..., Case],
    make_trace: Callable[..., Trace],
    make_snapshot: Callable[..., Snapshot],
    make_golden: Callable[..., Golden],
) -> Golden:
    case = make_case()
    return make_golden(case, make_trace(case, vocabulary=2000), make_snapshot())


def test_round_trip_keeps_every_field_and_bit(tiny: Golden, large: Golden, tmp_path: Path) -> None:
    for golden in (tiny, large):
        golden.save(tmp_path / "g.json")

        assert Golden.load(tmp_path / "g.json") == golden


def test_small_rows_are_kept_in_full_and_large_ones_as_a_sketch(tiny: Golden, large: Golden) -> None:
    assert (tiny.form, set(tiny.tensors)) == ("full", set(tiny.digests))
    assert (large.form, set(large.tensors)) == ("sketch", {"logsumexp", "strided", "top_ids", "top_values"})
    assert list(large.digests) == ["logits/0", "logits/1", "logits/2", "token_ids"]


def test_equal_goldens_give_equal_bytes(tiny: Golden, tmp_path: Path) -> None:
    tiny.save(tmp_path / "a.json")
    Golden.load(tmp_path / "a.json").save(tmp_path / "b.json")

    for suffix in (".json", ".safetensors"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_a_manifest_has_one_line_a_tensor(tiny: Golden) -> None:
    lines = tiny.manifest().splitlines()

    assert sum(line.startswith('  ["') for line in lines) == len(tiny.entries)
    assert all(len(line) < 600 for line in lines)


def test_nan_payloads_and_the_sign_of_zero_are_kept(
    make_case: Callable[..., Case],
    make_snapshot: Callable[..., Snapshot],
    make_golden: Callable[..., Golden],
    tmp_path: Path,
) -> None:
    words = np.array([[0x7FC00001, 0x80000000, 0xFF800001]], dtype="<u4")
    row = Tensor.of(words.view("<f4"))
    trace = Trace(tensors={logits_name(0): row, TOKEN_IDS: Tensor.of(np.array([0], dtype="<i4"))})
    make_golden(make_case(num_steps=1), trace, make_snapshot()).save(tmp_path / "g.json")

    assert Golden.load(tmp_path / "g.json").tensors["logits/0"].bits().tolist() == words.tolist()


def test_a_missing_golden_names_the_command_that_records_it(tmp_path: Path) -> None:
    with pytest.raises(GoldenError) as error:
        Golden.load(tmp_path / "p3-whole.json")

    assert str(error.value).splitlines() == [
        "no golden",
        "  looked at  p3-whole.json",
        "  next       assay record '*p3-whole'",
    ]


@pytest.mark.parametrize("bit", range(8))
def test_any_flipped_bit_of_the_side_file_is_found(tiny: Golden, tmp_path: Path, bit: int) -> None:
    tiny.save(tmp_path / "g.json")
    side = tmp_path / "g.safetensors"
    data = bytearray(side.read_bytes())
    data[-1 - bit] ^= 1 << bit
    side.write_bytes(data)

    with pytest.raises(GoldenError, match="fails its digest"):
        Golden.load(tmp_path / "g.json")


def test_a_flipped_digest_of_a_full_golden_is_found(tiny: Golden, tmp_path: Path) -> None:
    tiny.save(tmp_path / "g.json")
    manifest = tmp_path / "g.json"
    digest = tiny.digests["logits/1"]
    manifest.write_text(manifest.read_text().replace(digest, _flipped(digest), 1))

    with pytest.raises(GoldenError, match="disagree"):
        Golden.load(manifest)


def test_token_ids_that_fail_their_digest_are_found(large: Golden, tmp_path: Path) -> None:
    large.save(tmp_path / "g.json")
    raw = json.loads((tmp_path / "g.json").read_text())
    raw["token_ids"][1] ^= 1
    (tmp_path / "g.json").write_text(json.dumps(raw))

    with pytest.raises(GoldenError, match="the digest of token_ids is not that of the token ids it lists"):
        Golden.load(tmp_path / "g.json")


@pytest.mark.parametrize("part", [".json", ".safetensors"])
@pytest.mark.parametrize("keep", [0, 10, -5])
def test_a_truncated_file_is_refused(tiny: Golden, tmp_path: Path, part: str, keep: int) -> None:
    tiny.save(tmp_path / "g.json")
    file = tmp_path / f"g{part}"
    file.write_bytes(file.read_bytes()[:keep])

    with pytest.raises(GoldenError, match=r"a golden on disk cannot be believed[\s\S]*git checkout"):
        Golden.load(tmp_path / "g.json")


def test_a_manifest_without_its_side_file_is_refused(tiny: Golden, tmp_path: Path) -> None:
    tiny.save(tmp_path / "g.json")
    (tmp_path / "g.safetensors").unlink()

    with pytest.raises(GoldenError, match="side file cannot be read"):
        Golden.load(tmp_path / "g.json")


@pytest.mark.parametrize("found", [0, 2, None, "1"])
def test_another_format_is_refused_with_its_number(tiny: Golden, tmp_path: Path, found: object) -> None:
    tiny.save(tmp_path / "g.json")
    raw = json.loads((tmp_path / "g.json").read_text())
    (tmp_path / "g.json").write_text(json.dumps({**raw, "format": found}))

    with pytest.raises(GoldenError, match=f"format {found!r} where this version reads 1"):
        Golden.load(tmp_path / "g.json")


@pytest.mark.parametrize("text", ["[]", "7", '"golden"', "null"])
def test_json_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "g.json").write_text(text)

    with pytest.raises(GoldenError, match="cannot be believed"):
        Golden.load(tmp_path / "g.json")


@pytest.mark.parametrize("field", ["case", "snapshot_files", "entries", "token_ids", "side", "provenance", "history"])
def test_a_manifest_without_a_field_is_refused_by_name(tiny: Golden, tmp_path: Path, field: str) -> None:
    tiny.save(tmp_path / "g.json")
    raw = json.loads((tmp_path / "g.json").read_text())
    del raw[field]
    (tmp_path / "g.json").write_text(json.dumps(raw))

    with pytest.raises(GoldenError, match=f"malformed: KeyError: '{field}'"):
        Golden.load(tmp_path / "g.json")


def test_a_row_too_few_is_refused(tiny: Golden, tmp_path: Path) -> None:
    tiny.save(tmp_path / "g.json")
    raw = json.loads((tmp_path / "g.json").read_text())
    raw["entries"] = [entry for entry in raw["entries"] if entry[0] != "logits/2"]
    (tmp_path / "g.json").write_text(json.dumps(raw))

    with pytest.raises(GoldenError, match="2 rows of logits for 3 steps"):
        Golden.load(tmp_path / "g.json")


def test_the_path_says_oracle_version_platform_and_case(make_case: Callable[..., Case], tmp_path: Path) -> None:
    path = golden_path(make_case(), version="0.32.2", root=tmp_path, platform="darwin-arm64-metal")

    assert path == tmp_path / "mlx-lm-0.32.2/darwin-arm64-metal/toy/f32/fp/greedy/p3-whole.json"


def _flipped(digest: str) -> str:
    return f"{int(digest[0], 16) ^ 1:x}{digest[1:]}"
