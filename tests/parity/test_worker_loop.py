"""A worker's own side of its pipes: one answer a request on standard output, and nothing else there."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVER = """
import os, sys
from parity.errors import UsageError
from parity.worker_loop import serve

def echo(request):
    print("printed")
    os.write(1, b"written past Python\\n")
    return {"said": request["word"]}

def refuse(request):
    raise UsageError("it does not fit", found=request["word"], next_step="ask otherwise")

serve({"echo": echo, "refuse": refuse, "fail": lambda request: 1 / 0})
print("served", file=sys.stderr)
"""


def talk(*lines: str) -> "subprocess.CompletedProcess[str]":
    """Send lines, close the pipe, wait."""
    return subprocess.run(
        [sys.executable, "-c", SERVER],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def request(op: str, word: str = "") -> str:
    return json.dumps({"op": op, "word": word})


def test_standard_output_has_one_answer_a_request_and_nothing_else() -> None:
    ended = talk(request("echo", "a"), request("echo", "ü\n"), request("echo", "c"))
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [{"said": w} for w in ("a", "ü\n", "c")]
    assert ended.stderr.count("printed") == ended.stderr.count("written past Python") == 3


def test_it_ends_by_itself_when_nothing_more_can_be_asked() -> None:
    ended = talk(request("echo", "a"))
    assert ended.returncode == 0
    assert ended.stderr.splitlines()[-1] == "served"


def test_a_callers_error_is_an_answer_with_the_whole_message_and_the_next_request_is_served() -> None:
    ended = talk(request("refuse", "x"), request("echo", "a"))
    refused, answered = map(json.loads, ended.stdout.splitlines())
    assert refused == {"error": "it does not fit\n  found  x\n  next   ask otherwise"}
    assert answered == {"said": "a"}


def test_another_error_ends_it_with_a_stack_trace_and_without_an_answer() -> None:
    ended = talk(request("echo", "a"), request("fail"), request("echo", "b"))
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [{"said": "a"}]
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_an_operation_that_nobody_handles_ends_it() -> None:
    ended = talk(request("dance"))
    assert (ended.stdout, ended.returncode) == ("", 1)
    assert ended.stderr.splitlines()[-1] == "KeyError: 'dance'"
