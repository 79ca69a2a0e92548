"""What an attached engine is registered as: what is configured, what it says, and what is known of its kind."""

from importlib.metadata import version

from msgspec import UNSET

from kv_protocol.errors import LimitExceeded
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.hashing import EAGLE_HASH_SCHEME, HASH_SCHEME, canary
from kv_protocol.openai.endpoints import DEFAULT_ENDPOINTS
from kv_runtime.config.loading import ConfigurationError
from kv_runtime.text.model import Text
from worker_agent.attached.config import AttachedEngineSection, AttachSettings
from worker_agent.engines.server import EngineFacts


def attached_facts(engine: AttachedEngineSection, reported: EngineFacts) -> EngineFacts:
    """Return the configured facts, completed with the engine's reported ones.

    Raises:
        ConfigurationError: the reported block size differs from the configured one: no block would fit.
    """
    if engine.block_size and reported.block_size and engine.block_size != reported.block_size:
        raise ConfigurationError(
            [f"engine.block_size: found {engine.block_size}, allowed {reported.block_size}, which is the engine's"]
        )
    configured = EngineFacts(
        served_names=engine.served_names or ((engine.model,) if engine.model else ()),
        block_size=engine.block_size,
        total_kv_blocks=engine.total_kv_blocks,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_seq_len=engine.max_seq_len,
        api_endpoints=engine.api_endpoints,
    )
    return configured.with_more(reported).with_more(EngineFacts(block_size=engine.server.block_size))


def attached_registration(
    settings: AttachSettings, facts: EngineFacts, text: Text, instance: str, base_url: str
) -> WorkerRegistered:
    """Return the registration of the attached engine, whose requests go to `base_url`.

    Raises:
        ConfigurationError: a field is invalid.
    """
    engine = settings.engine
    scheme = EAGLE_HASH_SCHEME if engine.is_eagle else HASH_SCHEME
    api_endpoints = facts.api_endpoints or DEFAULT_ENDPOINTS
    tells_ids = engine.stream_token_ids and "completions" in api_endpoints  # there streams are continued
    try:
        return WorkerRegistered(
            worker_id=settings.worker.id,
            instance=instance,
            model=engine.model or next(iter(facts.served_names), ""),
            served_names=facts.served_names,
            role=settings.worker.role,
            base_url=base_url,
            dp_ranks=tuple(range(engine.dp_ranks)),
            block_size=facts.block_size,
            hash_scheme=scheme,
            tokenizer_digest=text.tokenizer_digest,
            template_digest=text.template_digest,
            canary=canary(facts.block_size, scheme),
            total_kv_blocks=facts.total_kv_blocks,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            max_seq_len=facts.max_seq_len,
            loras=facts.loras,
            kv_cache_dtype=engine.kv_cache_dtype,
            taints=settings.worker.taints,
            transfer_domain=settings.worker.transfer_domain,
            event_source=engine.server.event_source,
            accepts_token_ids=engine.is_forwarded,
            version=facts.version or version("kv-router"),
            endpoint=settings.worker.endpoint_name,
            api_endpoints=api_endpoints,
            stream_token_ids=engine.server.stream_words if tells_ids else "",
            event_flag=engine.server.event_flag or UNSET,
        )
    except LimitExceeded as error:
        raise ConfigurationError([f"engine.{error}"]) from error
