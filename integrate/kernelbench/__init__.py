"""KernelBench problems as ops, and candidates as `ModelNew` files and back."""
