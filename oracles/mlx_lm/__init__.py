"""The oracle mlx-lm: everything here runs inside its own environment, with numpy, safetensors and mlx-lm alone."""
