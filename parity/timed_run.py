"""The clock of a generation, as mlx-lm reads it, so that both sides of a ratio mean the same.

The prompt's clock runs from the start of the loop until the first token was read; the decode clock from then until the last
one. Decode rate counts every token including the first, as mlx-lm's does. Source: spec/generate.md section 1.3.
"""

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any


def timed(rows_and_tokens: Iterable[tuple[object, int]], to_bytes: Callable[[object], bytes]) -> dict[str, Any]:
    """Consume a generation and time it.

    Args:
        rows_and_tokens: Yields the row of logits and its token, the token already read; starting it starts the loop.
        to_bytes: Stored bits of a row; called after the clock has stopped.

    Returns:
        `prompt_seconds`, `decode_seconds`, `token_ids`, and `logits` = SHA-256 over all rows.
    """
    rows: list[object] = []
    token_ids: list[int] = []
    start = first = time.perf_counter()
    for row, token_id in rows_and_tokens:
        if not token_ids:
            first = time.perf_counter()
        rows.append(row)
        token_ids.append(token_id)
    end = time.perf_counter()
    digest = hashlib.sha256()
    for row in rows:
        digest.update(to_bytes(row))
    return {
        "prompt_seconds": first - start,
        "decode_seconds": end - first,
        "token_ids": token_ids,
        "logits": digest.hexdigest(),
    }
