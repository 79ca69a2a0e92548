"""The flag `--cost NAME=VALUE`, which may be repeated."""

import click

from router.decision.policy import CostParameters


def cost_parameters(_context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> CostParameters:
    """Return the default weights, changed as the flags say."""
    allowed = ", ".join(f"{name}=NUMBER" for name in CostParameters.__struct_fields__)
    changed: dict[str, float] = {}
    for each in value:
        name, _, number = each.partition("=")
        try:
            changed[name] = float(number)
        except ValueError as error:
            raise click.BadParameter(f"found {each!r}, allowed {allowed}") from error
        if name not in CostParameters.__struct_fields__:
            raise click.BadParameter(f"found {each!r}, allowed {allowed}")
    return CostParameters(**changed)
