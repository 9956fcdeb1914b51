"""The oracle llama.cpp, for its samplers alone: everything here runs inside its own environment; no model is loaded."""
