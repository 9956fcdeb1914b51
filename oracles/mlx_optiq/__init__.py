"""The oracle mlx-optiq: everything here runs in its own environment, with numpy, safetensors, mlx-lm and mlx-optiq alone."""
