"""The command `router completion`."""

import click
from click.shell_completion import get_completion_class

from kv_runtime.process import print_lines


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what completes this command in a shell: eval "$(router completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    print_lines(*kind(context.find_root().command, {}, "router", "_ROUTER_COMPLETE").source().split("\n"))
