"""Arguments of `router report` that it refuses, with what was found and what is allowed."""

import pytest
from click.testing import CliRunner

from router.cli.reports import report


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--by", "customer"), "'customer' is not one of 'model', 'tenant', 'lora', 'prefix'"),
        (("--since", "yesterday"), "found 'yesterday', allowed a time as 2026-11-21T22:10:00Z"),
        (("--since", "2026-01-02", "--until", "2026-01-01"), "--until: found 2026-01-01T00:00:00.000+00:00, allowed a"),
        (("--journal", "--router", "http://127.0.0.1:1"), "found flags of both sources"),
        (("--evictions", "--router", "http://127.0.0.1:1"), "found flags of both sources"),
        (("--nats-url", "nats://127.0.0.1:1"), "found flags of both sources"),
        (("--journal",), "nats.url: found none, allowed the log of a running router"),
        (("--router", "nonsense"), "--router: found 'nonsense', allowed http(s)://host:port"),
        (("--set", "report.family_blocks=1025"), "report.family_blocks: found 1025"),
        (("--set", 'report.families={"12": "a"}'), "report.families"),
    ],
)
def test_a_refused_argument_is_named(arguments: tuple[str, ...], words: str) -> None:
    ended = CliRunner().invoke(report, arguments)
    assert ended.exit_code == 2
    assert ended.stdout == ""
    assert words in ended.stderr
