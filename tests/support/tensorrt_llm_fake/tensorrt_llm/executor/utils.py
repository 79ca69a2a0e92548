"""What a request, or the engine, fails with. Source: `tensorrt_llm/executor/utils.py` @ 7b437aaa.

`EngineDeadError` is newer than that file's stored text: its name, its place and `root_cause` are known from the
project's own test of the RPC executor, its base class is not; here it is a RuntimeError (`SURFACE.md`).
"""


class RequestError(RuntimeError):
    """This request failed; others do not."""


class EngineDeadError(RuntimeError):
    """The engine is dead, of `root_cause`; no request will be computed."""

    def __init__(self, root_cause: BaseException) -> None:
        super().__init__(str(root_cause))
        self.root_cause = root_cause
