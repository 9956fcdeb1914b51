import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import RequestError
from parity import cli
from parity.errors import AssayError, GoldenError
from parity.matrix import load_cases
from parity.verbs import cases

VERBS = [verb.__name__.rpartition(".")[2] for verb in cli.VERBS]


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make `assay cases` raise."""

    def arrange(error: BaseException) -> None:
        def run(_: argparse.Namespace) -> int:
            raise error

        monkeypatch.setattr(cases, "run", run)

    return arrange


def test_help_names_every_verb_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])

    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"    {verb} " in out for verb in VERBS)


def test_help_has_an_example_of_every_verb_and_each_is_a_line_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])

    shown = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    lines = [shlex.split(line) for line in shown]
    assert [line[:2] for line in lines] == [["assay", verb] for verb in VERBS]
    for line in lines:
        assert cli._parser().parse_args(line[1:]).verb == line[1]


@pytest.mark.parametrize(
    ("shell", "sign"), [("bash", "complete -o"), ("zsh", "#compdef assay"), ("tcsh", "complete assay")]
)
def test_a_shell_learns_the_verbs(shell: str, sign: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--completion", shell])

    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert sign in out
    assert all(verb in out for verb in VERBS)


def test_bash_takes_the_completions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--completion", "bash"])
    script = capsys.readouterr().out + "\nCOMP_WORDS=(assay che); COMP_CWORD=1; _shtab_assay assay che assay\n"

    ended = subprocess.run(
        ["bash", "-c", script + 'printf "%s\\n" "${COMPREPLY[@]}"'],  # noqa: S607 - whichever bash there is
        check=False,
        capture_output=True,
        text=True,
    )

    assert ended.stdout.split() == ["check"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_knows_json(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, "--help"])

    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_version_names_mlx_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])

    assert ended.value.code == 0
    assert ", mlx 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        ["--json", "cases", "llama-tiny/f32/fp/*"],
        ["cases", "--json", "llama-tiny/f32/fp/*"],
        ["cases", "llama-tiny/f32/fp/*", "--json"],
    ],
)
def test_json_is_understood_anywhere(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line) == 0

    assert set(json.loads(capsys.readouterr().out)) == {"cases"}


def test_without_json_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cases", "llama-tiny/f32/fp/*"]) == 0

    assert not capsys.readouterr().out.startswith("{")


def test_an_unknown_verb_lists_the_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chek"]) == 2

    assert capsys.readouterr().err.splitlines() == [
        "assay has no 'chek'",
        "  near   check, cases, bench",
        f"  known  {', '.join(VERBS)}",
        "  next   assay --help",
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ([], "the following arguments are required: VERB"),
        (["check", "--jobs", "0"], "argument --jobs: '0' is not a whole number of at least 1"),
        (["check", "--job", "1"], "unrecognized arguments: --job"),
        (["diff", "one"], "the following arguments are required: ACTUAL"),
    ],
)
def test_a_malformed_line_is_the_caller_s_error(line: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line) == 2

    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith(told)
    assert err[-1].startswith("  next   assay")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GoldenError("it is gone", looked_at="x", next_step="assay record"), "golden"),
        (AssayError("it is gone", looked_at="x", next_step="assay record"), "error"),
        (RequestError("it is gone", looked_at="x", next_step="assay record"), "request"),
    ],
)
def test_an_error_is_told_and_exits_with_2(
    raising: Callable[[BaseException], None], error: Exception, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(error)

    assert cli.main(["cases"]) == 2
    plain = capsys.readouterr()
    assert (plain.out, plain.err) == ("", "it is gone\n  looked at  x\n  next       assay record\n")

    assert cli.main(["cases", "--json"]) == 2
    as_json = capsys.readouterr()
    message = "it is gone\n  looked at  x\n  next       assay record"
    assert as_json.err == ""
    assert json.loads(as_json.out) == {"error": {"kind": kind, "message": message, "next": "assay record"}}


def test_a_malformed_line_is_told_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chek", "--json"]) == 2

    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["next"]) == ("usage", "assay --help")


def test_an_interruption_is_one_line_and_130(
    raising: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    raising(KeyboardInterrupt())

    assert cli.main(["cases"]) == 130
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_fault_of_ours_is_not_hidden(raising: Callable[[BaseException], None]) -> None:
    raising(ZeroDivisionError("ours"))

    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main(["cases"])


def test_the_package_runs_as_a_module_and_a_reader_that_leaves_gets_no_stack_trace() -> None:
    line = f"{sys.executable} -m parity cases | head -n 1"

    ended = subprocess.run(
        ["bash", "-c", line],  # noqa: S607 - whichever bash there is
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )

    assert ended.stdout.split()[0] == load_cases()[0].name
    assert ended.stderr == ""
