"""Calibration: what the model does to errors in its weights, measured over calibration text.

For a matrix, the second moment of its inputs, ``E[x x']``, weighs an output error to second order (Frantar et al. 2022,
GPTQ), and its diagonal does when columns are taken one by one. For a vocabulary table, the cost of a row error in nats:
``1/2 e' J e`` with ``J = H + G``. ``H = E[(1 - sum p^2) h h']`` is the Fisher information of an average row in the
logits role, h the hidden state that it reads and p the model's distribution there; G is the second moment of the loss
gradient at the looked-up row, with targets sampled from the model itself.
"""

from __future__ import annotations

from tieq.calibrate.cache import CalibrationCache, usable_cache
from tieq.calibrate.measure import measure
from tieq.calibrate.run import Calibration, Request, calibrate, request
from tieq.calibrate.statistics import RowUse, Statistics, TableCost, TokenSample, usable_importance

__all__ = [
    "Calibration",
    "CalibrationCache",
    "Request",
    "RowUse",
    "Statistics",
    "TableCost",
    "TokenSample",
    "calibrate",
    "measure",
    "request",
    "usable_cache",
    "usable_importance",
]
