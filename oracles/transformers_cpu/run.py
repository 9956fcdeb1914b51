"""The runner of transformers: `python -m oracles.transformers_cpu.run REQUEST.json` in its environment, from the repository.

A second opinion, not an oracle of bits: torch's kernels sum in another order, so its rows agree with mlx-lm's within rounding
or not at all. The prompt is one forward whatever the feed, then a token a forward on transformers' own cache; packed keys and
values are refused. Snapshots are as on the hub. Guarantees: attention is transformers' eager form; weights are cast to the
case's dtype before anything runs; a tensor of the snapshot that the model does not take, or lacks, is an error.
"""

import importlib
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np

from oracles.runner_loop import RunCase, serve
from parity.case import Case
from parity.provenance import Provenance
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, activation_name, logits_name

PACKAGES: Final = ("transformers", "torch", "tokenizers", "safetensors")


def start() -> tuple[RunCase, Provenance]:
    """Import torch and transformers, which takes seconds and may print."""
    torch().set_grad_enabled(False)
    torch().set_num_threads(1)  # sums in one order, and no threads that spin on a busy machine
    return Models().run, Provenance.capture(PACKAGES, device="cpu")


def torch() -> Any:  # noqa: ANN401 - it stands in this environment alone
    """The module torch."""
    return importlib.import_module("torch")


class Models:
    """The model loaded last: tasks arrive grouped by snapshot and dtype."""

    def __init__(self) -> None:
        self._key: tuple[Path, str] | None = None
        self._model: Any = None

    def run(self, case: Case, path: Path) -> Trace:
        """Run a case.

        Raises:
            NotImplementedError: It asks for packed keys and values, a ring, a batch or a sampler.
        """
        if case.kv.name != "fp" or case.sampling is not None or case.batch is not None or case.sampler != "greedy":
            raise NotImplementedError("greedy and forced runs of one sequence, keys and values as computed")
        model = self._get(path, case.dtype)
        seen: dict[str, Any] = {}
        hooks = watch(model, case, seen)
        try:
            return _captured(case, model, seen)
        finally:
            for hook in hooks:
                hook.remove()

    def _get(self, path: Path, dtype: str) -> Any:  # noqa: ANN401 - torch's modules
        transformers = importlib.import_module("transformers")
        if self._key != (path, dtype):
            self._model = None
            kinds = {"f32": torch().float32, "bf16": torch().bfloat16, "f16": torch().float16}
            config = transformers.AutoConfig.from_pretrained(path)
            config.pad_token_id = (
                None  # padding is the caller's business, and its default may lie outside the embedding
            )
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=kinds[dtype], attn_implementation="eager", output_loading_info=True
            )
            check_loading(info)
            self._key, self._model = (path, dtype), model.eval()
        return self._model


def check_loading(info: Mapping[str, Any]) -> None:
    """Refuse a model that is not the snapshot's.

    Raises:
        ValueError: Tensors are missing, left over or misshapen.
    """
    wrong = {
        kind: sorted(map(str, info.get(kind) or ())) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if any(wrong.values()):
        told = "; ".join(f"{kind} {', '.join(names[:3])}" for kind, names in wrong.items() if names)
        raise ValueError(f"the snapshot is not in transformers' layout: {told}")


def watch(model: Any, case: Case, seen: dict[str, Any]) -> list[Any]:  # noqa: ANN401 - torch's modules
    """Keep outputs of the modules that the case records; gives the hooks."""

    def keep(path: str) -> Any:  # noqa: ANN401 - a hook
        def hook(_module: Any, _inputs: Any, output: Any) -> None:  # noqa: ANN401 - whatever it puts out
            seen[path] = output[0] if isinstance(output, tuple) else output

        return hook

    return [
        module.register_forward_hook(keep(path))
        for path, module in model.named_modules()
        if path and next(module.parameters(), None) is not None and any(fnmatchcase(path, glob) for glob in case.record)
    ]


def _captured(case: Case, model: Any, seen: dict[str, Any]) -> Trace:  # noqa: ANN401 - torch's modules
    tensors: dict[str, Tensor] = {}
    ids: list[int] = []
    cache, fed = None, list(case.prompt_ids)
    for step in range(case.num_steps):
        seen.clear()
        out = model(input_ids=torch().tensor([fed]), past_key_values=cache, use_cache=True)
        cache, row = out.past_key_values, out.logits[:, -1]
        for path, value in seen.items():
            if hasattr(value, "ndim") and value.ndim >= 3:  # [B, L, ...]; single experts see sorted tokens
                tensors[activation_name(step, path)] = to_tensor(value[:, -1])
        tensors[logits_name(step)] = to_tensor(row)
        token = int(row.argmax()) if case.forced_ids is None else case.forced_ids[step]
        ids.append(token)
        fed = [token]
    tensors[TOKEN_IDS] = Tensor.of(np.array(ids, dtype="<i4"))
    return Trace(tensors=tensors)


def to_tensor(value: Any) -> Tensor:  # noqa: ANN401 - a torch tensor
    """Stored bits; bfloat16 travels as words, since numpy has no such dtype."""
    if value.dtype == torch().bfloat16:
        return Tensor.of(value.contiguous().view(torch().uint16).numpy(), dtype="BF16")
    return Tensor.of(value.contiguous().numpy())


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], start))
