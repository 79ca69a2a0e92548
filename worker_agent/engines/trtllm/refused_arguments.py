"""Says which arguments the engine refused, and where each was given.

    pydantic's error of an argument    engine.yaml:3: kv_cache_config.dtype: Input should be ..., found 'fp9' (a text)
    another ValueError                 the arguments that its text names, each with its place

The engine's own models are the authority on names, types and ranges: they are those of the installed version.
"""

import re
from collections.abc import Iterator

from pydantic import ValidationError

from worker_agent.engine_args.arguments import EngineArgs
from worker_agent.engine_args.field_kinds import found
from worker_agent.engine_args.findings import shown
from worker_agent.engine_args.layers import Path, ValueOrigin, dotted

_WORD = re.compile(r"\w+")


def refusals(args: EngineArgs, error: ValidationError, above: Path = ()) -> Iterator[str]:
    """Yield each refused argument with its place; `above` is the path of the section that was refused."""
    for each in error.errors(include_url=False, include_context=False):
        path = (*above, *(str(part) for part in each["loc"]))
        origin = _origin(args, path)
        place = "" if origin is None else f"{origin.place}: "
        name = f"{dotted(path)}: " if path else ""
        yield f"{place}{name}{each['msg']}, found {found(shown(path, each['input']))}"


def named_in(args: EngineArgs, error: Exception) -> str:
    """Return where the arguments were given that the error's text names, as an ending of a message."""
    words = set(_WORD.findall(str(error)))
    given = [setting for setting in args.settings if setting.path[0] in words and setting.origin.layer != "default"]
    return "".join(f"; {setting.name} is of {setting.origin}" for setting in given)


def _origin(args: EngineArgs, path: Path) -> ValueOrigin | None:
    """Return the origin of the first value at the longest part of the path that has one.

    Parts of a path may be pydantic's own: the number of a list's item, the tag of a union.
    """
    for size in range(len(path), 0, -1):
        for setting in args.settings:
            if setting.path[:size] == path[:size]:
                return setting.origin
    return None
