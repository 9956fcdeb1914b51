"""llama.cpp, prebuilt, as a peer of the bench: measured beside the engine, believed for nothing."""
