"""mlx-lm's prompt-cache files, both ways: `save_prompt_cache` there and `load` here, or the reverse.

A safetensors file. The states of all caches are one tree whose leaves are named by their place (`2.0` is the first leaf of the
third cache); numbers, words and None among them are arrays too, and listed with what they were. The metadata holds the
caller's own under `0.`, the classes under `1.`, that list under `2.`. There are no digests and no model in it: what can be
checked is that shapes and numbers agree.

Guarantees: caches of the classes in `engine.persistence.mlx_lm_states` go over bit for bit, whole buffers as mlx-lm keeps them;
any other class is refused by name. Written atomically. Offsets of recurrent caches, which mlx-lm does not keep, are taken from
the caches beside them, or from the caller.
Source: spec/kv.md sections 12 and 15; the layout is that of mlx-lm 0.32.2.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from engine.cache.protocol import Cache, settled
from engine.persistence.atomic_write import write_atomically
from engine.persistence.mlx_lm_states import (
    CLASSES,
    LIST,
    Tree,
    UncountedError,
    UnknownClassError,
    cache_of,
    state_of,
    tokens_seen,
)
from engine.persistence.refusal import CacheFileError, damaged, read_file
from engine.persistence.tensor_bytes import decode, encode


def save_mlx_lm(path: Path, caches: Sequence[Cache], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write caches as mlx-lm's `save_prompt_cache` does.

    Args:
        path: The file; mlx-lm wants it to end in `.safetensors`.
        caches: After a forward.
        metadata: The caller's own; names without dots.

    Raises:
        RequestError: A kind that mlx-lm has no class for.
    """
    arrays: dict[str, mx.array] = {}
    written = {f"0.{name}": text for name, text in (metadata or {}).items()}
    listed: list[tuple[str, str]] = []
    for place, cache in enumerate(settled(caches)):
        name, state = state_of(cache)
        written[f"1.{place}"] = name
        _flatten(str(place), state, arrays, listed)
    written["2.0"] = ""  # mlx-lm's own first entry
    for place, (leaf, what) in enumerate(listed, start=1):
        written[f"2.{place}.0"], written[f"2.{place}.1"] = leaf, what
    mx.eval(arrays)
    write_atomically(path, encode(arrays, written))


def load_mlx_lm(path: Path, *, num_tokens: int | None = None) -> tuple[tuple[Cache, ...], dict[str, str]]:
    """Read a prompt cache that mlx-lm wrote.

    Args:
        path: The file.
        num_tokens: Tokens that it has seen; needed where no cache of keys and values says so.

    Returns:
        The caches, and the caller's own metadata.

    Raises:
        CacheFileError: The file is missing, cut short, not of this layout, or holds a class that has no kind here.
    """
    try:
        arrays, metadata = decode(read_file(path))
        own, classes, leaves = _told(metadata)
        trees = _unflattened(arrays, leaves)
        if sorted(trees) != list(range(len(classes))):
            raise ValueError(f"states of caches {sorted(trees)} for {len(classes)} classes")  # noqa: TRY301
        states = [(name, trees[place]) for place, name in enumerate(classes)]
        counts = [num_tokens, *(tokens_seen(name, state) for name, state in states)]
        seen = next((count for count in counts if count is not None), None)
        return tuple(cache_of(name, state, seen) for name, state in states), own
    except UnknownClassError as error:
        raise CacheFileError(
            "the prompt cache holds a class that has no kind here",
            file=path.name,
            found=error,
            known=", ".join((*CLASSES, LIST)),
            next_step="save it with caches of these classes",
        ) from error
    except UncountedError as error:
        raise CacheFileError(
            "the prompt cache does not say how many tokens it has seen",
            file=path.name,
            caches="recurrent only",
            next_step="pass num_tokens",
        ) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise damaged(path, f"not a prompt cache of mlx-lm: {error}") from error


def _flatten(name: str, tree: Tree, arrays: dict[str, mx.array], listed: list[tuple[str, str]]) -> None:
    if isinstance(tree, list):
        for place, item in enumerate(tree):
            _flatten(f"{name}.{place}", item, arrays, listed)
    elif isinstance(tree, mx.array):
        arrays[name] = tree
    elif isinstance(tree, int):
        arrays[name] = mx.array(tree)
        listed.append((name, "scalar"))
    elif isinstance(tree, str):
        arrays[name] = mx.array([ord(letter) for letter in tree])
        listed.append((name, "string"))
    else:
        arrays[name] = mx.array([])
        listed.append((name, "none"))


def _told(metadata: Mapping[str, str]) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """The caller's metadata, the classes in order, and the leaves that were no arrays."""
    own = {key[2:]: text for key, text in metadata.items() if key.startswith("0.")}
    classes = {int(key[2:]): text for key, text in metadata.items() if key.startswith("1.")}
    count = max((int(key.split(".")[1]) for key in metadata if key.startswith("2.")), default=-1)
    if count < 0 or sorted(classes) != list(range(len(classes))):
        raise ValueError("its metadata lists no classes of caches")
    leaves = {metadata[f"2.{place}.0"]: metadata[f"2.{place}.1"] for place in range(1, count + 1)}
    return own, [classes[place] for place in range(len(classes))], leaves


def _unflattened(arrays: Mapping[str, mx.array], leaves: Mapping[str, str]) -> dict[int, Tree]:
    """The state of each cache, as lists by place."""
    root: dict[int, Tree] = {}
    for name, array in arrays.items():
        *path, last = map(int, name.split("."))
        node = root
        for place in path:
            node = node.setdefault(place, {})
        node[last] = _leaf(array, leaves.get(name))
    return {place: _listed(tree) for place, tree in root.items()}


def _leaf(array: mx.array, what: str | None) -> Tree:
    match what:
        case None:
            return array
        case "scalar":
            return int(np.array(array))
        case "string":
            return "".join(map(chr, np.array(array).astype(int)))
        case "none":
            return None
    raise ValueError(f"a leaf of unknown type {what!r}")


def _listed(tree: Tree) -> Tree:
    if not isinstance(tree, dict):
        return tree
    if sorted(tree) != list(range(len(tree))):
        raise ValueError(f"a state with the places {sorted(tree)}")
    return [_listed(tree[place]) for place in range(len(tree))]
