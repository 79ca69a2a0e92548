"""What processes say of themselves at /metrics, as numbers that a test adds up."""

from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families


class Scraped(NamedTuple):
    """The samples of one process at one moment."""

    samples: tuple[tuple[str, dict[str, str], float], ...]
    names: frozenset[str]
    """Of the samples, and of counters and gauges that have none."""

    def total(self, name: str, **labels: str) -> float:
        """Return the sum over the samples of `kvrouter_<name>` that have these labels; 0.0 where none has."""
        assert f"kvrouter_{name}" in self.names, f"the page has no {name}"
        return sum(
            value
            for found, with_labels, value in self.samples
            if found == f"kvrouter_{name}" and labels.items() <= with_labels.items()
        )


async def scrape(session: aiohttp.ClientSession, url: str) -> Scraped:
    async with session.get(f"{url}/metrics") as response:
        families = [*text_string_to_metric_families(await response.text())]
    samples = tuple((each.name, each.labels, each.value) for family in families for each in family.samples)
    named = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    return Scraped(samples, frozenset(named.union(name for name, *_ in samples)))
