"""A strategy from plain values: a table a sampler, `name` and its options, as recorded cases and config files hold them.

Guarantees: an unknown name or option is refused with what is known; nothing is ignored.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.errors import RequestError
from engine.llama_sampling.context import Pick, Sampler
from engine.llama_sampling.draw import Dist, Greedy
from engine.llama_sampling.dry import DRY
from engine.llama_sampling.filters import MinP, TopK, TopNSigma, TopP, TypicalP
from engine.llama_sampling.mirostat import Mirostat, MirostatV2
from engine.llama_sampling.penalties import LogitBias, Penalties
from engine.llama_sampling.strategy import SamplingStrategy
from engine.llama_sampling.temperature import DynamicTemperature, Temperature
from engine.llama_sampling.xtc import XTC

SAMPLERS: Final[Mapping[str, type[Sampler]]] = {
    "logit_bias": LogitBias,
    "penalties": Penalties,
    "dry": DRY,
    "top_n_sigma": TopNSigma,
    "top_k": TopK,
    "typical_p": TypicalP,
    "top_p": TopP,
    "min_p": MinP,
    "xtc": XTC,
    "temperature": Temperature,
    "dynamic_temperature": DynamicTemperature,
}
PICKS: Final[Mapping[str, type[Pick]]] = {
    "dist": Dist,
    "greedy": Greedy,
    "mirostat": Mirostat,
    "mirostat_v2": MirostatV2,
}


def strategy_of(samplers: Sequence[Mapping[str, Any]], pick: Mapping[str, Any]) -> SamplingStrategy:
    """The strategy that tables describe.

    Args:
        samplers: In order; keys of `bias` may be strings, as JSON and TOML write them.
        pick: The last one.

    Raises:
        RequestError: A name or an option is unknown, or an option is missing or out of range.
    """
    return SamplingStrategy(samplers=tuple(_made(SAMPLERS, table) for table in samplers), pick=_made(PICKS, pick))


def _made(kinds: Mapping[str, type[Any]], table: Mapping[str, Any]) -> Any:  # noqa: ANN401 - one of the kinds
    options = dict(table)
    name = str(options.pop("name", ""))
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=3, cutoff=0.4) or list(kinds)
        raise RequestError(f"unknown sampler {name!r}", near=", ".join(near), next_step="use one of these names")
    fields = {f.name: f for f in dataclasses.fields(kinds[name])}
    needed = {key for key, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING}
    if (unknown := options.keys() - fields.keys()) or (missing := needed - options.keys()):
        raise RequestError(
            f"the options of sampler {name!r} do not fit",
            **({"unknown": ", ".join(sorted(unknown))} if unknown else {"missing": ", ".join(sorted(missing))}),
            options=", ".join(fields) or "none",
            next_step="use these options",
        )
    if "bias" in options:
        options["bias"] = {int(token): float(value) for token, value in options["bias"].items()}
    return kinds[name](**options)
