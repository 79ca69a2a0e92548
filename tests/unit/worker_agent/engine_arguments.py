"""Effective arguments in one line, as the tests of them want them."""

from typing import Any

import pytest

from worker_agent.engine_args.arguments import EngineArgs, EngineOptions, effective_args, flag_layer
from worker_agent.engine_args.layers import EngineArgsInvalid, layer


def effective(
    file: dict[str, Any] | None = None,
    override: dict[str, Any] | None = None,
    flags: dict[str, Any] | None = None,
    **circumstances: Any,
) -> EngineArgs:
    options = EngineOptions(flags=flags or {}, **circumstances)
    layers = [
        flag_layer(options),
        layer("file", [((), file or {}, "engine.yaml")]),
        layer("override", [((), override or {}, "--override-engine-args")]),
    ]
    return effective_args(layers, options)


def refused(file: dict[str, Any] | None = None, **rest: Any) -> list[str]:
    with pytest.raises(EngineArgsInvalid) as error:
        effective(file, **rest)
    return [str(finding) for finding in error.value.findings]


def warned(file: dict[str, Any] | None = None, **rest: Any) -> list[str]:
    return [str(finding) for finding in effective(file, **rest).warnings]
