"""The tensors of a snapshot, each handed out exactly once.

Guarantees: headers are checked by the safetensors library before a byte of data is used (size, overlap, gaps); a shard
name that leaves the folder is refused; every tensor is taken once, or matches a drop pattern that the family lists with a
reason, or `finish` raises. Floating tensors are cast to the dtype that the engine computes in as they are taken; packed
integers are not. Arrays are lazy: nothing is read before it is evaluated.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from engine.config import load_json
from engine.errors import CheckpointError
from engine.quantization import Quantization


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """Tensors by name; `take` removes.

    Attributes:
        folder: The snapshot.
        dtype: What floating tensors are cast to.
        quantization: How packed tensors are to be read.
    """

    folder: Path
    dtype: mx.Dtype
    quantization: Quantization
    _tensors: dict[str, mx.array] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, folder: Path, *, dtype: mx.Dtype, quantization: Quantization) -> Self:
        """Check the headers of every shard and map its tensors, reading no data.

        Raises:
            CheckpointError: No shard, a damaged one, a missing one, or a tensor that two shards hold.
        """
        tensors: dict[str, mx.array] = {}
        for file in _shards(folder):
            _check_header(file)
            try:
                loaded = mx.load(str(file), format="safetensors")
            except (RuntimeError, ValueError) as error:
                raise _damaged(file, str(error)) from error
            if not isinstance(loaded, dict):
                raise _damaged(file, "mlx does not read it as named tensors")
            if twice := tensors.keys() & loaded.keys():
                raise _damaged(file, f"{min(twice)} is in another shard too")
            tensors |= loaded
        return cls(folder=folder, dtype=dtype, quantization=quantization, _tensors=tensors)

    def __contains__(self, name: str) -> bool:
        """Whether the tensor is there and not yet taken."""
        return name in self._tensors

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that are there and not yet taken, sorted."""
        return tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor as stored; None where it is not there."""
        return self._tensors[name].shape if name in self._tensors else None

    def replace(self, old: Sequence[str], new: Sequence[str], how: Callable[..., Sequence[mx.array]]) -> None:
        """Put tensors made of stored ones in their place: a step from the hub's layout to the one that a family reads.

        Args:
            old: Names that go, each of a tensor not yet taken.
            new: Names that come.
            how: From the old arrays, as stored and in the order of `old`, to the new ones in the order of `new`. Nothing is
                cast yet: what it computes is rounded to the dtype of the file, as when a snapshot is converted.

        Raises:
            CheckpointError: An old one is missing, or a new one is there already.
        """
        missing = [name for name in old if name not in self._tensors]
        twice = [name for name in new if name in self._tensors and name not in old]
        if missing or twice:
            raise CheckpointError(
                "the checkpoint mixes two layouts",
                missing=", ".join(missing[:3]) or "nothing",
                there_already=", ".join(twice[:3]) or "nothing",
                next_step="take a snapshot as the hub has it, or one that is converted throughout",
            )
        made = how(*(self._tensors.pop(name) for name in old))
        self._tensors |= dict(zip(new, made, strict=True))

    def take(self, name: str, shape: tuple[int, ...], *, stored: mx.Dtype | None = None) -> mx.array:
        """Hand out a tensor for good.

        Args:
            name: As the checkpoint calls it.
            shape: The shape that the config demands.
            stored: The integer dtype that the tensor must have and keep, for packed words and scales; a floating tensor, cast
                to `dtype`, where absent.

        Raises:
            CheckpointError: It is missing, was taken before, or has another shape or kind.
        """
        if name in self._taken:
            raise CheckpointError(f"tensor {name} is used twice", next_step="report it: the family is at fault")
        if name not in self._tensors:
            raise CheckpointError(
                f"the checkpoint has no tensor {name}",
                folder=self.folder.name,
                near=", ".join(difflib.get_close_matches(name, self._tensors)) or "none",
                next_step="take the weights that belong to this config.json",
            )
        array = self._tensors[name]
        if array.shape != shape:
            raise CheckpointError(
                f"tensor {name} has the wrong shape",
                expected=list(shape),
                found=list(array.shape),
                next_step="take the weights that belong to this config.json",
            )
        if not (mx.issubdtype(array.dtype, mx.floating) if stored is None else array.dtype == stored):
            raise CheckpointError(
                f"tensor {name} has the wrong dtype",
                expected="a floating dtype" if stored is None else str(stored),
                found=str(array.dtype),
                next_step="compare the quantization entry of config.json with the weights",
            )
        del self._tensors[name]
        self._taken.add(name)
        return array.astype(self.dtype) if stored is None else array

    def finish(self, *, dropped: Mapping[str, str]) -> None:
        """Refuse what nobody took.

        Args:
            dropped: Regular expressions over whole names that the family rightly ignores, each with the reason.

        Raises:
            CheckpointError: Tensors are left over that no pattern covers.
        """
        left = sorted(name for name in self._tensors if not any(re.fullmatch(p, name) for p in dropped))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(
                f"the checkpoint has {len(left)} tensor{'s' * (len(left) > 1)} that the config does not account for",
                tensors=", ".join(left[:3]) + more,
                next_step="take the config.json that belongs to these weights",
            )
        self._tensors.clear()


def _shards(folder: Path) -> list[Path]:
    """The weight files: those that the index names, or every safetensors file where there is no index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                "the snapshot has no weights", looked_for=f"{folder.name}/*.safetensors", next_step="fetch it again"
            )
        return files
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise _damaged(index, "it has no weight_map of file names")
    names = sorted(set(weight_map.values()))
    present = {file.name for file in folder.iterdir() if file.is_file()}
    for name in names:
        if PurePosixPath(name).name != name or "\\" in name or name.startswith("."):
            raise _damaged(index, f"{name!r} is not a plain file name")
        if not name.endswith(".safetensors"):
            raise _damaged(index, f"{name!r} is not a safetensors file")
        if name not in present:
            raise CheckpointError(
                f"shard {name} is missing",
                named_by=index.name,
                folder=folder.name,
                next_step="fetch the snapshot again",
            )
    return [folder / name for name in names]


def _check_header(file: Path) -> None:
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{file.name} cannot be used", folder=file.parent.name, reason=reason, next_step="fetch the snapshot again"
    )
