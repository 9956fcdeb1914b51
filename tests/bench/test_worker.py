"""Workers answer line by line; a dead one is a message, not a hang."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.worker import ROOT, Worker
from parity.errors import AssayError

ECHO = """
from parity.worker_loop import serve
from parity.errors import UsageError
import sys
def echo(request):
    print("noise on standard output")
    return {"said": request["word"]}
def refuse(request):
    raise UsageError("no", next_step="ask otherwise")
serve({"echo": echo, "refuse": refuse, "die": lambda request: sys.exit("last words")})
"""


def worker() -> Worker:
    return Worker("echo", [sys.executable, "-c", ECHO], {"PYTHONPATH": str(ROOT)})


def test_answers_come_in_order_whatever_else_is_printed() -> None:
    with worker() as peer:
        assert [peer.ask(op="echo", word=word)["said"] for word in "abc"] == ["a", "b", "c"]


def test_a_refusal_is_the_callers_error_and_the_worker_lives_on() -> None:
    with worker() as peer:
        with pytest.raises(AssayError, match="the echo worker refused"):
            peer.ask(op="refuse")
        assert peer.ask(op="echo", word="still here")["said"] == "still here"


def test_a_death_names_the_request_and_the_last_words() -> None:
    with worker() as peer, pytest.raises(AssayError) as caught:
        peer.ask(op="die")

    assert str(caught.value).splitlines() == [
        "the echo worker died",
        "  request     die",
        "  exit code   1",
        "  last lines  last words",
        "  next        run the same command again; if it dies again, report the last lines",
    ]


def test_leaving_the_block_ends_the_process() -> None:
    with worker() as peer:
        pid = peer._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_hermetic_worker_inherits_nothing(tmp_path: Path) -> None:
    show = "import os; print(sorted(k for k in os.environ if not k.startswith('LC_')))"
    done = subprocess.run([sys.executable, "-c", show], env={}, capture_output=True, text=True, check=True)
    code = (
        f"import os; open({str(tmp_path / 'seen')!r}, 'w').write(str(sorted(k for k in os.environ if k[:3] != 'LC_')))"
    )
    with Worker("quiet", [sys.executable, "-c", code], {}, hermetic=True) as peer:
        peer._process.wait()

    assert (tmp_path / "seen").read_text() == done.stdout.strip()
