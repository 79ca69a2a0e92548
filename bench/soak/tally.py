"""The outcomes of all requests, in bounded memory: counts, a histogram, and a few examples of each failure. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from bench.soak.answers import AS_DUE, AnswerOutcome
from bench.soak.requests import Kind

_EXAMPLES_MAX = 5
_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Tally:
    """Counts of requests. A request was *hit* if its worker was killed before the answer had ended."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[Kind, AnswerOutcome]] = Counter()
        self.hit: Counter[tuple[Kind, AnswerOutcome]] = Counter()
        """The hit requests among them."""
        self.tokens = 0
        """Tokens of right answers."""
        self.examples: defaultdict[AnswerOutcome, list[str]] = defaultdict(list)
        self._latencies: Counter[float] = Counter()

    @property
    def requests(self) -> int:
        """Return how many requests have ended."""
        return self.outcomes.total()

    def add(
        self, kind: Kind, outcome: AnswerOutcome, *, tokens: int, took_s: float, was_hit: bool, detail: str
    ) -> None:
        """Count a request that has ended; `detail` is shown where it should have ended otherwise."""
        self.outcomes[kind, outcome] += 1
        self.hit[kind, outcome] += was_hit
        self._latencies[next((bound for bound in _BUCKETS_S if took_s <= bound), float("inf"))] += 1
        if outcome is AnswerOutcome.RIGHT:
            self.tokens += tokens
        elif outcome not in AS_DUE and len(self.examples[outcome]) < _EXAMPLES_MAX:
            self.examples[outcome].append(f"{kind.name}: {detail}")

    def total(self, outcome: AnswerOutcome) -> int:
        """Return how many requests ended so."""
        return sum(count for (_, each), count in self.outcomes.items() if each is outcome)

    def excused(self) -> int:
        """Return how many requests ended with an error event because their worker died and they could not migrate."""
        return sum(
            count
            for (kind, outcome), count in self.hit.items()
            if outcome is AnswerOutcome.ERROR_EVENT and not kind.can_migrate
        )

    def lost(self) -> Counter[AnswerOutcome]:
        """Return how many requests did not end as they must, by how they ended, without those that are excused."""
        lost = Counter({outcome: self.total(outcome) for outcome in AnswerOutcome if outcome not in AS_DUE})
        lost[AnswerOutcome.ERROR_EVENT] -= self.excused()
        return +lost

    def saved(self) -> int:
        """Return how many requests are right though their worker was killed in the midst of the answer."""
        return sum(count for (_, outcome), count in self.hit.items() if outcome is AnswerOutcome.RIGHT)

    def quantile_s(self, quantile: float) -> float:
        """Return the upper bound of the histogram's bucket in which the quantile of the latencies lies."""
        wanted, seen = quantile * self.requests, 0
        for bound in (*_BUCKETS_S, float("inf")):
            seen += self._latencies[bound]
            if seen >= wanted:
                return bound
        return 0.0

    def rows(self) -> Iterator[tuple[str, dict[AnswerOutcome, int]]]:
        """Yield each kind of request, and how many of it ended how."""
        by_kind: defaultdict[str, dict[AnswerOutcome, int]] = defaultdict(dict)
        for (kind, outcome), count in self.outcomes.items():
            by_kind[kind.name][outcome] = count
        yield from by_kind.items()
