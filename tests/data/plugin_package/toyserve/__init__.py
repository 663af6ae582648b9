"""A toy engine: one decoder in plain PyTorch, served greedily on a CPU."""
