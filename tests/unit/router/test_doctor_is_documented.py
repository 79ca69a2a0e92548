"""`docs/DOCTOR.md` names every flag of the command."""

import click

from router.cli.doctor import doctor
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "DOCTOR.md").read_text()


def test_every_flag_is_named() -> None:
    flags = {name for option in doctor.params if isinstance(option, click.Option) for name in option.opts}
    assert {flag for flag in flags if f"`{flag}`" not in PAGE} == set()
