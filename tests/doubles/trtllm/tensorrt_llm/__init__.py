"""A double of TensorRT-LLM: the surfaces that patcher uses, on a CPU. See ../README.md."""

__version__ = "1.3.0"
