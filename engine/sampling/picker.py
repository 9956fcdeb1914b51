"""A sampler as the loop wants it: from a row and its step to an id.

Guarantees: the same options, prompt and keys give the same ids for the same rows; a picker belongs to one sequence, and its
history holds the prompt and every id that it gave.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from engine.sampling.chain import Chain, sample
from engine.sampling.keys import CounterKeys, SequentialKeys
from engine.sampling.processors import Processing, process
from engine.sampling.rows import check_rows, log_probabilities


class ChainPicker:
    """mlx-lm's processors and chain as the `pick` of `engine.generate.steps`.

    Args:
        chain: Filters and temperature.
        prompt_ids: What the penalties have seen before the first token.
        keys: Where random keys come from.
        processing: Logit bias and penalties; none by default.
    """

    def __init__(
        self,
        chain: Chain,
        prompt_ids: Sequence[int],
        *,
        keys: SequentialKeys | CounterKeys,
        processing: Processing | None = None,
    ) -> None:
        self._chain = chain
        self._history = list(prompt_ids)
        self._keys = keys
        self._processing = processing or Processing()

    def __call__(self, logits_BV: mx.array, index: int) -> int:
        """The id that follows a row [1, V].

        Raises:
            RequestError: The row has no probabilities, or an option does not fit the vocabulary.
        """
        del index  # the keys count by themselves
        check_rows(logits_BV)
        logits_BV = process(logits_BV, self._history, self._processing)
        ids_B, self._keys = sample(log_probabilities(logits_BV), self._chain, self._keys)
        token_id = int(np.array(ids_B)[0])
        self._history.append(token_id)
        return token_id
