import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import RequestError
from parity.case import Case
from parity.deviations import Deviation
from parity.errors import AssayError, GoldenError, SnapshotError
from parity.gate import check, exit_code
from parity.golden import Golden
from parity.golden_folder import golden_version
from parity.platform_key import platform_key
from parity.provenance import Provenance
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, logits_name
from parity.verdict import Status, Verdict

PLATFORM = "linux-x86_64-cpu"
NAMES = tuple(f"toy/f32/fp/greedy/p{n}-whole" for n in range(4))
ORACLE = ("mlx-lm", "0.32.2")


def answer(case: Case, vocabulary: int = 16) -> Trace:
    """What the oracle and a right engine answer: bits that depend on the case's name alone."""
    tensors = {}
    for step in range(case.num_steps):
        words = np.random.PCG64([*case.name.encode(), step]).random_raw(vocabulary) >> np.uint64(40)
        tensors[logits_name(step)] = Tensor.of((words.astype("<f4") / np.float32(2**22)).reshape(1, -1))
    ids = [int(row.values().argmax()) for row in tensors.values()]
    tensors[TOKEN_IDS] = Tensor.of(np.array(ids, dtype="<i4"))
    return Trace(tensors=tensors, cache=("plain",))


class RightRunner:
    """Answers as the oracle does; runs in spawned processes too."""

    name = "right"

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        assert snapshot.name == case.snapshot
        return answer(case)

    def provenance(self) -> Provenance:
        return Provenance(
            packages={"mlx": "0.32.4", "mlx-cpu": "0.32.4"},
            digests={},
            platform=PLATFORM,
            device="cpu",
            libc="glibc 2.36",
            python="3.11",
            switches={},
        )


class LargeRunner(RightRunner):
    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        del snapshot
        return answer(case, 2000)


class WrongRunner(RightRunner):
    """One bit of one logit of p1 is off."""

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        trace = super().run(case, snapshot)
        if case.name != NAMES[1]:
            return trace
        words = trace.logits(2).bits().copy()
        words[0, 9] ^= 1
        return replace(trace, tensors={**trace.tensors, "logits/2": Tensor.of(words, dtype="F32")})


class FaultyRunner(RightRunner):
    """Refuses p0, refuses p1 in the engine's words, falls over p2."""

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        if case.name == NAMES[0]:
            raise AssayError("no such sampler", known_ones="greedy", next_step="use greedy")
        if case.name == NAMES[1]:
            raise RequestError("token id out of range", largest=511, next_step="correct the prompt")
        if case.name == NAMES[2]:
            return {}["a fault of ours"]
        return super().run(case, snapshot)


class DyingRunner(RightRunner):
    """Its process is killed by p1."""

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        if case.name == NAMES[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(case, snapshot)


class OtherGround(RightRunner):
    def provenance(self) -> Provenance:
        return replace(super().provenance(), packages={"mlx": "0.33.0", "mlx-cpu": "0.33.0"})

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        raise AssertionError(f"a stale golden is not worth a run: {case.name} on {snapshot.name}")


def broken_factory() -> RightRunner:
    raise RuntimeError("mlx does not load")


@pytest.fixture
def cases(make_case: Callable[..., Case]) -> tuple[Case, ...]:
    return tuple(make_case(name) for name in NAMES)


@pytest.fixture
def files(
    cases: tuple[Case, ...],
    make_snapshot: Callable[..., Snapshot],
    make_golden: Callable[..., Golden],
    saved: Callable[[Golden], Path],
) -> list[Path]:
    """Goldens of all cases on disk."""
    return [saved(make_golden(case, answer(case), make_snapshot())) for case in cases]


@pytest.fixture
def gate(
    cases: tuple[Case, ...], goldens: Path, make_snapshot: Callable[..., Snapshot]
) -> Callable[..., tuple[Verdict, ...]]:
    def gate(factory: Any = RightRunner, chosen: tuple[Case, ...] | None = None, **options: Any) -> tuple[Verdict, ...]:
        defaults: dict[str, Any] = {
            "find_snapshot": make_snapshot,
            "every_name": frozenset(NAMES),
            "root": goldens,
            "platform": PLATFORM,
        }
        return check(cases if chosen is None else chosen, factory, **{**defaults, **options})

    return gate


def statuses(verdicts: tuple[Verdict, ...]) -> list[str]:
    return [verdict.status.value for verdict in verdicts]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_right_engine_passes_with_a_verdict_a_case_in_order(gate: Any, jobs: int) -> None:
    verdicts = gate(jobs=jobs)

    assert [verdict.name for verdict in verdicts] == list(NAMES)
    assert statuses(verdicts) == ["IDENTICAL"] * 4
    assert exit_code(verdicts) == 0


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("jobs", [1, 2])
def test_one_wrong_bit_fails_its_case_and_no_other(gate: Any, jobs: int) -> None:
    verdicts = gate(WrongRunner, jobs=jobs)

    assert statuses(verdicts) == ["IDENTICAL", "DIFFERENT", "IDENTICAL", "IDENTICAL"]
    assert (verdicts[1].first_step, verdicts[1].diffs["logits/2"].first) == (2, (0, 9))
    assert exit_code(verdicts) == 1


def test_one_flipped_bit_of_a_golden_tensor_fails(gate: Any, files: list[Path]) -> None:
    side = files[2].with_suffix(".safetensors")
    data = bytearray(side.read_bytes())
    data[-1] ^= 0x10
    side.write_bytes(data)

    verdicts = gate()

    assert statuses(verdicts) == ["IDENTICAL", "IDENTICAL", "ERROR", "IDENTICAL"]
    assert verdicts[2].message().splitlines()[:3] == [
        "toy/f32/fp/greedy/p2-whole could not be judged",
        "  reason  tensor token_ids of the side file fails its digest",
        "  golden  greedy/p2-whole.json",
    ]
    assert exit_code(verdicts) == 1


def test_one_flipped_bit_of_a_committed_digest_fails(gate: Any, files: list[Path]) -> None:
    _flip_digest(files[0], "logits/1")

    verdicts = gate()

    assert statuses(verdicts)[0] == "ERROR"
    assert exit_code(verdicts) == 1


def test_one_flipped_bit_of_a_sketched_golden_s_digest_fails(
    gate: Any,
    cases: tuple[Case, ...],
    make_golden: Callable[..., Golden],
    make_snapshot: Callable[..., Snapshot],
    saved: Callable[[Golden], Path],
) -> None:
    file = saved(make_golden(cases[0], answer(cases[0], 2000), make_snapshot()))
    assert statuses(gate(LargeRunner, cases[:1])) == ["IDENTICAL"]

    _flip_digest(file, "logits/1")

    (verdict,) = gate(LargeRunner, cases[:1])
    assert (verdict.status, verdict.differing) == (Status.DIFFERENT, ("logits/1",))


def test_rows_that_are_not_the_golden_s_are_reported_and_not_believed(
    gate: Any,
    cases: tuple[Case, ...],
    make_golden: Callable[..., Golden],
    make_snapshot: Callable[..., Snapshot],
    saved: Callable[[Golden], Path],
) -> None:
    from parity import row_store  # noqa: PLC0415

    trace = answer(cases[0], 2000)
    _flip_digest(saved(make_golden(cases[0], trace, make_snapshot())), "logits/1")
    row_store.save(cases[0], "0.32.2", trace.tensors)

    (verdict,) = gate(LargeRunner, cases[:1])

    assert verdict.status is Status.DIFFERENT
    assert "are not used: 1 of 4 tensors are not the golden's, first logits/1" in str(verdict.facts["rows"])


@pytest.mark.usefixtures("files")
def test_another_weight_in_the_snapshot_makes_goldens_stale(gate: Any, make_snapshot: Callable[..., Snapshot]) -> None:
    verdicts = gate(find_snapshot=lambda name: make_snapshot(name, weights=b"weightr"))

    assert statuses(verdicts) == ["STALE_GOLDEN"] * 4
    assert str(verdicts[0].facts["snapshot"]).startswith("model.safetensors: golden ")
    assert exit_code(verdicts) == 1


@pytest.mark.usefixtures("files")
def test_another_mlx_makes_goldens_stale_without_a_run(gate: Any) -> None:
    verdicts = gate(OtherGround)

    assert statuses(verdicts) == ["STALE_GOLDEN"] * 4
    assert verdicts[0].facts["mlx"] == "golden 0.32.4, running 0.33.0"


def test_a_golden_that_was_moved_from_another_platform_is_stale(gate: Any, files: list[Path]) -> None:
    raw = json.loads(files[0].read_text())
    raw["provenance"]["platform"] = "darwin-arm64-metal"
    files[0].write_text(json.dumps(raw))

    assert statuses(gate())[0] == "STALE_GOLDEN"


def test_a_missing_golden_fails_and_names_the_command(gate: Any, files: list[Path]) -> None:
    files[3].unlink()

    verdicts = gate()

    assert statuses(verdicts)[3] == "MISSING_GOLDEN"
    assert verdicts[3].message().splitlines() == [
        "no golden of toy/f32/fp/greedy/p3-whole for linux-x86_64-cpu",
        "  looked at  goldens/mlx-lm-0.32.2/linux-x86_64-cpu/toy/f32/fp/greedy/p3-whole.json",
        "  next       assay record 'toy/f32/fp/greedy/p3-whole'",
    ]
    assert exit_code(verdicts) == 1


@pytest.mark.usefixtures("files")
def test_a_golden_that_no_case_claims_fails(gate: Any) -> None:
    verdicts = gate(every_name=frozenset(NAMES[:3]))

    assert statuses(verdicts) == ["IDENTICAL"] * 4 + ["STALE_GOLDEN"]
    assert verdicts[-1].message().splitlines() == [
        "golden of toy/f32/fp/greedy/p3-whole belongs to no case",
        "  looked at  goldens/mlx-lm-0.32.2/linux-x86_64-cpu/toy/f32/fp/greedy/p3-whole.*",
        "  next       assay record --prune, or restore the case in parity/cases",
    ]
    assert exit_code(verdicts) == 1


@pytest.mark.usefixtures("files")
def test_unused_goldens_are_looked_for_within_the_pattern(gate: Any, cases: tuple[Case, ...]) -> None:
    names = frozenset(NAMES[:2])

    assert [v.name for v in gate(chosen=cases[:1], every_name=names, pattern="*/p[03]-*")][1:] == [NAMES[3]]
    assert len(gate(chosen=cases[:1], every_name=names, pattern=NAMES[0])) == 1


def test_a_side_file_without_a_manifest_and_a_case_fails(gate: Any, files: list[Path], cases: tuple[Case, ...]) -> None:
    files[3].unlink()

    assert statuses(gate(chosen=cases[:3], every_name=frozenset(NAMES[:3]))) == ["IDENTICAL"] * 3 + ["STALE_GOLDEN"]


@pytest.mark.usefixtures("files")
def test_files_of_an_interrupted_recording_are_no_goldens(gate: Any, files: list[Path]) -> None:
    files[0].with_name(f".{files[0].name}.xyz.partial").write_text("{")

    assert exit_code(gate()) == 0


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_refusal_or_a_fall_of_the_runner_costs_its_own_case_alone(gate: Any, jobs: int) -> None:
    verdicts = gate(FaultyRunner, jobs=jobs)

    assert statuses(verdicts) == ["ERROR", "ERROR", "ERROR", "IDENTICAL"]
    assert verdicts[0].message().splitlines() == [
        "toy/f32/fp/greedy/p0-whole could not be judged",
        "  reason      no such sampler",
        "  known ones  greedy",
        "  next        use greedy",
    ]
    assert verdicts[1].facts == {"reason": "token id out of range", "largest": 511}
    assert "KeyError: 'a fault of ours'" in verdicts[2].message()
    assert "Traceback" in verdicts[2].message()
    assert exit_code(verdicts) == 1


@pytest.mark.usefixtures("files")
def test_a_killed_worker_costs_its_own_case_alone(gate: Any) -> None:
    verdicts = gate(DyingRunner, jobs=2)

    assert statuses(verdicts) == ["IDENTICAL", "ERROR", "IDENTICAL", "IDENTICAL"]
    assert verdicts[1].facts == {"reason": "its worker process died without a word"}
    assert exit_code(verdicts) == 1


@pytest.mark.usefixtures("files")
def test_a_runner_that_cannot_be_made_is_an_error_of_every_case(gate: Any) -> None:
    verdicts = gate(broken_factory)

    assert statuses(verdicts) == ["ERROR"] * 4
    assert "RuntimeError: mlx does not load" in verdicts[0].message()


@pytest.mark.usefixtures("files")
def test_a_snapshot_that_cannot_be_had_is_an_error_of_its_cases_alone(
    gate: Any, cases: tuple[Case, ...], make_snapshot: Callable[..., Snapshot]
) -> None:
    def find(name: str) -> Snapshot:
        if name == "gone":
            raise SnapshotError("no snapshot 'gone'", next_step="assay models fetch gone")
        return make_snapshot(name)

    verdicts = gate(chosen=(replace(cases[0], snapshot="gone"), *cases[1:]), find_snapshot=find)

    assert statuses(verdicts) == ["ERROR", "IDENTICAL", "IDENTICAL", "IDENTICAL"]
    assert (verdicts[0].facts, verdicts[0].next_step) == ({"reason": "no snapshot 'gone'"}, "assay models fetch gone")


@pytest.mark.usefixtures("files")
def test_another_case_of_the_same_name_makes_the_golden_stale(gate: Any, cases: tuple[Case, ...]) -> None:
    changed = replace(cases[0], prompt_ids=(1, 2))

    assert statuses(gate(chosen=(changed,))) == ["STALE_GOLDEN"]


@pytest.mark.usefixtures("files")
def test_a_platform_without_goldens_is_the_caller_s_error(gate: Any) -> None:
    with pytest.raises(GoldenError) as error:
        gate(platform="darwin-arm64-metal")

    assert str(error.value).splitlines() == [
        "there are no goldens for darwin-arm64-metal",
        "  looked at  goldens/mlx-lm-*/darwin-arm64-metal",
        "  next       make parity, which records them first, or assay record",
    ]


def test_goldens_of_two_versions_are_not_guessed_between(gate: Any, files: list[Path], goldens: Path) -> None:
    other = goldens / "mlx-lm-0.33.0" / PLATFORM / "x.json"
    other.parent.mkdir(parents=True)
    other.write_text(files[0].read_text())

    with pytest.raises(GoldenError, match=r"several versions of mlx-lm[\s\S]*0\.32\.2, 0\.33\.0"):
        gate()


@pytest.mark.usefixtures("files")
def test_an_oracle_is_not_taken_for_one_whose_name_it_begins(goldens: Path) -> None:
    assert golden_version("mlx-lm", goldens, PLATFORM) == "0.32.2"
    assert golden_version("mlx", goldens, PLATFORM) is None


@pytest.mark.usefixtures("files")
def test_known_deviations_are_applied_and_stray_ones_fail(gate: Any) -> None:
    def entry(pattern: str) -> Deviation:
        return Deviation(pattern=pattern, side="oracle", reason="r", evidence="e", link="l")

    assert statuses(gate(WrongRunner, deviations=(entry(NAMES[1]),)))[1] == "KNOWN_DEVIATION"
    assert exit_code(gate(WrongRunner, deviations=(entry(NAMES[1]),))) == 0
    assert statuses(gate(deviations=(entry(NAMES[1]),)))[1] == "FIXED"
    assert exit_code(gate(deviations=(entry(NAMES[1]),))) == 1
    assert statuses(gate(deviations=(entry("gone/*"),)))[4:] == ["ERROR"]


@pytest.mark.usefixtures("files")
def test_traces_are_kept_where_asked(gate: Any, cases: tuple[Case, ...], tmp_path: Path) -> None:
    gate(traces=tmp_path / "traces")

    for case in cases:
        assert Trace.load(tmp_path / "traces" / case.name) == answer(case)


@pytest.mark.usefixtures("files")
def test_progress_tells_every_verdict_once(gate: Any) -> None:
    told: list[tuple[int, int, str]] = []

    gate(on_verdict=lambda done, total, verdict: told.append((done, total, verdict.name)))

    assert [t[:2] for t in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {t[2] for t in told} == set(NAMES)


def test_nothing_judged_does_not_pass() -> None:
    assert exit_code(()) == 1


@pytest.mark.parametrize("status", list(Status))
def test_one_verdict_that_does_not_pass_fails_the_gate(status: Status) -> None:
    good = Verdict(name="a", status=Status.IDENTICAL, what="")
    code = exit_code((good, Verdict(name="b", status=status, what="")))

    assert code == (0 if status.value in ("IDENTICAL", "KNOWN_DEVIATION", "MEASURED_OK") else 1)


def test_the_platform_is_this_machine_s_by_default(gate: Any) -> None:
    with pytest.raises(GoldenError, match=f"there are no goldens for {platform_key()}"):
        gate(platform=None)


def _flip_digest(file: Path, name: str) -> None:
    raw = json.loads(file.read_text())
    for entry in raw["entries"]:
        if entry[0] == name:
            entry[3] = f"{int(entry[3][0], 16) ^ 1:x}{entry[3][1:]}"
    file.write_text(json.dumps(raw))
