"""tieq: quantize a shared embedding table once and carry it through ONNX and GGUF, with proof.

The Python API is :mod:`tieq.api`; the packages below hold the stages.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
