"""mistral: a llama under another name.

Graph, defaults and tensors are llama's, so its parts are this family's, whole. As in the oracle a `sliding_window` without
`layer_types` bounds nothing: every layer sees every position, and what a snapshot trained with a window would compute
beyond it is not computed here. Layers that `layer_types` names `sliding_attention` do have the window.

Source: spec/models.md section 8; Jiang et al. 2023.
"""

from engine.families.llama import DROPPED, IRRELEVANT, TIED, Block, Config, Model

__all__ = ["DROPPED", "IRRELEVANT", "TIED", "Block", "Config", "Model"]
