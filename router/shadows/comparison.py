"""What another policy chooses in the place of a live decision, what both choices are worth, and the sums. Pure.

    the shadow reads     the view of the live decision, its request, its seed: the same moment, the same draw
    it cannot read       what the live policy did not read: if it needs that, it takes no decision (`unreadable`)
    it changes           nothing: the next view is that after the live decision. What its own choices would have cached
                         or loaded is not in its figures

Each value is a pair: at the rank of the live choice, and at the rank of the shadow's choice.

    TTFT       the reference engine's time for queue and prompt, times the rank's learnt factor: no
               policy's weights are in it, so that all policies are comparable
    cached     leading blocks that the rank is expected to hold of those that can be reused
    costs      in ms under the live policy's cost, and under the shadow's own; None if a policy computed none there

A gain compares the shadow's choice with the live one; above 0 the shadow's is better:

    ttft_gain_s            predicted TTFT of the live choice minus that of the shadow's
    cached_blocks_gain     cached blocks of the shadow's choice minus those of the live one
    own_cost_gain_ms       cost of the live choice minus that of the shadow's, under the shadow's cost: never below 0
                           without a temperature
    live_cost_gain_ms      the same difference, under the live policy's cost: never above 0 without a temperature

A standard error comes from batch means: requests that follow each other are alike (a busy moment, one session), so
single values would make it too small. A long series has `BATCHES` to `2 * BATCHES` batches of equal length; at
`2 * BATCHES` each two become one.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import stdev
from typing import Annotated, Any, NamedTuple

import msgspec

from kv_protocol.errors import LimitExceeded
from kv_protocol.ids import WorkerRank
from router.decision.eligibility import NoEligibleWorker, WorkerNotNamed
from router.decision.policy import Policy
from router.decision.report import aligned
from router.decision.state import RouterState
from router.decision.verdict import Verdict

Pair = tuple[float, float]
BATCHES = 32
T_95 = 2.04
"""The 97.5 % quantile of Student's t with 31 degrees of freedom; with more batches it would be smaller."""
SKIPS = ("budget", "full", "unreadable", "no_choice", "failed")
"""Why a shadow takes no decision: the budget was spent; too many decisions waited; the live view lacks what the shadow
reads; it found no rank; its mode raised an error."""
SHADOW_NAME = r"^[a-z0-9][a-z0-9._-]{0,31}$"
"""A shadow's name: a label of metrics, and a word on a terminal."""


class Comparison(NamedTuple):
    """A shadow's choice beside the live one. None: the view does not show it."""

    rank: WorkerRank
    agrees: bool
    ttft_s: Pair | None
    cached_blocks: tuple[int, int] | None
    live_cost_ms: Pair | None
    own_cost_ms: Pair | None


def compared(
    state: RouterState, verdict: Verdict, live: Policy, shadow: Policy, *, is_folded: bool = False
) -> Comparison | str:
    """Return the shadow's choice for the request of `verdict`, which the policy `live` decided.

    Return one of `SKIPS` if the decision lacks what the shadow reads, or the shadow finds no rank. `is_folded`: a
    replay has just made the decision in `state`, so that only the index's answer may be missing.
    """
    if not _is_readable(state, verdict, live, shadow, is_folded=is_folded):
        return "unreadable"
    try:
        other = state.decide_instead(verdict, shadow)
    except (NoEligibleWorker, WorkerNotNamed, LimitExceeded):
        return "no_choice"
    places = verdict.place, other.place
    ttft_s = cached_blocks = None
    if verdict.request.isl_tokens and not verdict.is_blank:
        factors = verdict.numbers["prefill"] if verdict.has_rates else state.core.prefill_factors(verdict)
        live_s, shadow_s = (state.core.expected_s(verdict, place)[0] * float(factors[place]) for place in places)
        expected, most = verdict.expected, verdict.request.reusable_blocks
        ttft_s = live_s, shadow_s
        cached_blocks = min(int(expected[places[0]]), most), min(int(expected[places[1]]), most)
    live_cost_ms, own_cost_ms = _costs_ms(verdict, places), _costs_ms(other, places)
    return Comparison(other.winner, places[0] == places[1], ttft_s, cached_blocks, live_cost_ms, own_cost_ms)


def _is_readable(state: RouterState, verdict: Verdict, live: Policy, shadow: Policy, *, is_folded: bool) -> bool:
    """Return whether the live decision read all that the shadow reads and `state` does not have."""
    policy, mode, _ = state.rule(shadow, verdict.request.phase, verdict.request.endpoint)
    live_mode = state.modes[verdict.policy]
    lacks_overlap = mode.reads_overlap and verdict.is_blank
    if is_folded:
        return not lacks_overlap
    lacks_load = mode.reads_load and not (live_mode.reads_load or live_mode.reads_overlap)
    lacks_session = policy.affinity != "off" and live.affinity == "off" and bool(verdict.request.session_id)
    lacks_predictions = mode.reads_overlap and shadow.predict_on_route and not live.predict_on_route
    return not (lacks_overlap or lacks_load or lacks_session or lacks_predictions)


def _costs_ms(verdict: Verdict, places: tuple[int, int]) -> Pair | None:
    indices, (live, shadow) = verdict.rank_indices, places
    if not verdict.is_timed or live not in indices or shadow not in indices:
        return None
    costs = verdict.cost_list()
    return costs[indices.index(live)], costs[indices.index(shadow)]


class SeriesMean(msgspec.Struct, frozen=True):
    """The mean of `count` values, and its standard error; None: too few values."""

    count: int
    mean: float
    standard_error: float | None
    interval_95: tuple[float, float] | None = None
    """The ends of the confidence interval; None: too few values."""

    def __post_init__(self) -> None:
        if self.standard_error is not None:
            half = T_95 * self.standard_error
            msgspec.structs.force_setattr(self, "interval_95", (self.mean - half, self.mean + half))


class Pairs:
    """The sums of the values at the live and at the shadow's choices, and the mean gain of the pairs.

    The sums never fall.
    """

    def __init__(self, sign: int = 1) -> None:
        """A gain is the live value minus the shadow's, times `sign`: -1 if more is better."""
        self.count, self.live, self.shadow = 0, 0.0, 0.0
        self._sign = sign
        self._batches: list[float] = []
        """Sums of `_length` gains each."""
        self._length, self._sum = 1, 0.0

    def add(self, pair: Pair | None) -> None:
        """Add the live value and the shadow's; None: there is no pair."""
        if pair is None:
            return
        self.count += 1
        self.live += pair[0]
        self.shadow += pair[1]
        self._sum += self._sign * (pair[0] - pair[1])
        if self.count % self._length == 0:
            self._batches.append(self._sum)
            self._sum = 0.0
            if len(self._batches) == 2 * BATCHES:
                pairs = zip(self._batches[::2], self._batches[1::2], strict=True)
                self._batches = [one + other for one, other in pairs]
                self._length *= 2

    def gain(self) -> SeriesMean:
        """Return the mean gain and its standard error; without values the mean is 0."""
        error, batches = None, len(self._batches)
        if batches >= BATCHES:
            error = stdev(each / self._length for each in self._batches) / math.sqrt(batches)
        return SeriesMean(self.count, (sum(self._batches) + self._sum) / max(1, self.count), error)


def pooled(means: Sequence[SeriesMean]) -> SeriesMean:
    """Return the mean of several independent series together: one from each process of a router."""
    known = [each for each in means if each.count]
    count = sum(each.count for each in known)
    if not count:
        return SeriesMean(0, 0.0, None)
    shares = [(each.count / count * each.standard_error) ** 2 for each in known if each.standard_error is not None]
    mean = sum(each.mean * each.count for each in known) / count
    return SeriesMean(count, mean, math.sqrt(sum(shares)) if len(shares) == len(known) else None)


class ShadowReport(msgspec.Struct, frozen=True, kw_only=True):
    """One shadow: the fields of its policy that differ from the live one, and its figures."""

    name: Annotated[str, msgspec.Meta(pattern=SHADOW_NAME)]
    policy: dict[str, Any]
    decisions: int
    differ: int
    skipped: dict[str, int]
    ttft_gain_s: SeriesMean
    cached_blocks_gain: SeriesMean
    own_cost_gain_ms: SeriesMean
    live_cost_gain_ms: SeriesMean
    differ_ratio: float = 0.0
    """Share of the shadow's decisions that are for another rank than the live one."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "differ_ratio", self.differ / max(1, self.decisions))


_GAINS = {
    "ttft_gain_s": "ttft_s",
    "cached_blocks_gain": "cached_blocks",
    "own_cost_gain_ms": "own_cost_ms",
    "live_cost_gain_ms": "live_cost_ms",
}
"""The values of a `Comparison` that each gain is made of."""


class Tally:
    """One shadow's decisions under one live policy."""

    def __init__(self, name: str, fields: dict[str, Any]) -> None:
        self.name, self._fields = name, fields
        self.agree = self.differ = 0
        self.skipped = Counter(dict.fromkeys(SKIPS, 0))
        self.pairs = {gain: Pairs(-1 if gain == "cached_blocks_gain" else 1) for gain in _GAINS}

    def add(self, found: Comparison | str) -> None:
        """Count a decision, or why there is none: one of `SKIPS`."""
        if isinstance(found, str):
            self.skipped[found] += 1
            return
        self.agree += found.agrees
        self.differ += not found.agrees
        for gain, value in _GAINS.items():
            self.pairs[gain].add(getattr(found, value))

    def report(self) -> ShadowReport:
        """Return the figures."""
        gains: dict[str, Any] = {gain: pairs.gain() for gain, pairs in self.pairs.items()}
        decisions, skipped = self.agree + self.differ, dict(self.skipped)
        return ShadowReport(
            name=self.name, policy=self._fields, decisions=decisions, differ=self.differ, skipped=skipped, **gains
        )


def merged(reports: Sequence[ShadowReport]) -> ShadowReport:
    """Return one report of a shadow, made of its reports from several processes."""
    gains: dict[str, Any] = {name: pooled([getattr(each, name) for each in reports]) for name in _GAINS}
    return msgspec.structs.replace(
        reports[0],
        decisions=sum(each.decisions for each in reports),
        differ=sum(each.differ for each in reports),
        skipped={reason: sum(each.skipped.get(reason, 0) for each in reports) for reason in SKIPS},
        **gains,
    )


def figures_table(reports: Sequence[ShadowReport]) -> list[str]:
    """Return the lines of a table for people: mean gains with their 95 % intervals, and what was skipped."""
    heads = ("policy", "differ", "TTFT gain, ms", "cached blocks gain", "own cost gain, ms", "live cost gain, ms")
    factors = {name: 1e3 if name == "ttft_gain_s" else 1.0 for name in _GAINS}
    rows = [
        (
            each.name,
            f"{each.differ_ratio:.1%}",
            *(_shown(getattr(each, name), factor) for name, factor in factors.items()),
        )
        for each in reports
    ]
    skipped = [
        f"note: {each.name}: {count} of {count + each.decisions} decisions are not compared ({reason})"
        for each in reports
        for reason, count in each.skipped.items()
        if count
    ]
    return [*aligned([heads, *rows], len(heads)), *skipped]


def _shown(gain: SeriesMean, factor: float) -> str:
    if not gain.count:
        return "-"
    interval = (
        "" if gain.interval_95 is None else " ({:+.1f} to {:+.1f})".format(*(factor * end for end in gain.interval_95))
    )
    return f"{factor * gain.mean:+.1f}{interval}"
