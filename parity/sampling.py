"""What a sampler case asks beside its logits: a chain, its options, a batch, a seed.

A sampler case draws `num_steps` times from a few fixed rows of logits. Draw `i` of batch element `b` uses row
`(i + b) % num_rows`; what processors see as history is the case's prompt and what that element drew before. So the case is a
function of its rows, options, seed and batch alone, and any engine in any language can answer it without a model.

Rows are float32 values that are rounded to the case's dtype: those of a model (`rows = "model"`: its first rows for the case's
prompt, greedy, computed in float32), or generated (`parity.logit_rows`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from parity.errors import CaseError

MODEL: Final = "model"
ORACLE_OF: Final = {"mlx-lm": "mlx-lm", "optiq": "mlx-optiq"}  # chain to who is believed about it
CHAINS: Final = tuple(ORACLE_OF)
NUMBERS: Final = frozenset(
    {
        "temperature",
        "top_p",
        "min_p",
        "xtc_probability",
        "xtc_threshold",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    }
)
COUNTS: Final = frozenset({"min_tokens_to_keep", "top_k", "repetition_window", "presence_window", "frequency_window"})
OPTIONS: Final = (*sorted(NUMBERS), *sorted(COUNTS), "xtc_special", "logit_bias")
OPTIQ_OPTIONS: Final = frozenset({"temperature", "top_k", "top_p", "min_p"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        chain: Whose order of filters: `mlx-lm`, or `optiq`, that of mlx-optiq's own engine. The latter draws one row at a
            time, as a vector [V], from which mlx draws by Gumbel noise; so `uniforms` are those of the noise, as in a batch.
        options: Name to value, as pairs: numbers; `xtc_special` a tuple of ids; `logit_bias` pairs of id and number.
        rows: `model`, or the name of generated rows.
        num_rows: How many rows are drawn from in turn.
        batch: Rows a draw.
        seed: What `mx.random.seed` is given before the first draw.
    """

    chain: str
    options: tuple[tuple[str, Any], ...]
    rows: str
    num_rows: int
    batch: int
    seed: int

    @property
    def named(self) -> dict[str, Any]:
        """The options by name; `logit_bias` as a mapping of id to number."""
        return {name: dict(value) if name == "logit_bias" else value for name, value in self.options}

    @property
    def greedy(self) -> bool:
        """Whether nothing random is used."""
        return not self.named.get("temperature", 0)

    @property
    def xtc(self) -> bool:
        """Whether each draw takes a uniform for XTC."""
        return not self.greedy and self.named.get("xtc_probability", 0) > 0

    def to_json(self) -> dict[str, object]:
        """Plain values, in a fixed order."""
        options = self.named
        if "logit_bias" in options:
            options["logit_bias"] = {str(token): bias for token, bias in options["logit_bias"].items()}
        return {
            "chain": self.chain,
            "options": options,
            "rows": self.rows,
            "num_rows": self.num_rows,
            "batch": self.batch,
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote.

        Raises:
            CaseError: The chain or an option is unknown, or a value is of the wrong kind.
            KeyError, TypeError: A field is missing or unknown.
        """
        values = dict(raw)
        values["options"] = read_options(values["options"])
        if values["chain"] not in CHAINS:
            raise _wrong("chain", values["chain"], ", ".join(CHAINS))
        for name in ("num_rows", "batch", "seed"):
            if type(values[name]) is not int or values[name] < (name != "seed"):
                raise _wrong(name, values[name], "a whole number of at least 1, or a seed of at least 0")
        if lacks := lacking(values["chain"], values["options"], values["batch"]):
            raise _wrong("draw of a chain", values["chain"], lacks)
        return cls(**values)


def lacking(chain: str, options: tuple[tuple[str, Any], ...], batch: int) -> str | None:
    """What a chain cannot do of what is asked of it, in words; None where it can do all."""
    if chain != "optiq":
        return None
    if outside := sorted({name for name, _ in options} - OPTIQ_OPTIONS):
        return f"the chain optiq has no {', '.join(outside)}; it has {', '.join(sorted(OPTIQ_OPTIONS))}"
    return None if batch == 1 else f"the chain optiq draws one row at a time, not {batch}"


def read_options(raw: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options as a table or a manifest has them, in the table's order.

    Raises:
        CaseError: One is unknown or of the wrong kind.
    """
    return tuple((name, _option(name, value)) for name, value in raw.items())


def _option(name: str, value: Any) -> Any:  # noqa: ANN401 - a value of TOML or JSON
    if name in NUMBERS and type(value) in (int, float):
        return float(value)
    if name in COUNTS and type(value) is int:
        return value
    if name == "xtc_special" and isinstance(value, list | tuple) and all(type(token) is int for token in value):
        return tuple(value)
    if name == "logit_bias" and isinstance(value, Mapping):
        if all(str(token).isdecimal() and type(bias) in (int, float) for token, bias in value.items()):
            return tuple((int(token), float(bias)) for token, bias in value.items())
        raise _wrong(name, value, "token ids to numbers")
    if name in OPTIONS:
        raise _wrong(name, value, "a number, a count, a list of ids or a table of ids to numbers, as the option needs")
    raise _wrong("option", name, ", ".join(OPTIONS))


def _wrong(kind: str, value: object, known: str) -> CaseError:
    return CaseError(f"unknown {kind} {value!r}", known=known, next_step="correct it in parity/cases/*.toml")
