"""What a sweep asks of a model: feed it, keep its state, batch it. The engine and each oracle answer through this protocol.

A state is whatever a subject's caches are. Handing a state to a method uses it up, since oracles change theirs in place;
`fork` is the way to keep one. A subject that does not offer an operation raises `Refused` with the reason, and the sweep
reports that instead of a verdict. It holds no mathematics and needs numpy alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from parity.tensor import Tensor

State = Any


class Refused(Exception):  # noqa: N818 - a refusal is an answer here, not an error
    """The subject says, before computing anything wrong, that it does not do this."""


class Subject(Protocol):
    """One model of one oracle, or of the engine, in one dtype."""

    @property
    def vocabulary(self) -> int:
        """Ids are below it."""
        ...

    def fresh(self) -> State:
        """The state of an empty sequence."""
        ...

    def feed(self, state: State | None, ids_BL: Sequence[Sequence[int]]) -> tuple[Tensor, State]:
        """Logits [B, L, V] of new tokens, and the longer state; without any cache where `state` is None."""
        ...

    def packed(self, state: State, kv: str) -> State:
        """The state with its keys and values converted to a KV mode such as `kv8-g64`."""
        ...

    def fork(self, state: State) -> State:
        """An independent state with the same content."""
        ...

    def stored(self, state: State) -> State:
        """The state written to a file and read back."""
        ...

    def trimmed(self, state: State, count: int) -> State:
        """The state without its last `count` tokens."""
        ...

    def merged(self, states: Sequence[State]) -> State:
        """One batch out of sequences of any lengths."""
        ...

    def prefilled(self, prompts: Sequence[Sequence[int]], side: str) -> tuple[Tensor, State]:
        """One forward over prompts padded on the `left` or the `right`: the last row of each [B, V], and the batch."""
        ...

    def kept(self, state: State, rows: Sequence[int]) -> State:
        """A batch with these rows only."""
        ...

    def joined(self, first: State, second: State) -> State:
        """Two batches as one."""
        ...

    def extracted(self, state: State, row: int) -> State:
        """One row of a batch as a sequence of its own."""
        ...

    def generated(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        draft: str | None = None,
        piece: int | None = None,
        penalty: bool = False,
    ) -> list[int]:
        """Greedy tokens of the subject's own loop.

        Args:
            prompt: Token ids.
            count: Tokens.
            draft: Speculate three tokens at a time, drafted by the model `itself` or by a `stranger` who is mostly refused.
            piece: Feed the prompt in pieces of this many tokens.
            penalty: With a repetition penalty that reaches back over the prompt.
        """
        ...

    def generated_together(
        self, prompts: Sequence[Sequence[int]], count: int, *, penalty: bool = False
    ) -> list[list[int]]:
        """Greedy tokens of each prompt from the subject's own batched loop."""
        ...

    def through_prompt_cache(self, first: Sequence[int], prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens of `prompt` after `first` was run and kept in the subject's prompt cache."""
        ...

    def compiled(self, ids_BL: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, L, V] of a fresh sequence with the subject's compilation of functions switched the other way."""
        ...

    def filtered(self, name: str, rows_BV: Tensor, options: Mapping[str, float]) -> Tensor:
        """Rows [B, V] after one of the subject's sampling filters, such as `top_p`."""
        ...

    def packed_attention(self, heads: Mapping[str, Tensor], mask_B1LT: Tensor) -> Tensor:
        """Attention [B, H, L, E] of `q_BHLE` over `k_BKTE`, `v_BKTE` packed to 8 bits, masked row by row."""
        ...

    def with_weights(self, change: str) -> "Subject":
        """The same model, its weights read once more after a change that must not matter.

        Args:
            change: `sanitised-twice` or `spare-head`: a tied head that is stored although it is the embedding.
        """
        ...
