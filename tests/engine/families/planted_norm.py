"""A fault planted in one norm of a model: what many families' tests do to see that it is found where it begins."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from engine.norm import RMSNorm
from engine.taps import tap


def plant_norm(monkeypatch: pytest.MonkeyPatch, ending: str, change: Callable[[RMSNorm, mx.array], mx.array]) -> None:
    """Let `change` compute the norms whose module path ends so, and leave the others right."""
    right = RMSNorm.__call__

    def wrong(self: RMSNorm, x: mx.array) -> mx.array:
        return tap(self.path, change(self, x)) if self.path.endswith(ending) else right(self, x)

    monkeypatch.setattr(RMSNorm, "__call__", wrong)
