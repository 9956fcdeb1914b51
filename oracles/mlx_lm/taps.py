"""Outputs of modules at the last position, watched by wrapping `__call__` of their classes.

Guarantees: the watched values are slices of what the modules returned, taken without evaluating anything, so the run's own
bits stay as they are; classes are restored when the block ends. Only the outputs of one forward are kept at a time: a
forward of the whole model forgets those of the one before, so chunks of a prefill leave nothing behind.

Of a tuple or list the first element is kept, whatever its dtype: of a router the ids that it chose. A module that returns None
put out nothing, and nothing is kept.

Python looks `__call__` up on the type, never on the instance: hence classes are wrapped and instances told apart by `id`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, Final

Call = Callable[..., Any]

NO_POSITIONS: Final = frozenset({"SwitchLinear", "QuantizedSwitchLinear"})  # tokens come sorted by expert
HEADS_FIRST: Final = frozenset({"Indexer"})  # puts out [B, 1, L, k]: one choice of positions for all heads


class UnwatchableModuleError(Exception):
    """A module's output has no single last position, or a glob watches nothing."""


class Taps:
    """What the watched modules put out during the current forward of the model.

    Args:
        model: An `mlx.nn.Module`; its type's `__call__` starts a forward.
        globs: Shell globs over module paths. Modules without checkpoint tensors of their own or below them (rotary
            embeddings, activation functions), the model itself, and single experts, whose tokens are sorted by expert, are
            never watched; the layer of experts as a whole is.
    """

    def __init__(self, model: Any, globs: Sequence[str]) -> None:  # noqa: ANN401 - mlx.nn has no types
        self._model = model
        self._paths: dict[int, str] = {}
        self._modules: list[Any] = []
        for path, module in model.named_modules():
            unwatchable = type(module).__name__ in NO_POSITIONS or not path or not _has_leaf(module.parameters())
            if not unwatchable and any(fnmatchcase(path, glob) for glob in globs):
                self._paths.setdefault(id(module), path)  # a module shared by two paths goes by the first
                self._modules.append(module)
        for glob in globs:
            if not any(fnmatchcase(path, glob) for path in self._paths.values()):
                raise UnwatchableModuleError(f"record {glob!r} matches no module path that has checkpoint tensors")
        self._active: set[int] = set()
        self._outputs: dict[str, Any] = {}

    def take(self) -> dict[str, Any]:
        """Module path to its output [B, ...] at the last position, in execution order; forgets them."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the block ends."""
        classes = {type(module) for module in self._modules} | {type(self._model)}
        own = {cls: cls.__dict__.get("__call__") for cls in classes}
        originals = {cls: cls.__call__ for cls in classes}  # looked up before any class is changed
        try:
            for cls in classes:
                cls.__call__ = self._wrap(originals[cls])
            yield
        finally:
            for cls, call in own.items():
                if call is None:
                    del cls.__call__  # it was inherited
                else:
                    cls.__call__ = call

    def _wrap(self, original: Call) -> Call:
        @wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
            key = id(module)
            if key in self._active:  # a subclass calls its base: one output, not two
                return original(module, *args, **kwargs)
            if module is self._model:
                self._outputs = {}
            self._active.add(key)
            try:
                out = original(module, *args, **kwargs)
            finally:
                self._active.discard(key)
            path = self._paths.get(key)
            if path is not None:
                self._keep(path, module, out[0] if isinstance(out, tuple | list) else out)
            return out

        return call

    def _keep(self, path: str, module: Any, out: Any) -> None:  # noqa: ANN401 - an mx.nn.Module, an mx.array or None
        if out is None:
            return
        if path in self._outputs:
            raise UnwatchableModuleError(f"module {path} runs more than once in a step")
        if out.ndim < 3 or out.shape[0] != 1:
            raise UnwatchableModuleError(f"output of module {path} has shape {list(out.shape)}, not [1, L, ...]")
        self._outputs[path] = out[:, :, -1] if type(module).__name__ in HEADS_FIRST else out[:, -1]


def _has_leaf(tree: Any) -> bool:  # noqa: ANN401 - nested dicts and lists of arrays
    """Whether a tree of parameters holds any array; empty containers of parameterless modules do not count."""
    if isinstance(tree, dict):
        return any(_has_leaf(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return any(_has_leaf(value) for value in tree)
    return True
