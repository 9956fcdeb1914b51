"""transformers on the CPU: a second opinion on what a family computes, from other authors, in torch."""
