"""Double: where the proxy and older workers import the mapping from."""

from .modeling_utils import MODEL_CLASS_MAPPING

__all__ = ["MODEL_CLASS_MAPPING"]
