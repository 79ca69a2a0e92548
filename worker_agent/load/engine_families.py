"""Reads an engine's own metric families from its Prometheus text, for the agent's /metrics.

The names are the engine's; `worker` and `model` are added to the labels. A label of the engine with such a name becomes
`exported_<name>`, as Prometheus does without `honor_labels`. Shown are the families with the engine's prefix: others
(`python_*`, `process_*`) are of the engine's process, and the agent has them of its own. Left out are times at which
series began (`*_created`): rates do not need them. Timestamps of samples are not kept.

A text is shown whole or not at all. Source of the prefixes: `docs/ATTACH.md`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from worker_agent.load.engine_metrics import EngineKind

TEXT_BYTES_MAX = 1 << 20
"""Some 10,000 samples, which take about 100 ms to read; an engine has about 1,000."""
PREFIXES: Mapping[EngineKind, str] = {"vllm": "vllm:", "sglang": "sglang:", "trtllm-serve": "trtllm_"}
ExportProblem = Literal["oversize", "unreadable", "stale"]
EXPORT_PROBLEMS: tuple[ExportProblem, ...] = ("oversize", "unreadable", "stale")


def engine_families(kind: EngineKind, body: bytes, ours: Mapping[str, str]) -> list[Metric] | ExportProblem:
    """Return the engine's families with `ours` as further labels, or why there are none."""
    if len(body) > TEXT_BYTES_MAX:
        return "oversize"
    prefix = PREFIXES[kind]
    openings = (prefix, f"# TYPE {prefix}", f"# HELP {prefix}")
    lines = [line for line in body.decode("utf-8", errors="replace").split("\n") if line.startswith(openings)]
    try:
        return list(_labelled(text_string_to_metric_families("\n".join([*lines, ""])), ours))
    except (ValueError, LookupError):
        return "unreadable"


def _labelled(families: Iterable[Metric], ours: Mapping[str, str]) -> Iterator[Metric]:
    for family in families:
        shown = Metric(family.name, family.documentation, family.type)
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                renamed = {f"exported_{name}" if name in ours else name: value for name, value in sample.labels.items()}
                shown.add_sample(sample.name, renamed | dict(ours), sample.value)
        if shown.samples:
            yield shown
