"""What a table's errors cost by role: measured with the float model, and predicted to second order beside it.

A table is given as float32 values, whatever made them, so that this package knows neither schemes nor solvers.
"""

from __future__ import annotations

from tieq.probe.frequency import Bands, frequency_bands
from tieq.probe.norm import column_moments, norm_effect, top_column_share
from tieq.probe.predict import Prediction, predict, thinned
from tieq.probe.runs import Case, LookedUp, RoleRuns
from tieq.probe.whole import whole_costs

__all__ = [
    "Bands",
    "Case",
    "LookedUp",
    "Prediction",
    "RoleRuns",
    "column_moments",
    "frequency_bands",
    "norm_effect",
    "predict",
    "thinned",
    "top_column_share",
    "whole_costs",
]
