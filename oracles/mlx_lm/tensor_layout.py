"""What tensors mlx-lm's model has for a config: names, shapes, and which modules it would pack.

Run inside the oracle's environment as `python -m oracles.mlx_lm.tensor_layout CONFIG.json ...`; writes `CONFIG.tensors.json`
beside each config. Tiny snapshots are drawn from these lists, so that a snapshot is never what our own engine expects but
what the oracle loads. Nothing is run and no weight is drawn here.
"""

import json
import sys
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from parity.atomic_file import write_atomically


def layout(config: dict[str, Any]) -> dict[str, Any]:
    """`tensors`: name to shape in mlx-lm's own layout; `packable`: paths of modules whose weight may be packed."""
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))  # it may write into its argument
    return {
        "tensors": {name: list(array.shape) for name, array in sorted(dict(tree_flatten(model.parameters())).items())},
        "packable": sorted(path for path, module in model.named_modules() if hasattr(module, "to_quantized")),
    }


def main(files: list[str]) -> None:
    """Write a layout beside every config named."""
    for file in map(Path, files):
        described = layout(json.loads(file.read_text(encoding="utf-8")))
        tensors = ",\n".join(f"  {json.dumps(n)}: {s}" for n, s in described["tensors"].items())
        packable = ",\n".join(f"  {json.dumps(path)}" for path in described["packable"])
        text = f'{{\n "tensors": {{\n{tensors}\n }},\n "packable": [\n{packable}\n ]\n}}\n'
        write_atomically(file.with_suffix(".tensors.json"), text.encode())
        print(file.name, len(described["tensors"]), "tensors")  # noqa: T201 - a command


if __name__ == "__main__":
    main(sys.argv[1:])
