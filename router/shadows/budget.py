"""How much time shadows may take: so much for each request of the router, on average. Pure.

Each request adds `budget_s` to an allowance, and each evaluation is subtracted from it. An evaluation may begin while
the allowance is above 0, so that all time spent is at most `requests * budget_s` and one evaluation. What is not used
is kept for `KEPT_REQUESTS` requests at most.
"""

KEPT_REQUESTS = 256


class Budget:
    """The allowance of one router's shadows."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self.requests = 0
        self.spent_s = 0.0
        self._allowance_s = 0.0

    def request(self, count: int = 1) -> None:
        """So many requests were decided."""
        self.requests += count
        self._allowance_s = min(self._allowance_s + count * self.budget_s, KEPT_REQUESTS * self.budget_s)

    def allows(self) -> bool:
        """Return whether the shadows may evaluate a decision now."""
        return self._allowance_s > 0.0

    def spend(self, seconds: float) -> None:
        """Evaluations took so long."""
        self.spent_s += seconds
        self._allowance_s -= seconds
