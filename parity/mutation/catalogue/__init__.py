"""The catalogue: every seeded fault, one file a group of kinds.

Guarantees: names are unique; the order is that of files and tables, so a sample is the same everywhere.
"""

from typing import Final

from parity.mutation.catalogue import (
    batches,
    caches,
    conversion,
    experts,
    feed_forward,
    heads,
    masks,
    norms,
    packed_weights,
    precision,
    randomness,
    recurrence,
    rotation,
    rotation_scaling,
    routers,
    sampling,
    scales,
    text,
    weights,
)
from parity.mutation.fault import Fault

FAULTS: Final[tuple[Fault, ...]] = (
    *rotation.FAULTS,
    *rotation_scaling.FAULTS,
    *norms.FAULTS,
    *scales.FAULTS,
    *masks.FAULTS,
    *heads.FAULTS,
    *feed_forward.FAULTS,
    *routers.FAULTS,
    *experts.FAULTS,
    *recurrence.FAULTS,
    *packed_weights.FAULTS,
    *weights.FAULTS,
    *caches.FAULTS,
    *conversion.FAULTS,
    *batches.FAULTS,
    *sampling.FAULTS,
    *randomness.FAULTS,
    *precision.FAULTS,
    *text.FAULTS,
)
BY_NAME: Final = {fault.name: fault for fault in FAULTS}


def by_name(name: str) -> Fault:
    """The fault of this name."""
    return BY_NAME[name]
