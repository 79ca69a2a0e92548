"""The rules name what there is: metrics, labels, each other's records, and sections of the runbooks."""

import re
from collections.abc import Iterator

import promql_parser
import pytest

from tests.support.paths import ROOT
from tests.system.dashboards.shipped import (
    ALERTS,
    OF_EVERY_SCRAPE,
    RULES,
    RUNBOOKS,
    Rule,
    bounds,
    check_names,
    every_sample,
    selectors,
)

BESIDE = {"up": set[str](), **{rule.record: set[str]() for rule in RULES if rule.record}}
"""What Prometheus itself says of a scrape, and what rules record; of the latter, no labels are asked for."""
SEVERITIES = {"critical", "warning"}


def test_a_rule_names_only_metrics_and_labels_that_there_are() -> None:
    for rule in RULES:
        check_names(rule.expr, rule, BESIDE)


def test_a_record_stands_before_what_reads_it() -> None:
    known: set[str] = set()
    for rule in RULES:
        assert {str(each.name) for each in selectors(rule.expr) if ":" in str(each.name)} <= known, rule
        if rule.record:
            assert rule.record not in known
            known.add(rule.record)


def kept_labels(alert: Rule) -> set[str]:
    """Return the labels of what an alert's query answers."""
    first = re.search(r"\bby \(([^)]*)\)", alert.expr)
    if first is not None:
        return set(first[1].split(", "))
    names = {str(each.name) for each in selectors(alert.expr)}
    return OF_EVERY_SCRAPE.union(*(every_sample().get(name, set()) for name in names))


@pytest.mark.parametrize("alert", ALERTS, ids=str)
def test_the_texts_of_an_alert_name_labels_that_it_has(alert: Rule) -> None:
    summary, description = alert.annotations["summary"], alert.annotations["description"]
    named = set(re.findall(r"\$labels\.(\w+)", summary + description))
    assert named <= kept_labels(alert)
    assert alert.severity in SEVERITIES
    assert "\n" not in summary
    assert len(summary) < len(description)


def anchors() -> Iterator[str]:
    """Yield the anchors of the runbooks' headings, as GitHub makes them."""
    for heading in re.findall(r"^#+ (.*)$", (ROOT / RUNBOOKS).read_text(), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    linked = {alert.annotations["runbook_url"] for alert in ALERTS}
    assert linked == {f"{RUNBOOKS}#{alert.alert.lower()}" for alert in ALERTS}
    assert linked == {f"{RUNBOOKS}#{anchor}" for anchor in anchors() if anchor.startswith("kvrouter")}


def test_objectives_of_time_are_bounds_of_their_histograms() -> None:
    for histogram in ("kvrouter_time_to_first_token_seconds", "kvrouter_inter_token_latency_seconds"):
        named = set(re.findall(rf'{histogram}_bucket{{le="([^"]+)"}}', " ".join(rule.expr for rule in RULES)))
        assert len(named) == 1, histogram
        assert set(map(float, named)) <= bounds(histogram)


def test_a_metric_that_is_not_there_is_found() -> None:
    planted = Rule("sum(rate(kvrouter_no_such_total[5m]))", record="kvrouter:planted")
    with pytest.raises(AssertionError):
        check_names(planted.expr, planted)
    assert isinstance(promql_parser.parse(planted.expr), promql_parser.AggregateExpr)
