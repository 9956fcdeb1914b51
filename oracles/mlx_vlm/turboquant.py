"""mlx-vlm's turboquant module, loaded alone: no other module of mlx-vlm is imported, and nothing of it is patched.

Guarantees: a model's attention is dispatched as mlx-vlm's own models dispatch it: one query to `decode_attention`, several to
`prefill_attention`, and where that declines (it needs Metal) to mlx's attention over dequantised vectors. mlx-vlm leaves the
last of more than two caches as it is; so does `turbo_caches`.
"""

import importlib.util
import sys
from importlib.metadata import distribution
from types import ModuleType
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

NAME: Final = "turboquant_alone"
FUNCTION: Final = "scaled_dot_product_attention"


def load() -> ModuleType:
    """The module, from the installed distribution's file."""
    if NAME not in sys.modules:
        path = distribution("mlx-vlm").locate_file("mlx_vlm/turboquant.py")
        spec = importlib.util.spec_from_file_location(NAME, str(path))
        if spec is None or spec.loader is None:
            raise ImportError("mlx-vlm has no turboquant module")
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    if "mlx_vlm" in sys.modules:
        raise ImportError("mlx_vlm was imported beside its turboquant module")
    return sys.modules[NAME]


def turbo_caches(model: Any, bits: float) -> list[Any]:  # noqa: ANN401 - an mlx-lm model
    """Empty caches of a model, coded where mlx-vlm codes them.

    Raises:
        ValueError: The model has caches of another kind than keys and values by position.
    """
    caches = make_prompt_cache(model)
    if any(type(cache) is not KVCache for cache in caches):
        raise ValueError(f"caches of kinds {sorted({type(cache).__name__ for cache in caches})}")
    last = len(caches) - 1 if len(caches) > 2 else None
    return [cache if place == last else load().TurboQuantKVCache(bits=bits) for place, cache in enumerate(caches)]


def install() -> None:
    """Dispatch the attention of every module of mlx-lm's models that is loaded by now, each once."""
    for name, module in list(sys.modules.items()):
        function = getattr(module, FUNCTION, None)
        if name.startswith("mlx_lm.models.") and function is not None and not hasattr(function, "coded"):
            setattr(module, FUNCTION, _dispatch(function))


def _dispatch(otherwise: Any) -> Any:  # noqa: ANN401 - mlx-lm's function, and one like it
    coded = load().TurboQuantKVCache

    def attention(  # noqa: PLR0917 - mlx-lm's own arguments
        queries: mx.array,
        keys: Any,  # noqa: ANN401 - arrays, or states of a code
        values: Any,  # noqa: ANN401 - likewise
        cache: Any,  # noqa: ANN401 - any class
        scale: float,
        mask: Any,  # noqa: ANN401 - a word, an array or None
        **more: Any,  # noqa: ANN401 - sinks
    ) -> Any:  # noqa: ANN401 - an array
        if not isinstance(cache, coded):
            return otherwise(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)
        states = {"keys_state": keys, "values_state": values, "scale": scale, "mask": mask}
        if queries.shape[-2] == 1:
            return cache.decode_attention(queries, **states)
        if (out := cache.prefill_attention(queries, **states)) is not None:
            return out
        dense = (array.astype(queries.dtype) for array in cache.dequantize(keys, values))
        return mx.fast.scaled_dot_product_attention(queries, *dense, scale=scale, mask=mask)

    attention.coded = coded  # type: ignore[attr-defined]  # tells that it is dispatched already
    return attention
