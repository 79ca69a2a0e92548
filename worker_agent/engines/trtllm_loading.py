"""Loading TensorRT-LLM's engine on a thread, and what the loaded one is."""

import threading
from collections.abc import Mapping
from typing import Any

from kv_runtime.chat_messages import TextError
from worker_agent.core.engine import EngineDescription, EngineError
from worker_agent.core.engine_args import EngineArgs
from worker_agent.core.image_models import NO_STANDALONE_ENCODER, model_type
from worker_agent.engines.trtllm_library import Library
from worker_agent.engines.trtllm_settings import TrtllmSettings
from worker_agent.media.models import model_config

_BLOCK_SIZE = 32
"""An encoder has no blocks, and registers this."""


class Loading:
    """An engine that a thread loads, and that nobody may want any more when it is there."""

    def __init__(self, args: EngineArgs, log_level: str) -> None:
        self._args, self._log_level = args, log_level
        self._lock, self._is_wanted = threading.Lock(), True

    def run(self) -> tuple[Library, Any, Mapping[str, Any]]:
        """Return library, engine, and its cache's size; block this thread."""
        if self._args.role == "encode":
            check_encoder(str(self._args.value("model")))
        library = Library(self._log_level)
        llm = library.load(self._args)
        capacity = library.capacity(llm) if self._args.role != "encode" else {}
        with self._lock:
            if not self._is_wanted:
                llm.shutdown()
                raise EngineError("nobody waits for the engine any more")
        return library, llm, capacity

    def abandon(self) -> None:
        """Shut the engine down as soon as it is there."""
        with self._lock:
            self._is_wanted = False


def check_encoder(model_path: str) -> None:
    """Return where the model of a directory has an encoder of its own; of any other model nothing is known.

    Raises:
        EngineError: it has none, or its configuration cannot be read.
    """
    try:
        found = model_type(model_config(model_path))
    except TextError as error:
        raise EngineError(str(error)) from error
    if found in NO_STANDALONE_ENCODER:
        allowed = f"a model_type with an encoder of its own, which {', '.join(sorted(NO_STANDALONE_ENCODER))} has not"
        raise EngineError(f"role encode: found {found!r}, allowed {allowed}")


def described(
    args: EngineArgs,
    llm: Any,  # noqa: ANN401 - the library has no types here
    capacity: Mapping[str, Any],
    settings: TrtllmSettings,
    names: tuple[str, str],
) -> EngineDescription:
    """Return what the loaded engine is; `names` are the model's and the version's.

    Raises:
        EngineError: neither engine nor arguments state how long a sequence may be, or how large a block is.
    """
    own = getattr(llm, "args", None)
    longest = args.value("max_seq_len") or getattr(own, "max_seq_len", None) or settings.max_seq_len
    if longest is None:
        raise EngineError("max_seq_len: found none, allowed an engine argument, or the setting of the agent")
    return EngineDescription(
        model=names[0],
        version=names[1],
        event_source="trtllm",
        block_size=_block_size(args, capacity),
        total_kv_blocks=capacity.get("maxNumBlocks") or 0,
        max_num_seqs=args.value("max_batch_size") or getattr(own, "max_batch_size", None) or 0,
        max_num_batched_tokens=args.value("max_num_tokens") or getattr(own, "max_num_tokens", None) or 0,
        max_seq_len=longest,
        dp_ranks=tuple(range(args.attention_dp_size)),
    )


def _block_size(args: EngineArgs, capacity: Mapping[str, Any]) -> int:
    """Return the tokens in a block; no default stands in for it: a model's defaults may have another one."""
    stated: int | None = capacity.get("tokensPerBlock") or args.value("kv_cache_config", "tokens_per_block")
    if stated is None and args.role == "encode":
        return _BLOCK_SIZE
    if stated is None:
        raise EngineError(
            "kv_cache_config.tokens_per_block: found none, and the engine does not state it; allowed an engine argument"
        )
    return stated
