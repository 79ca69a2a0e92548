"""The objectives, and alerts by how fast their budgets burn, each over a long and a short window.

    budget of an objective      the share that may be bad: 1 - kept
    burn rate                   bad share / budget; at 1 the budget of 30 days lasts 30 days
    alert                       the long window has burned that fast, and the short one still does

    severity    burn rate    windows       of 30 days' budget gone
    critical    14.4         1h and 5m     2 %
                6            6h and 30m    5 %
    warning     3            1d and 2h     10 %
                1            3d and 6h     10 %

An alert needs 10 bad events in its longest window, so that a single failure of an idle fleet is none.

Source: The Site Reliability Workbook, chapter 5, "Multiwindow, Multi-Burn-Rate Alerts".
"""

from collections.abc import Callable
from typing import NamedTuple

from dashboards.promql import increase, rate
from dashboards.rules import Alert, Group, Record, Severity

ANSWERED_OBJECTIVE, FIRST_TOKEN_OBJECTIVE, TOKEN_INTERVAL_OBJECTIVE = 0.999, 0.95, 0.95
"""The shares of requests that do not fail, of first tokens in time, of answers with tokens that follow in time."""
FIRST_TOKEN_S, TOKEN_INTERVAL_S = 1.6, 0.1
"""In time; bounds of the histograms, so that the shares are exact."""
FAILED = 'outcome="failed"'
_BAD_EVENTS_MIN = 10

Count = Callable[..., str]
"""`rate` or `increase`."""


def _failed(count: Count, over: str) -> str:
    return count("requests_total", FAILED, over=over)


def _late_first_tokens(count: Count, over: str) -> str:
    return _above("time_to_first_token_seconds", FIRST_TOKEN_S, count, over)


def _slow_answers(count: Count, over: str) -> str:
    return _above("inter_token_latency_seconds", TOKEN_INTERVAL_S, count, over)


def _above(histogram: str, bound: float, count: Count, over: str) -> str:
    within = count(f"{histogram}_bucket", f'le="{bound}"', over=over)
    return f"{count(f'{histogram}_count', over=over)} - {within}"


class Objective(NamedTuple):
    """Events of which a share, 1 - `kept`, may be bad."""

    record: str
    alert: str
    kept: float
    total: str
    """The counter of all events."""
    bad: Callable[[Count, str], str]
    means: str
    """What it means that an event is bad."""

    def recorded(self, over: str) -> str:
        """Return the name under which the share of bad events is stored."""
        return f"kvrouter:{self.record}:ratio_rate{over}"

    def share(self, over: str) -> str:
        """Return the share of bad events; no answer where there are no events."""
        return f"({self.bad(rate, over)}) / ({rate(self.total, over=over)} > 0)"


ANSWERS = Objective(
    "request_failures", "KvRouterFailureBudgetBurns", ANSWERED_OBJECTIVE, "requests_total", _failed, "requests fail"
)
FIRST_TOKENS = Objective(
    "late_first_tokens",
    "KvRouterFirstTokenBudgetBurns",
    FIRST_TOKEN_OBJECTIVE,
    "time_to_first_token_seconds_count",
    _late_first_tokens,
    f"first tokens come later than {FIRST_TOKEN_S} s",
)
TOKEN_INTERVALS = Objective(
    "slow_answers",
    "KvRouterTokenIntervalBudgetBurns",
    TOKEN_INTERVAL_OBJECTIVE,
    "inter_token_latency_seconds_count",
    _slow_answers,
    f"answers have more than {TOKEN_INTERVAL_S} s between tokens",
)
OBJECTIVES = (ANSWERS, FIRST_TOKENS, TOKEN_INTERVALS)


class Burn(NamedTuple):
    """A burn rate, and the windows that must both have it."""

    rate: float
    long: str
    short: str


_BURNS: dict[Severity, tuple[Burn, Burn]] = {
    "critical": (Burn(14.4, "1h", "5m"), Burn(6, "6h", "30m")),
    "warning": (Burn(3, "1d", "2h"), Burn(1, "3d", "6h")),
}
_LASTING: dict[Severity, str] = {"critical": "2m", "warning": "15m"}
_SHORT_WINDOWS, _LONG_WINDOWS = ("5m", "30m", "1h", "2h", "6h"), ("1d", "3d")


def _burning(objective: Objective, severity: Severity) -> str:
    clauses = [
        f"({objective.recorded(burn.long)} > {burn.rate * (1 - objective.kept):.6g}"
        f" and {objective.recorded(burn.short)} > {burn.rate * (1 - objective.kept):.6g})"
        for burn in _BURNS[severity]
    ]
    longest = _BURNS[severity][-1].long
    return f"({' or '.join(clauses)}) and ({objective.bad(increase, longest)}) >= {_BAD_EVENTS_MIN}"


def _alert(objective: Objective, severity: Severity) -> Alert:
    windows = " or ".join(f"{burn.rate:g} times over {burn.long}" for burn in _BURNS[severity])
    return Alert(
        name=objective.alert,
        expr=_burning(objective, severity),
        lasting=_LASTING[severity],
        severity=severity,
        summary=f"Too many {objective.means}",
        description=f"{{{{ $value | humanizePercentage }}}} of what is counted: {objective.means}. Allowed are "
        f"{1 - objective.kept:.1%}. That budget burns {windows} faster than allowed, and still does.",
    )


def _records(windows: tuple[str, ...]) -> tuple[Record, ...]:
    return tuple(Record(each.recorded(over), each.share(over)) for each in OBJECTIVES for over in windows)


OBJECTIVE_GROUPS = (
    Group("kv-router-objectives", _records(_SHORT_WINDOWS)),
    Group("kv-router-objectives-of-days", _records(_LONG_WINDOWS), interval="2m"),
    Group("kv-router-budgets", tuple(_alert(objective, severity) for objective in OBJECTIVES for severity in _BURNS)),
)
