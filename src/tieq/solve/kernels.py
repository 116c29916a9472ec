"""Compiled inner loops of the error-feedback solver. Imported where it is called: numba takes a second to load.

Rows are independent, and are taken ``TILE`` at a time: every array here is ``[..., TILE]`` float32 with the rows
innermost, so that each inner loop is a plain vector operation and each number of the factor or the cost is read once
a tile. No arithmetic mixes rows and none is reordered: a row's result does not depend on its neighbours.
"""

from __future__ import annotations

import math

import numba
import numpy as np

# The vectorizer guards every inner loop against overlapping arrays; 64 rows outweigh the guard (16 are 3 times slower).
TILE = 64
compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


@compiled
def half(value):
    """Round to fp16 (nearest, ties to even, saturating) and return it as a wider float; IEEE 754 binary16."""
    mantissa, exponent = math.frexp(value)
    if exponent < -13:  # subnormal: multiples of 2 ** -24
        return np.rint(value * 16777216.0) / 16777216.0
    rounded = math.ldexp(np.rint(mantissa * 2048.0), exponent - 11)
    return min(max(rounded, -65504.0), 65504.0)


@compiled
def solve_tile(
    weights, factor, cost, levels, width, shapes, affine, refits, positive, sweeps, start, step, scale, minimum
):
    """Solve a tile of rows ``weights`` ``[columns, TILE]``: first pass with feedback, then coordinate descent.

    ``levels`` are the grid in ascending order, whole numbers; ``width`` the columns of a block. ``shapes``
    ``[candidates, 2]`` are the scales to try in each block: where its extreme weight lands (first number), or, if
    ``affine``, the shares of its range cut off below and above. Without any, ``scale`` and ``minimum``
    ``[blocks, TILE]`` are given, and so may be ``start`` ``[columns, TILE]``: levels for the descent to start from
    where they cost a row less than the first pass. ``refits`` lets the descent fit fp16 scales anew; ``positive``
    allows none below zero.

    Fills ``step`` ``[columns, TILE]`` (levels), and ``scale`` and ``minimum`` (fp16 values, where not given).
    """
    error, slope = np.empty_like(weights), np.empty_like(weights)
    first_pass(weights.copy(), factor, levels, width, shapes, affine, positive, step, scale, minimum)
    measure(weights, step, scale, minimum, width, cost, error, slope)
    if start.shape[0]:
        take_cheaper(weights, start, scale, minimum, width, cost, step, error, slope)
    for _ in range(sweeps):
        for first in range(0, weights.shape[0], width):
            descend(error, slope, cost, levels, first, width, affine, refits, positive, step, scale, minimum)


@compiled
def zeros():
    """A number a row."""
    return np.zeros(TILE, np.float32)


@compiled
def to_levels(values, levels, steps):
    """Nearest level to each value ``[TILE]``; rounding, where the levels are all whole numbers of a range."""
    if levels[-1] - levels[0] == levels.size - 1:
        for row in range(TILE):
            steps[row] = min(max(np.rint(values[row]), levels[0]), levels[-1])
        return
    steps[:] = levels[0]
    for number in range(1, levels.size):
        middle, rise = (levels[number - 1] + levels[number]) / np.float32(2), levels[number] - levels[number - 1]
        for row in range(TILE):
            steps[row] += rise if values[row] > middle else np.float32(0)


@compiled
def first_pass(current, factor, levels, width, shapes, affine, positive, step, scale, minimum):
    """Block by block: choose the scale, round with feedback, pass the error on to later columns."""
    columns = current.shape[0]
    errors = np.empty((width, TILE), np.float32)
    total = zeros()
    for start in range(0, columns, width):
        block, number = current[start : start + width], start // width
        inner = np.ascontiguousarray(factor[start : start + width, start : start + width])
        if shapes.shape[0]:
            search(block, inner, levels, shapes, affine, positive, scale[number], minimum[number])
        simulate(block, inner, levels, scale[number], minimum[number], step[start : start + width], errors, total)
        for later in range(start + width, columns):
            target = current[later]
            for column in range(width):
                share, source = factor[start + column, later], errors[column]
                for row in range(TILE):
                    target[row] -= share * source[row]


@compiled
def simulate(block, inner, levels, scale, minimum, steps, errors, total):
    """Round one block with error feedback inside it; its cost goes to ``total`` ``[TILE]``.

    ``block`` ``[width, TILE]`` is overwritten; ``inner`` is the factor's part; ``errors`` are over its diagonal.
    """
    reciprocal, wished = zeros(), zeros()
    for row in range(TILE):
        reciprocal[row] = np.float32(1) / scale[row] if scale[row] != 0 else np.float32(0)
    total[:] = 0
    for column in range(block.shape[0]):
        values, step, error, pivot = block[column], steps[column], errors[column], inner[column, column]
        for row in range(TILE):
            wished[row] = (values[row] - minimum[row]) * reciprocal[row]
        to_levels(wished, levels, step)
        for row in range(TILE):
            error[row] = (values[row] - (step[row] * scale[row] + minimum[row])) / pivot
            total[row] += error[row] * error[row]
        for later in range(column + 1, block.shape[0]):
            share, target = inner[column, later], block[later]
            for row in range(TILE):
                target[row] -= share * error[row]


@compiled
def search(block, inner, levels, shapes, affine, positive, best_scale, best_minimum):
    """The candidate of least cost in each row, with its own feedback inside the block."""
    trial, steps, errors = np.empty_like(block), np.empty_like(block), np.empty_like(block)
    total, scale, minimum = zeros(), zeros(), zeros()
    lowest, highest, extreme, best = zeros() + np.float32(np.inf), zeros() - np.float32(np.inf), zeros(), zeros()
    best[:] = np.inf
    for column in range(block.shape[0]):
        for row in range(TILE):
            value = block[column, row]
            lowest[row], highest[row] = min(lowest[row], value), max(highest[row], value)
            extreme[row] = value if abs(value) > abs(extreme[row]) else extreme[row]
    for candidate in range(shapes.shape[0]):
        below, above = shapes[candidate]
        for row in range(TILE):
            if affine:
                spread = highest[row] - lowest[row]
                bottom, top = lowest[row] + below * spread, highest[row] - above * spread
                scale[row] = half((top - bottom) / (levels[-1] - levels[0]))
                minimum[row] = half(bottom)
            else:
                scale[row] = half(abs(extreme[row] / below) if positive else extreme[row] / below)
        trial[:] = block
        simulate(trial, inner, levels, scale, minimum, steps, errors, total)
        for row in range(TILE):
            if total[row] < best[row]:
                best[row], best_scale[row], best_minimum[row] = total[row], scale[row], minimum[row]


@compiled
def measure(weights, step, scale, minimum, width, cost, error, slope):
    """Errors of the weights, and ``slope = cost @ error``."""
    for column in range(weights.shape[0]):
        number = column // width
        for row in range(TILE):
            error[column, row] = weights[column, row] - (step[column, row] * scale[number, row] + minimum[number, row])
    slope[:] = 0
    for other in range(weights.shape[0]):
        target = slope[other]
        for column in range(weights.shape[0]):
            share, source = cost[column, other], error[column]
            for row in range(TILE):
                target[row] += share * source[row]


@compiled
def take_cheaper(weights, start, scale, minimum, width, cost, step, error, slope):
    """Where a row costs less with the levels ``start``, take those, their error and their slope."""
    other_error, other_slope, gain = np.empty_like(error), np.empty_like(slope), zeros()
    measure(weights, start, scale, minimum, width, cost, other_error, other_slope)
    for column in range(weights.shape[0]):
        for row in range(TILE):
            ours = error[column, row] * slope[column, row]
            gain[row] += ours - other_error[column, row] * other_slope[column, row]
    for column in range(weights.shape[0]):
        for row in range(TILE):
            if gain[row] > 0:
                step[column, row], error[column, row] = start[column, row], other_error[column, row]
                slope[column, row] = other_slope[column, row]


@compiled
def descend(error, slope, cost, levels, start, width, affine, refits, positive, step, scale, minimum):
    """One block of one sweep: least-squares scale, then each code; the cost never rises."""
    block, number = slice(start, start + width), start // width
    local, before, steps = slope[block].copy(), error[block].copy(), step[block]
    inner = np.ascontiguousarray(cost[block, block])
    if refits and affine:
        refit_affine(error[block], local, inner, steps, scale[number], minimum[number])
    elif refits:
        refit(error[block], local, inner, steps, positive, scale[number])
    improve(error[block], local, inner, levels, steps, scale[number])
    moved = np.empty(width, np.int64)
    count = 0
    for column in range(width):
        change, any_row = before[column], False
        for row in range(TILE):
            change[row] = error[start + column, row] - change[row]
            any_row |= change[row] != 0
        moved[count] = column
        count += any_row
    for other in range(error.shape[0]):
        target = slope[other]
        for column in moved[:count]:
            share, change = cost[start + column, other], before[column]
            for row in range(TILE):
                target[row] += change[row] * share


@compiled
def weigh(inner, steps, weighted):
    """``weighted = inner @ steps``."""
    weighted[:] = 0
    for column in range(steps.shape[0]):
        for other in range(steps.shape[0]):
            share, source, target = inner[column, other], steps[column], weighted[other]
            for row in range(TILE):
                target[row] += source[row] * share


@compiled
def refit(error, local, inner, steps, positive, scale):
    """The block's least-squares scale where it helps after rounding to fp16, else the old one."""
    weighted, power, gain = np.empty_like(local), zeros(), zeros()
    weigh(inner, steps, weighted)
    for column in range(steps.shape[0]):
        for row in range(TILE):
            power[row] += weighted[column, row] * steps[column, row]
            gain[row] += steps[column, row] * local[column, row]
    for row in range(TILE):
        wished = np.float32(half(scale[row] + gain[row] / power[row])) if power[row] > 0 else scale[row]
        change = scale[row] - wished
        kept = change * (change * power[row] + 2.0 * gain[row]) >= 0 or (positive and wished < 0)
        gain[row] = np.float32(0) if kept else change
        scale[row] = scale[row] if kept else wished
    for column in range(steps.shape[0]):
        for row in range(TILE):
            error[column, row] += gain[row] * steps[column, row]
            local[column, row] += gain[row] * weighted[column, row]


@compiled
def refit_affine(error, local, inner, steps, scale, minimum):
    """The block's least-squares scale and minimum together, else the minimum alone, where fp16 keeps the gain."""
    weighted, ones = np.empty_like(local), inner.sum(axis=1)
    weigh(inner, steps, weighted)
    power, cross, gain, gain_of_one = zeros(), zeros(), zeros(), zeros()
    for column in range(steps.shape[0]):
        for row in range(TILE):
            power[row] += weighted[column, row] * steps[column, row]
            cross[row] += weighted[column, row]
            gain[row] += steps[column, row] * local[column, row]
            gain_of_one[row] += local[column, row]
    scale_change, minimum_change = power, cross  # each number is replaced after its last use
    for row in range(TILE):
        pair = fit_pair(power[row], cross[row], ones.sum(), gain[row], gain_of_one[row], scale[row], minimum[row])
        scale_change[row], minimum_change[row] = scale[row] - pair[0], minimum[row] - pair[1]
        scale[row], minimum[row] = pair
    for column in range(steps.shape[0]):
        for row in range(TILE):
            error[column, row] += scale_change[row] * steps[column, row] + minimum_change[row]
            local[column, row] += scale_change[row] * weighted[column, row] + minimum_change[row] * ones[column]


@compiled
def fit_pair(power, cross, ones, gain, gain_of_one, scale, minimum):
    """Scale and minimum of least ``power s^2 + 2 cross s m + ones m^2 - 2 (gain s + gain_of_one m)`` in their changes.

    Tried in turn: both, the minimum refitted to the rounded scale; the minimum alone. The first that lowers the cost
    counts, else the old pair.
    """
    determinant = np.float64(power) * ones - np.float64(cross) * cross
    wished = scale
    if determinant > 1e-6 * power * ones:
        wished = np.float32(half(scale + np.float32((ones * gain - cross * gain_of_one) / determinant)))
    for new_scale in (wished, scale):
        by = np.float64(new_scale) - scale
        new_minimum = np.float32(half(minimum + np.float32((gain_of_one - cross * by) / ones)))
        shift = np.float64(new_minimum) - minimum
        rise = by * (power * by + 2 * (cross * shift - gain)) + shift * (ones * shift - 2 * gain_of_one)
        if rise < 0:
            return new_scale, new_minimum
    return scale, minimum


@compiled
def improve(error, local, inner, levels, steps, scale):
    """Move each code of the block to its best value given all others."""
    wished, change = zeros(), zeros()
    for column in range(steps.shape[0]):
        curvature, step = inner[column, column], steps[column]
        for row in range(TILE):
            moved = step[row] + local[column, row] / (scale[row] * curvature)
            wished[row] = moved if scale[row] != 0 else step[row]
        to_levels(wished, levels, change)
        for row in range(TILE):
            wished[row] = change[row]
            change[row] = (step[row] - wished[row]) * scale[row]
            step[row] = wished[row]
            error[column, row] += change[row]
        for other in range(steps.shape[0]):
            share, target = inner[column, other], local[other]
            for row in range(TILE):
                target[row] += change[row] * share
