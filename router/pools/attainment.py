"""Counts the answers that met their target, from a histogram.

    within(bound) = cumulative count at the last edge <= bound, and a linear part of the bucket that `bound` lies in

What lies above the last finite edge is not in time, whatever the bound. The figure rises with the counts, so that the
difference between two looks is that of the answers between them.
"""

from collections.abc import Mapping

from router.pools.probes import Attained


def attained(buckets: Mapping[float, float], bound_s: float) -> Attained:
    """Return the answers within `bound_s`; `buckets`: cumulative counts by upper edge in seconds, inf among them."""
    edges = sorted(buckets)
    if not edges:
        return Attained()
    total, edge, count = buckets[edges[-1]], 0.0, 0.0
    for upper in edges:
        if upper > bound_s:
            part = 0.0 if upper == float("inf") else (bound_s - edge) / (upper - edge)
            return Attained(count + part * (buckets[upper] - count), total)
        edge, count = upper, buckets[upper]
    return Attained(count, total)
