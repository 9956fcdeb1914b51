"""Judging today's engine against a golden that the oracle wrote: what a test of a planted fault needs.

Nothing is cached between two calls, so a fault planted in a module is in the model that is built, run and judged.
"""

from functools import cache

import pytest

from parity.case import Case
from parity.engine_runner import EngineRunner
from parity.gate import check
from parity.matrix import load_cases, select
from parity.models.fetch import ensure_snapshot
from parity.platform_key import platform_key
from parity.verdict import Verdict

PLATFORM = "linux-x86_64-cpu"
needs_goldens = pytest.mark.skipif(platform_key() != PLATFORM, reason=f"goldens are committed for {PLATFORM} only")


def judged(name: str) -> Verdict:
    """Run the case of that name and judge it against its committed golden."""
    (case,) = select(_cases(), name)
    (verdict,) = check(
        (case,),
        lambda: EngineRunner(kernels=None),
        find_snapshot=ensure_snapshot,
        every_name={case.name for case in _cases()},
        pattern=name,
    )
    return verdict


def found(name: str) -> tuple[str, str | None]:
    """Status and earliest differing module of `judged`."""
    verdict = judged(name)
    return verdict.status.value, verdict.earliest


@cache
def _cases() -> tuple[Case, ...]:
    return load_cases()
