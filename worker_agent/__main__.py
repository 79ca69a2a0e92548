"""`worker-agent`: the commands. Each is imported when it is called: `worker-agent --help` loads none of them."""

import click

from kv_runtime.extras import LazyCommand


@click.group()
@click.version_option(package_name="kv-router")
def main() -> None:
    """Wrap an engine: serve its requests, publish what its KV cache holds."""


for _command in (
    LazyCommand(
        "attach",
        "worker_agent.commands.processes:attach",
        "Bring one running engine into the fleet: its KV events, and, with --url, its load and its endpoint.",
    ),
    LazyCommand(
        "print-engine-args",
        "worker_agent.commands.print_engine_args:print_engine_args",
        "Print the TensorRT-LLM arguments that a worker would give its engine, each with its layer, and the warnings.",
    ),
    LazyCommand(
        "serve",
        "worker_agent.commands.processes:serve",
        "Serve one engine until a signal comes. What follows --port is TensorRT-LLM's, as `print-engine-args` has it.",
    ),
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
