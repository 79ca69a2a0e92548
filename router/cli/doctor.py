"""`router doctor`: surveys a running fleet and reports what is wrong, why it matters and how to fix it.

    exit code   0 nothing     1 warnings     2 errors     3 it could not look

`--json` prints one object: `exit_code`, `window_s`, `looked_at` (counts of workers, ranks, routers), and `findings`,
each with `id`, `severity`, `of`, `found`, `why`, `fix`.
"""

import sys
from typing import Any

import click
import msgspec
from msgspec.structs import asdict

from kv_runtime.clock import Clock
from kv_runtime.process import print_json, print_lines, run_to_end
from router.cli.options import checked_urls, nats_option, plane_url, settings_of, token_option
from router.config import RouterSettings
from router.doctor.checks import examine, exit_code
from router.doctor.facts import CATALOGUE, SEVERITIES
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
    looked_at = {
        "workers": len(facts.workers),
        "ranks": sum(len(worker.registration.dp_ranks) for worker in facts.workers),
        "routers": sum(not router.control.problem for router in facts.routers),
    }
    meanings, code = [CATALOGUE[each.id] for each in findings], exit_code(findings)
    if as_json:
        found = [{**asdict(each), **asdict(meaning)} for each, meaning in zip(findings, meanings, strict=True)]
        page = {"exit_code": code, "window_s": round(facts.window_s, 3), "looked_at": looked_at, "findings": found}
        print_json(msgspec.json.encode(page))
        sys.exit(code)
    for each, meaning in zip(findings, meanings, strict=True):
        print_lines(f"{meaning.severity:<8}{each.id}  {each.of}: {each.found}")
        print_lines(f"        why  {meaning.why}", f"        fix  {meaning.fix}", "")
    summary = _counted({f"{kind}s": sum(each.severity == kind for each in meanings) for kind in SEVERITIES})
    print_lines(f"{summary}; looked at {_counted(looked_at)}, for {facts.window_s:.1f} s")
    sys.exit(code)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what.removesuffix('s') if count == 1 else what}" for what, count in counts.items())
