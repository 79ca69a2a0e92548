"""Effective arguments in one line, as the tests of them want them."""

from typing import Any

import pytest

from worker_agent.engine_args.arguments import EngineArgs, effective_args
from worker_agent.engine_args.findings import EngineArgsInvalid
from worker_agent.engine_args.layers import Layer
from worker_agent.engine_args.rules import Circumstances, flag_layer


def effective(
    file: dict[str, Any] | None = None,
    override: dict[str, Any] | None = None,
    flags: dict[str, Any] | None = None,
    **circumstances: Any,
) -> EngineArgs:
    around = Circumstances(**circumstances)
    layers = [
        Layer(name="override", values=override or {}, place="--override-engine-args"),
        Layer(name="file", values=file or {}, place="engine.yaml"),
        flag_layer(flags or {}, around),
    ]
    return effective_args(layers, around)


def refused(file: dict[str, Any] | None = None, **rest: Any) -> list[str]:
    with pytest.raises(EngineArgsInvalid) as error:
        effective(file, **rest)
    return [str(finding) for finding in error.value.findings]


def warned(file: dict[str, Any] | None = None, **rest: Any) -> list[str]:
    return [str(finding) for finding in effective(file, **rest).warnings]
