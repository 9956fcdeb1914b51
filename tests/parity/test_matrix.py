import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.chat_template import ChatTemplate
from parity.case import Case
from parity.errors import CaseError, UsageError
from parity.matrix import CASES, load_cases, placed_cases, random_ids, read_prompts, select
from parity.models.catalogue import entries
from parity.models.fetch import snapshot_path
from parity.snapshot import NO_MODEL

TABLE = """
[[matrix]]
snapshot = ["toy"]
dtype = ["f32"]
kv = ["fp"]
drive = ["greedy"]
prompt = ["p3"]
feed = ["whole"]
num_steps = 2
"""
PROMPT = """
[prompt.p3]
ids = [5, 6, 7]
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "toy.toml") -> Path:
        folder = tmp_path / "cases"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        return folder

    return write


def test_lists_are_multiplied_in_their_order(write: Callable[..., Path]) -> None:
    text = PROMPT + TABLE.replace('["f32"]', '["f32", "bf16"]').replace('["fp"]', '["fp", "kv4-g32-s16"]').replace(
        '["whole"]', '["whole", "chunk2"]'
    )

    assert [case.name for case in load_cases(write(text))] == [
        "toy/f32/fp/greedy/p3-whole",
        "toy/f32/fp/greedy/p3-chunk2",
        "toy/f32/kv4-g32-s16/greedy/p3-whole",
        "toy/f32/kv4-g32-s16/greedy/p3-chunk2",
        "toy/bf16/fp/greedy/p3-whole",
        "toy/bf16/fp/greedy/p3-chunk2",
        "toy/bf16/kv4-g32-s16/greedy/p3-whole",
        "toy/bf16/kv4-g32-s16/greedy/p3-chunk2",
    ]


def test_a_case_has_all_that_its_table_says(write: Callable[..., Path]) -> None:
    forced = "\n[forced.p3]\nids = [9, 8, 7]\n"
    table = TABLE.replace('["greedy"]', '["forced"]') + 'tier = "L2"\noracle = "mlx-optiq"\nrecord = ["model.norm"]\n'

    (case,) = load_cases(write(PROMPT + forced + table))

    assert (case.prompt_ids, case.forced_ids, case.num_steps) == ((5, 6, 7), (9, 8), 2)
    assert (case.tier, case.oracle, case.record) == ("L2", "mlx-optiq", ("model.norm",))
    assert (case.snapshot, case.dtype, case.kv.name, case.feed.name) == ("toy", "f32", "fp", "whole")


def test_random_ids_depend_on_the_name_alone_and_are_pinned() -> None:
    assert random_ids("prompt/p40", 8, 512) == (265, 492, 459, 397, 80, 473, 371, 435)
    assert random_ids("prompt/p40", 3, 512) == random_ids("prompt/p40", 8, 512)[:3]
    assert random_ids("prompt/p41", 8, 512) != random_ids("prompt/p40", 8, 512)


def test_random_ids_cover_the_vocabulary_and_stay_below_it() -> None:
    assert set(random_ids("x", 2000, 16)) == set(range(16))


def test_forced_ids_of_a_random_prompt_are_drawn_apart_from_it(write: Callable[..., Path]) -> None:
    prompt = "[prompt.p3]\nrandom = { length = 3, vocabulary = 512 }\n"

    (case,) = load_cases(write(prompt + TABLE.replace('["greedy"]', '["forced"]')))

    assert case.prompt_ids == random_ids("prompt/p3", 3, 512)
    assert case.forced_ids == random_ids("forced/p3", 2, 512)
    assert case.forced_ids != case.prompt_ids[:2]


def test_each_case_knows_the_line_of_its_table(write: Callable[..., Path]) -> None:
    folder = write(PROMPT + TABLE + TABLE.replace('"f32"', '"bf16"'))

    assert [(place.file, place.line) for _, place in placed_cases(folder)] == [("toy.toml", 5), ("toy.toml", 14)]


def test_a_name_given_twice_is_refused_with_both_places(write: Callable[..., Path]) -> None:
    with pytest.raises(CaseError) as error:
        load_cases(write(PROMPT + TABLE + TABLE))

    assert str(error.value).splitlines() == [
        "two cases are named 'toy/f32/fp/greedy/p3-whole'",
        "  first   toy.toml, line 5",
        "  second  toy.toml, line 14",
        "  next    give one of them another prompt, or take it out of a list",
    ]


def test_a_name_given_twice_in_two_files_is_refused(write: Callable[..., Path]) -> None:
    write(PROMPT + TABLE)

    with pytest.raises(CaseError, match="two cases are named"):
        load_cases(write(PROMPT + TABLE, name="other.toml"))


def test_an_unknown_key_is_refused_with_file_table_and_key(write: Callable[..., Path]) -> None:
    with pytest.raises(CaseError) as error:
        load_cases(write(PROMPT + TABLE + "steps = 3\n"))

    assert str(error.value).splitlines() == [
        "a table of cases is malformed",
        "  file    toy.toml",
        "  table   [[matrix]] at line 5",
        "  key     steps",
        "  reason  unknown; known are snapshot, dtype, kv, drive, prompt, feed, num_steps, tier, oracle, record, full_rows",
        "  next    correct it in parity/cases/toy.toml",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param(PROMPT, "at least one [[matrix]] table", id="no-matrix"),
        pytest.param("top = 1\n" + PROMPT + TABLE, "key     top", id="top-level"),
        pytest.param(TABLE, "'p3' is none of", id="no-prompt"),
        pytest.param(PROMPT + TABLE.replace("num_steps = 2", ""), "key     num_steps", id="missing"),
        pytest.param(PROMPT + TABLE.replace("num_steps = 2", "num_steps = 0"), "not 0", id="no-steps"),
        pytest.param(PROMPT + TABLE.replace("num_steps = 2", "num_steps = true"), "not True", id="bool-steps"),
        pytest.param(PROMPT + TABLE.replace('["f32"]', '["f64"]'), "'f64' is none of f32, bf16, f16", id="dtype"),
        pytest.param(PROMPT + TABLE.replace('["f32"]', '"f32"'), "a list of names belongs here", id="no-list"),
        pytest.param(PROMPT + TABLE.replace('["f32"]', "[]"), "a list of names belongs here", id="empty-list"),
        pytest.param(PROMPT + TABLE.replace('["greedy"]', '["free"]'), "none of greedy, forced", id="drive"),
        pytest.param(PROMPT + TABLE.replace('["fp"]', '["kv9-g64"]'), "table  [[matrix]] at line 5", id="kv"),
        pytest.param(PROMPT + TABLE.replace('["whole"]', '["chunk0"]'), "unknown feed 'chunk0'", id="feed"),
        pytest.param(PROMPT + TABLE.replace('["greedy"]', '["forced"]'), "needs a [forced.p3] table", id="no-forced"),
        pytest.param(
            PROMPT + "[forced.p3]\nids = [1]\n" + TABLE.replace('["greedy"]', '["forced"]'),
            "1 ids for 2 steps",
            id="forced-too-short",
        ),
        pytest.param(PROMPT + "[forced.p4]\nids = [1]\n" + TABLE, "no prompt of this name", id="stray-forced"),
        pytest.param(PROMPT + "[prompt.p4]\nids = [1]\n" + TABLE, "no [[matrix]] uses this prompt", id="idle-prompt"),
        pytest.param(PROMPT + TABLE + 'tier = "L4"\n', "'L4' is none of L1, L2, L3", id="tier"),
        pytest.param(PROMPT + TABLE + 'tier = "L3"\n', "L3 needs a declared metric and bound", id="measured"),
        pytest.param(PROMPT + TABLE + "oracle = 3\n", "the name of an oracle belongs here", id="oracle"),
        pytest.param(PROMPT + TABLE + "record = [3]\n", "key     record", id="record"),
        pytest.param(PROMPT + TABLE + "full_rows = 1\n", "true or false belongs here, not 1", id="full-rows"),
        pytest.param("[prompt.p3]\nids = []\n" + TABLE, "a list of token ids belongs here", id="no-ids"),
        pytest.param("[prompt.p3]\nids = [-1]\n" + TABLE, "a list of token ids belongs here", id="negative-id"),
        pytest.param("[prompt.p3]\ntext = 'x'\n" + TABLE, "either ids", id="text-alone"),
        pytest.param("[prompt.p3]\nids = [1]\ntext = 3\n" + TABLE, "a string belongs here", id="text-no-string"),
        pytest.param("[prompt.p3]\nrandom = {length = 3}\n" + TABLE, "key     vocabulary", id="no-vocabulary"),
        pytest.param("[prompt.p3]\nrandom = 3\n" + TABLE, "{length = N, vocabulary = V}", id="random-no-table"),
        pytest.param("[prompt]\np3 = 3\n" + TABLE, "a table belongs here", id="prompt-no-table"),
        pytest.param("[[matrix]\n", "cannot be read", id="no-toml"),
    ],
)
def test_a_malformed_file_is_refused_with_the_reason(write: Callable[..., Path], text: str, fault: str) -> None:
    with pytest.raises(CaseError, match=r"file +toy\.toml") as error:
        load_cases(write(text))

    assert fault in str(error.value)


def test_a_folder_without_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="there are no cases"):
        load_cases(tmp_path)


def test_a_pattern_selects_by_shell_glob_and_a_name_by_itself(make_case: Callable[..., Case]) -> None:
    cases = tuple(make_case(name) for name in ("a/f32/x", "a/bf16/x", "b/f32/x"))

    assert select(cases, None) == cases
    assert select(cases, "a/*") == cases[:2]
    assert select(cases, "*/f32/*") == (cases[0], cases[2])
    assert select(cases, "b/f32/x") == (cases[2],)


@pytest.mark.parametrize("pattern", ["toy/f32/fp/gredy/p3-whole", "toy/f33/*"])
def test_an_unknown_name_lists_the_near_ones(make_case: Callable[..., Case], pattern: str) -> None:
    with pytest.raises(UsageError) as error:
        select([make_case()], pattern)

    assert str(error.value).splitlines() == [
        f"no case matches {pattern!r}",
        "  near   toy/f32/fp/greedy/p3-whole",
        "  cases  1",
        "  next   assay cases",
    ]


def test_selecting_from_nothing_is_an_error() -> None:
    with pytest.raises(UsageError, match="there are no cases"):
        select((), None)


def test_the_committed_matrix_has_every_combination_that_it_promises() -> None:
    cases = load_cases()
    tiny = [c for c in cases if c.snapshot == "llama-tiny"]
    main = Counter((c.dtype, c.kv.name, c.feed.mode, c.forced_ids is None) for c in tiny if c.num_steps == 8)

    for dtype in ("f32", "bf16"):
        for kv in ("fp", "kv8-g64", "kv4-g64", "kv4-g32-s16"):
            for feed in ("whole", "chunked", "tail-split"):
                assert main[dtype, kv, feed, True]
                assert main[dtype, kv, feed, False]
    assert {(c.kv.bits, c.kv.group_size) for c in tiny if c.feed.mode == "tail-split" and c.dtype == "f32"} >= {
        (bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64)
    }
    assert any(len(c.prompt_ids) < 256 < len(c.prompt_ids) + c.num_steps for c in tiny)
    assert any(len(c.prompt_ids) > 256 for c in tiny)
    assert any(len(c.prompt_ids) == 1 for c in tiny)
    assert {c.dtype for c in tiny if c.record == ("*",)} == {"f32", "bf16"}
    assert all(max(c.prompt_ids + (c.forced_ids or ())) < 512 for c in tiny)
    real = [c for c in cases if c.snapshot.startswith("smollm2")]
    assert {c.snapshot for c in real} == {"smollm2-135m", "smollm2-135m-f32", "smollm2-135m-q4"}
    assert all(c.snapshot in {*entries(), NO_MODEL.name} for c in cases)
    assert any(c.num_steps == 100 for c in real)
    assert any(len(c.prompt_ids) > 256 for c in real)


def test_names_are_safe_paths() -> None:
    assert all(re.fullmatch(r"[a-z0-9_./-]+", case.name) and ".." not in case.name for case in load_cases())


@pytest.mark.model
@pytest.mark.parametrize("snapshot", ["smollm2-135m", "smollm2-135m-f32", "smollm2-135m-q4"])
def test_written_text_tokenises_to_the_written_ids(snapshot: str) -> None:
    folder = snapshot_path(snapshot)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = read_prompts(CASES / "smollm2.toml")

    assert {"ship", "capital", "forest"} == set(prompts)
    for prompt in prompts.values():
        text = prompt.text
        if prompt.chat is not None:
            text = ChatTemplate.open(folder).render([{"role": "user", "content": prompt.chat}])
        assert text is not None
        assert tuple(tokenizer.encode(text, add_special_tokens=False).ids) == prompt.ids
