"""A family's float64 truth for a snapshot, and how far an honest run in a dtype may lie from it.

Guarantees: the bound is measured with seeded random rounding, so that it is the same every time, and never derived from what
it is to excuse. A snapshot, a family or a KV mode that is not written here is refused, never approximated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from parity.case import DType
from parity.snapshot import Snapshot
from parity.truth import delta, dense, experts, gemma
from parity.truth.forward import Forward
from parity.truth.packing import Packing
from parity.truth.rounding import UNIT, Exact, Random, Rounding
from parity.truth.weights import Array, NoTruthError, Weights

LOGITS: Final = "logits"
SAMPLES: Final = 4  # runs with random rounding
MARGIN: Final = 6.0  # times their largest departure: a few samples do not reach the edge of what may happen
Family = Callable[..., Array]
FAMILIES: Final[Mapping[str, Family]] = {
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "glm4": dense.glm4,
    "granite": dense.llama,
    "llama": dense.llama,
    "minicpm": dense.llama,
    "mistral": dense.llama,
    "mixtral": experts.mixtral,
    "olmo2": dense.olmo,
    "olmo3": dense.olmo,
    "phi3": dense.phi3,
    "qwen2": dense.llama,
    "qwen3": dense.llama,
    "qwen3_5": delta.qwen3_5,
    "qwen3_5_moe": delta.qwen3_5,
    "qwen3_moe": experts.qwen3_moe,
    "qwen3_next": delta.qwen3_next,
    "smollm3": dense.llama,
    "starcoder2": dense.starcoder2,
}


@dataclass(slots=True, kw_only=True)
class Truth:
    """The truth of one snapshot in one dtype.

    Attributes:
        config: Parsed config.json.
        weights: Rounded to the dtype, then exact.
        published: Compute what the config says, also where the oracle is known to leave it out.
        packing: Of keys and values; None where a run keeps them as computed.
    """

    config: Mapping[str, Any]
    weights: Weights
    published: bool = False
    packing: Packing | None = None
    _seen: dict[tuple[int, ...], tuple[dict[str, Array], list[dict[str, Array]]]] = field(default_factory=dict)

    def run(self, ids: Sequence[int], rounding: Rounding | None = None) -> dict[str, Array]:
        """One forward: module path to its output of every position [L, ...], and `logits` [L, V].

        Raises:
            NoTruthError: The config asks for what is not written here.
        """
        forward = Forward(
            weights=self.weights,
            rounding=rounding or Exact(),
            ids=np.array(ids, dtype=np.int64),
            packing=self.packing,
        )
        logits = FAMILIES[self.config["model_type"]](forward, self.config, published=self.published)
        return {**forward.outputs, LOGITS: logits}

    def at(self, ids: Sequence[int], module: str, position: int = -1) -> tuple[Array, float] | None:
        """A module's exact output at a position, and the rounding bound there: the most that any element may be off.

        None where the truth has no such output. `logits` is a module here; the last position is the default.
        """
        key = tuple(ids)
        if key not in self._seen:
            samples = [self.run(ids, Random(self.weights.dtype, seed)) for seed in range(SAMPLES)]
            self._seen.clear()  # outputs of every position are large; one sequence at a time is asked about
            self._seen[key] = (self.run(ids), samples)
        exact, samples = self._seen[key]
        if module not in exact:
            return None
        value = exact[module][position]
        spread = max(float(np.abs(sample[module][position] - value).max()) for sample in samples)
        least = UNIT[self.weights.dtype] * float(np.abs(value).max())  # of an output so short that chance may spare it
        return value, MARGIN * max(spread, least)


def open_truth(snapshot: Snapshot, dtype: DType, *, published: bool = False, packing: Packing | None = None) -> Truth:
    """Open the truth of a snapshot.

    Raises:
        NoTruthError: The family has none.
    """
    model_type = str(snapshot.config.get("model_type"))
    if model_type not in FAMILIES:
        raise NoTruthError(f"{model_type} has no float64 truth")
    return Truth(config=snapshot.config, weights=Weights.open(snapshot, dtype), published=published, packing=packing)
