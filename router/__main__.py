"""`router`: the commands. Each is imported when it is called: `router --help` loads none of them."""

import re
from typing import Any

import click

from kv_runtime.config.options import config_options
from kv_runtime.extras import LazyCommand, require, require_built

require("router", "router", "the router")  # before numpy is imported
require_built("router", "indexer.native", "router.native")

_COMMANDS = {
    "bench.commands:bench": "Measure it: every bench states the machine, and prints losses too.",
    "bench.demo.command:demo": "Show it: one workload through a real fleet twice, round-robin and kv.",
    "bench.up:up": "Start a fleet on this machine, with readiness checks and logs; Ctrl-C ends it in order.",
    "bench.what_if.command:what_if": "Play a journal's requests through simulated engines, in a closed loop, under this"
    " policy and others.",
    "bench.what_if.tune:tune": "Propose a policy from a journal: what it would gain, how sure that is, and the command"
    " that sets it.",
    "dashboards.command:dashboards": "Write the Grafana dashboards and their provisioning into a directory.",
    "router.cli.doctor:doctor": "Look at a running fleet for --listen seconds: what is wrong, why it matters, and the"
    " fix, the worst first.",
    "router.cli.journals:journal": "Look into routers' journals.",
    "router.cli.journals:replay": "Take every decision of the journal again, from the journal alone, and compare bit"
    " for bit.",
    "router.cli.pools:pools": "Choose a pool of workers for each request, by its length, its targets and the state of"
    " the pools.",
    "router.cli.reports:explain": "Explain a decision: why that worker, what every other would have cost, and whether"
    " the prediction held.",
    "router.cli.reports:report": "Report what the reuse of prompts saved, and for whom: by model, tenant, LoRA adapter"
    " and prefix family.",
}
"""What `router --help` says of each command, by its module and name. Those of `bench` need the extra `tools`."""
_OPTIONS = "options: kv-events, replay-endpoint, engine, id"


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="kv-router", message="kv-router %(version)s", help="show it, and end")
@config_options
@click.option(
    "--worker", "workers", multiple=True, metavar="URL[,OPTION=VALUE...]", help=f"an engine that runs; {_OPTIONS}"
)
@click.option("--workers-from", help="a watched list of such engines: a file, or dns://name:port")
@click.option("--mode", "policy__mode", help="how a worker is chosen: kv, round-robin, ...; see policy.mode")
@click.option("--processes", "data__processes", type=int, help="processes that serve on one port")
@click.option("--port", "data__port", type=int, help="data plane port; 0: any free one")
@click.option(
    "--reuse-port",
    "data__reuse_port",
    is_flag=True,
    default=None,
    help="share the data plane's port with other routers",
)
@click.option("--control-port", "control__port", type=int, help="control plane port; 0: any free one")
@click.option("--nats-url", "nats__url", help="the event log; without it a nats-server is embedded")
@click.option("--text", "tokens__text", help="tokenizer and template: `byte`, or a local model directory")
@click.option(
    "--keep-text",
    "control__keep_text",
    is_flag=True,
    default=None,
    help="keep prompts' first and last text in memory; show it",
)
@click.option("--state", "state__dir", help="directory that keeps a policy changed over /v1/policy across restarts")
@click.pass_context
def main(context: click.Context, /, **flags: Any) -> None:  # noqa: ANN401 - see the flags
    """Route each request to the worker that holds most of its prefix. Without a command: serve."""
    if (command := context.invoked_subcommand) is not None:
        source, typed = context.get_parameter_source, click.core.ParameterSource.COMMANDLINE
        if given := [each.opts[0] for each in main.params if each.name and source(each.name) is typed]:
            raise click.UsageError(f"{', '.join(given)}: found before {command}, allowed without a command")
        return
    from router.cli.serve import run

    run(**flags)


@main.command()
@click.argument("account")
def key(account: str) -> None:
    """Print a new API key, and its account's entry for data.accounts_file.

    The entry has only the key's digest. The key is written nowhere else: give it to the client, who sends it as
    `Authorization: Bearer KEY`.
    """
    from router.http.accounts import NAME_PATTERN, new_key

    if not re.fullmatch(NAME_PATTERN, account):
        raise click.BadParameter(f"found {account!r}, allowed letters, digits, '.', '_' and '-', at most 64")
    secret, digest = new_key()
    for line in (f"key            {secret}", "", "accounts:", f"  - name: {account}", f'    keys: ["{digest}"]'):
        click.echo(line)


for _place, _text in _COMMANDS.items():
    _name, _extra = _place.partition(":")[2].replace("_", "-"), "tools" if _place.startswith("bench.") else ""
    main.add_command(LazyCommand(_name, _place, _text, program="router", extra=_extra))


if __name__ == "__main__":
    main()
