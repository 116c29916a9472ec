"""Compiled inner loops of the error-feedback solver. Imported where it is called: numba takes a second to load."""

from __future__ import annotations

import math

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def half(value):
    """Round to fp16 (nearest, ties to even, saturating) and return it as a wider float; IEEE 754 binary16."""
    mantissa, exponent = math.frexp(value)
    if exponent < -13:  # subnormal: multiples of 2 ** -24
        return np.rint(value * 16777216.0) / 16777216.0
    rounded = math.ldexp(np.rint(mantissa * 2048.0), exponent - 11)
    return min(max(rounded, -65504.0), 65504.0)


@numba.njit(cache=True, nogil=True)
def simulate(block, scale, factor, start, low, high, steps, errors):
    """Round one block of one row with error feedback inside it; return the cost.

    ``block`` ``[width]`` is overwritten; ``steps`` and ``errors`` ``[width]`` receive codes and scaled errors.
    """
    width = block.shape[0]
    reciprocal = np.float32(1.0 / scale) if scale != 0 else np.float32(0)
    cost = np.float32(0)
    for column in range(width):
        step = min(max(np.rint(block[column] * reciprocal), low), high)
        error = (block[column] - step * scale) / factor[start + column, start + column]
        steps[column] = step
        errors[column] = error
        cost += error * error
        for later in range(column + 1, width):
            block[later] -= factor[start + column, start + later] * error
    return cost


@numba.njit(cache=True, nogil=True)
def solve_rows(rows, factor, cost, targets, width, low, high, sweeps, steps, scales):
    """Solve rows ``[count, columns]``: first pass with feedback, then coordinate descent.

    ``targets`` are where the extreme weight of a block may land, in centred codes. Fills ``steps``
    ``[count, columns]`` (centred codes) and ``scales`` ``[count, blocks]`` (exact fp16 values in float32).
    """
    columns = rows.shape[1]
    current = np.empty(columns, np.float32)
    error = np.empty(columns, np.float32)
    slope = np.empty(columns, np.float32)
    for row in range(rows.shape[0]):
        current[:] = rows[row]
        for start in range(0, columns, width):
            scales[row, start // width] = first_pass(
                current, factor, targets, start, width, low, high, steps[row, start : start + width]
            )
        for column in range(columns):
            error[column] = rows[row, column] - steps[row, column] * scales[row, column // width]
        multiply(error, cost, slope)
        for _ in range(sweeps):
            for start in range(0, columns, width):
                descend(error, slope, cost, start, width, low, high, steps[row], scales[row])


@numba.njit(cache=True, nogil=True)
def first_pass(current, factor, targets, start, width, low, high, steps):
    """Choose the block's scale among the candidates, round it, pass its error on to later columns."""
    columns = current.shape[0]
    block = np.empty(width, np.float32)
    errors = np.empty(width, np.float32)
    extreme = np.float32(0)
    for column in range(start, start + width):
        if abs(current[column]) > abs(extreme):
            extreme = current[column]
    best_scale, best_cost = np.float32(0), np.float32(np.inf)
    for target in targets:
        scale = np.float32(half(extreme / target))
        block[:] = current[start : start + width]
        found = simulate(block, scale, factor, start, low, high, steps, errors)
        if found < best_cost:
            best_scale, best_cost = scale, found
    block[:] = current[start : start + width]
    simulate(block, best_scale, factor, start, low, high, steps, errors)
    for column in range(width):
        for later in range(start + width, columns):
            current[later] -= factor[start + column, later] * errors[column]
    return best_scale


@numba.njit(cache=True, nogil=True)
def multiply(error, cost, slope):
    """``slope = cost @ error`` for a symmetric cost."""
    slope[:] = 0
    for column in range(error.shape[0]):
        for other in range(error.shape[0]):
            slope[other] += error[column] * cost[column, other]


@numba.njit(cache=True, nogil=True)
def descend(error, slope, cost, start, width, low, high, steps, scales):
    """One block of one sweep: least-squares scale, then each code; the cost never rises."""
    number = start // width
    local = slope[start : start + width].copy()
    before = error[start : start + width].copy()
    scales[number] = refit(error, local, cost, start, width, steps, scales[number])
    if scales[number] != 0:
        improve(error, local, cost, start, width, low, high, steps, scales[number])
    for column in range(width):
        change = error[start + column] - before[column]
        if change != 0:
            for other in range(error.shape[0]):
                slope[other] += change * cost[start + column, other]


@numba.njit(cache=True, nogil=True)
def refit(error, local, cost, start, width, steps, scale):
    """The block's least-squares scale where it helps after rounding to fp16, else the old one."""
    weighted = np.zeros(width, np.float32)
    for column in range(width):
        for other in range(width):
            weighted[other] += steps[start + column] * cost[start + column, start + other]
    power = gain = np.float32(0)
    for column in range(width):
        power += weighted[column] * steps[start + column]
        gain += steps[start + column] * local[column]
    if power <= 0:
        return scale
    wished = np.float32(half(scale + gain / power))
    change = scale - wished
    if change * (change * power + 2 * gain) >= 0:
        return scale
    for column in range(width):
        error[start + column] += change * steps[start + column]
        local[column] += change * weighted[column]
    return wished


@numba.njit(cache=True, nogil=True)
def improve(error, local, cost, start, width, low, high, steps, scale):
    """Move each code of the block to its best value given all others."""
    for column in range(width):
        at = start + column
        wished = min(max(np.rint(steps[at] + local[column] / (scale * cost[at, at])), low), high)
        change = (steps[at] - wished) * scale
        if change != 0:
            steps[at] = wished
            error[at] += change
            for other in range(width):
                local[other] += change * cost[at, start + other]
