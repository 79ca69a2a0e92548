"""`router doctor`: surveys a running fleet and reports what is wrong, why it matters and how to fix it.

    exit code   0 nothing     1 warnings     2 errors     3 it could not look

`--json` prints one object: `exit_code`, `window_s`, `looked_at` (counts of workers, ranks, routers), and `findings`,
each with `id`, `severity`, `of`, `found`, `why`, `fix`.
"""

import sys
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from kv_runtime.clock import Clock
from kv_runtime.process import print_json, print_lines, run_to_end
from router.cli.options import checked_urls, nats_option, plane_url, settings_of, token_option
from router.config import RouterSettings
from router.doctor.checks import examine, exit_code
from router.doctor.facts import CATALOGUE, SEVERITIES, Finding, FleetFacts, severity
from router.doctor.survey import look

NOT_LOOKED = 3
_LISTEN_S = 3.0
"""Three heartbeats: one may be late, and two epochs at the same time can be distinguished from a restart."""
_TIMEOUT_S = 2.0


class _Doctor(click.Command):
    """A command that ends with `NOT_LOOKED` for an invalid flag, because that is not a finding."""

    def make_context(self, *given: Any, **more: Any) -> click.Context:  # noqa: ANN401 - as of click
        """Return the context that the flags make."""
        try:
            return super().make_context(*given, **more)
        except click.UsageError as error:
            error.show()
            sys.exit(NOT_LOOKED)


@click.command(cls=_Doctor)
@settings_of(
    click.option(
        "--router", "control_urls", multiple=True, help="a router's control plane, http://host:port; repeatable"
    ),
    click.option("--data", "data_urls", multiple=True, help="a router's data plane, http://host:port; repeatable"),
    nats_option,
    token_option,
    log_level="error",
    not_done=NOT_LOOKED,
)
@click.option("--listen", "listen_s", type=click.FloatRange(1.5, 600), default=_LISTEN_S, show_default=True,
              help="seconds that heartbeats are heard")  # fmt: skip
@click.option("--timeout", "timeout_s", type=click.FloatRange(0.1, 60), default=_TIMEOUT_S, show_default=True,
              help="seconds that each answer may take")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="print the findings as one JSON object")
def doctor(
    *,
    settings: RouterSettings,
    control_urls: tuple[str, ...],
    data_urls: tuple[str, ...],
    listen_s: float,
    timeout_s: float,
    as_json: bool,
    **_: object,
) -> None:
    """Look at a running fleet for --listen seconds: what is wrong, why it matters, and the fix, the worst first.

    Without --router and --data the configured addresses are asked: by default 127.0.0.1, ports 8001 and 8000. Each
    answer may take --timeout seconds. Exit code 0: nothing; 1: warnings; 2: errors; 3: it could not
    look.

    \b
    Example:  router doctor --nats-url nats://127.0.0.1:4222 --router http://127.0.0.1:8001
    """  # noqa: D301
    if not control_urls and not data_urls:
        control_urls = (plane_url(settings.control.host, settings.control.port),)
        data_urls = (plane_url(settings.data.host, settings.data.port),)
    control_urls, data_urls = checked_urls("--router", control_urls), checked_urls("--data", data_urls)
    facts = run_to_end(lambda: look(settings, control_urls, data_urls, listen_s, timeout_s, Clock()))
    findings = examine(facts)
    if as_json:
        print_json(as_object(facts, findings))
    else:
        print_lines(*as_lines(facts, findings))
    sys.exit(exit_code(findings))


def as_object(facts: FleetFacts, findings: Sequence[Finding]) -> bytes:
    """Return the counts of the survey and its findings as JSON."""
    return msgspec.json.encode(
        {
            "exit_code": exit_code(findings),
            "window_s": round(facts.window_s, 3),
            "looked_at": _looked_at(facts),
            "findings": [
                {**msgspec.structs.asdict(each), **msgspec.structs.asdict(CATALOGUE[each.id])} for each in findings
            ],
        }
    )


def as_lines(facts: FleetFacts, findings: Sequence[Finding]) -> list[str]:
    """Return the findings as lines for people, the worst first, and a summary."""
    lines = []
    for each in findings:
        meaning = CATALOGUE[each.id]
        lines += [f"{meaning.severity:<8}{each.id}  {each.of}: {each.found}"]
        lines += [f"        why  {meaning.why}", f"        fix  {meaning.fix}", ""]
    counted = [severity(each) for each in findings]
    summary = _counted({f"{kind}s": counted.count(kind) for kind in SEVERITIES})
    return [*lines, f"{summary}; looked at {_counted(_looked_at(facts))}, for {facts.window_s:.1f} s"]


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what.removesuffix('s') if count == 1 else what}" for what, count in counts.items())


def _looked_at(facts: FleetFacts) -> dict[str, int]:
    return {
        "workers": len(facts.workers),
        "ranks": sum(len(worker.registration.dp_ranks) for worker in facts.workers),
        "routers": sum(not router.control.problem for router in facts.routers),
    }
