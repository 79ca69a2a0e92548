"""The shapes of PromQL that the dashboards use, each written once.

A rate of a counter that nothing happened to is 0; a quantile, a mean or a share of nothing is no number, and is not
drawn. Variables stand in the selectors: `MODEL`, `WORKER`.
"""

METRICS = "kvrouter_"
INTERVAL = "$__rate_interval"
MODEL = 'model=~"$model"'
WORKER = 'worker=~"$worker"'


def selected(metric: str, *matchers: str) -> str:
    """Return the series of a metric that match."""
    return METRICS + metric + (f"{{{','.join(matchers)}}}" if matchers else "")


def rate(metric: str, *matchers: str, by: str = "", over: str = INTERVAL) -> str:
    """Return the sum of a counter's rates a second, apart by the labels of `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({selected(metric, *matchers)}[{over}]))"


def increase(metric: str, *matchers: str, by: str = "", over: str = INTERVAL) -> str:
    """Return by how much a counter grew, summed, apart by the labels of `by`."""
    return f"sum{f' by ({by})' if by else ''} (increase({selected(metric, *matchers)}[{over}]))"


def quantile(share: float, metric: str, *matchers: str, by: str = "") -> str:
    """Return the quantile of a histogram, apart by the labels of `by`."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', *matchers, by=labels)})"


def mean(metric: str, *matchers: str, by: str = "") -> str:
    """Return the mean of what a histogram or a summary observed."""
    return share(rate(f"{metric}_sum", *matchers, by=by), rate(f"{metric}_count", *matchers, by=by))


def share(part: str, total: str) -> str:
    """Return a quotient."""
    return f"{part} / {total}"


def burn(bad: str, total: str, allowed: float) -> str:
    """Return how many times faster than allowed the error budget burns; without requests it does not burn."""
    return f"(({bad}) / ({total} > 0) / {allowed:g}) or vector(0)"
