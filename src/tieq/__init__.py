"""tieq: quantize a shared embedding table once and carry it through ONNX and GGUF, with proof.

The Python API is what the commands call: :func:`tieq.export`, :func:`tieq.validate`, :func:`tieq.inspect`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tieq.inspection import inspect
    from tieq.pipeline import export
    from tieq.revalidate import validate_path as validate

__version__ = "0.1.0"
__all__ = ["__version__", "export", "inspect", "validate"]

_WHERE = {
    "export": ("tieq.pipeline", "export"),
    "inspect": ("tieq.inspection", "inspect"),
    "validate": ("tieq.revalidate", "validate_path"),
}


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that ``import tieq`` stays instant."""
    if name not in _WHERE:
        raise AttributeError(f"module 'tieq' has no attribute '{name}'")
    import importlib

    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(module), attribute)
