"""An engine request as keyword arguments of TensorRT-LLM's classes.

    role                                    request_type               max_tokens    streamed
    aggregated                              -                          as asked      yes
    prefill                                 context_only               1             no: there is one answer
    decode                                  generation_only            as asked      yes
    decode, `is_context_and_generation`     context_and_generation     as asked      yes
    any other, with an encoder's handles    context_and_generation     as asked      yes

Rules of the roles: `worker_agent/port/types.py`.

    ours                                  `SamplingParams`
    `Sampling.passed`                     the same names; `top_k` -1, all tokens, is 0 there
    stop tokens                           the model's end token among them: `end_id`, -1 if none stops (never None:
                                          the engine would need a tokenizer); the others: `stop_token_ids`
    ignore_eos                            the model's end tokens are not stop tokens. The engine's switch is on if the
                                          client has no stop tokens, because it drops those, too; else `end_id` -1
    the token that stopped an answer      stays: `include_stop_str_in_output`
    stop strings                          none: the agent makes the text, and `stop` beside an `end_id` fails
    choices n                             `n`, and `best_of` n: streamed choices cannot be ranked
    logprobs k                            max(1, k)
    rank                                  binding, if the engine has several; not set if the engine keeps conversations
                                          on one rank, and the request names a conversation
    logit_bias                            `embedding_bias`, one number for each token of the vocabulary
    bad_token_ids                         the same; `bad` is text, which fails beside an `end_id` as `stop` does
    media                                 `worker_agent/media/inputs.py`
    prefill                               `max_tokens` 1; everything else as in the request

Source: `docs/SOURCES.md` D4.2 and D6.5; NVIDIA/TensorRT-LLM, `tensorrt_llm/sampling_params.py`,
`tensorrt_llm/executor/base_worker.py` (`end_id` and stop words under `ignore_eos`) and
`tensorrt_llm/_torch/pyexecutor/grammar_matcher.py` (structural tags); `SURFACE.md` of the fake.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from kv_protocol.fleet import Role
from worker_agent.engine_args.arguments import EngineArgs
from worker_agent.engines.trtllm.settings import TrtllmSettings
from worker_agent.media.inputs import has_media, media_rules
from worker_agent.port.handoff import Handoff, params_of
from worker_agent.port.types import (
    EngineDescription,
    EngineRequest,
    Rule,
    limits,
    refuse_unmet,
    role_rules,
    takes_transfer,
)

NO_END_TOKEN = -1
_PAD_TOKEN = 0


def check_request(
    request: EngineRequest, engine: EngineDescription, args: EngineArgs, settings: TrtllmSettings, *, id_in_use: bool
) -> None:
    """Check that an engine without other requests can serve this one.

    Raises:
        RequestRefused: it never can, in this role and with its loaded features.
    """
    refuse_unmet(
        role_rules(request, args.role),
        media_rules(request, takes_transfer=takes_transfer(request, args.role)),
        limits(request, engine, id_in_use=id_in_use),
        _prompt_rules(request, engine, args.role),
        _sampling_rules(request, args.value("guided_decoding_backend"), settings),
    )


def sampling_fields(request: EngineRequest, role: Role, end_ids: Sequence[int]) -> dict[str, Any]:
    """Return the keywords of `SamplingParams`."""
    sampling = request.sampling
    fields: dict[str, Any] = dict(sampling.passed)
    if "top_k" in fields:
        fields["top_k"] = max(0, fields["top_k"])
    fields |= {"max_tokens": 1 if role == "prefill" else request.max_tokens, "detokenize": False}
    fields |= _stop_fields(request.stop_token_ids, end_ids, ignore_eos=sampling.ignore_eos)
    if sampling.choices > 1:
        fields |= {"n": sampling.choices, "best_of": sampling.choices}
    if sampling.logprobs is not None:
        fields["logprobs"] = max(1, sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        fields["prompt_logprobs"] = max(1, sampling.prompt_logprobs)
    if request.bad_token_ids:
        fields["bad_token_ids"] = list(request.bad_token_ids)
    if has_media(request):
        fields["add_special_tokens"] = False
    return fields


def _stop_fields(stop_ids: Sequence[int], end_ids: Sequence[int], *, ignore_eos: bool) -> dict[str, Any]:
    ends = [each for each in end_ids if each in stop_ids]
    if ignore_eos:
        others = [each for each in stop_ids if each not in end_ids]
        if ends and not others:
            return {"end_id": ends[0], "pad_id": ends[0], "ignore_eos": True}
        ends = []
    else:
        others = [each for each in stop_ids if each not in ends[:1]]
    fields: dict[str, Any] = {"end_id": NO_END_TOKEN, "pad_id": _PAD_TOKEN}
    if ends:
        fields = {"end_id": ends[0], "pad_id": ends[0]}
    return fields | ({"stop_token_ids": others, "include_stop_str_in_output": True} if others else {})


def disaggregated_fields(request: EngineRequest, role: Role) -> dict[str, Any] | None:
    """Return the keywords of `DisaggregatedParams`; None: the request has none."""
    if role == "prefill":
        fields = params_of(request.handoff or Handoff(), "context_only", with_media=True)
        return fields if request.transfer_id is None else {**fields, "disagg_request_id": request.transfer_id}
    if request.handoff is None:
        return None
    if takes_transfer(request, role):
        return params_of(request.handoff, "generation_only", with_media=False)
    return params_of(request.handoff, "context_and_generation", with_media=True)


def _prompt_rules(request: EngineRequest, engine: EngineDescription, role: Role) -> Iterator[Rule]:
    tokens, most = len(request.prompt), engine.max_prompt_tokens
    is_allowed = not most or tokens <= most or takes_transfer(request, role)
    yield "prompt", f"{tokens} tokens", f"at most {most}: max_num_tokens, without chunked prefill", is_allowed


def _sampling_rules(request: EngineRequest, by: str | None, settings: TrtllmSettings) -> Iterator[Rule]:
    """Yield the rules for what not every engine can do; `by` is the guides' backend. The API checked the values."""
    guide, processors = request.sampling.guide, settings.logits_processors
    allowed = "none: the engine was loaded without guided_decoding_backend"
    yield "guided_decoding", "a guide", allowed, guide is None or by is not None
    is_tag = guide is not None and guide.kind == "structural_tag"
    allowed = f"another guide: {by} has none, xgrammar has"
    yield "guided_decoding", "a structural tag", allowed, not is_tag or by == "xgrammar"
    allowed = ", ".join(sorted(processors)) or "none: the engine was loaded without any"
    for name in request.logits_processors:
        yield "logits_processors", name, allowed, name in processors
    n = request.sampling.choices
    yield "n", n, "1 with logits processors: they see one sequence", n == 1 or not request.logits_processors
    allowed = "none: the size of the model's vocabulary is not known to the agent"
    yield "logit_bias", "some", allowed, bool(settings.vocab_size) or not request.logit_bias
