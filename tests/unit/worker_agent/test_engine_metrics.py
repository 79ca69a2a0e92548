"""What engines' metrics say of their load, and how little of it must be there."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kv_protocol.errors import MalformedMessage
from kv_protocol.load import COUNT_MAX, LoadReport
from worker_agent.attached.engine_metrics import read_loads
from worker_agent.engines.servers import SERVERS
from worker_agent.engines.servers.base import EngineFacts, Sample, samples_in
from worker_agent.engines.servers.vllm import facts_of_metrics

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 77.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000",num_gpu_blocks_override="None"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="800",num_gpu_blocks_override="None"} 1.0
"""
SGLANG = b"""sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 2.0
sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 2.0
sglang:num_queue_reqs{dp_rank="0",tp_rank="0"} 5.0
sglang:num_used_tokens{dp_rank="0",tp_rank="0"} 33.0
sglang:token_usage{dp_rank="0",tp_rank="0"} 0.9
sglang:max_total_num_tokens{dp_rank="0",tp_rank="0"} 6400.0
"""
TRTLLM = b"""trtllm_num_requests_running{model_name="m",engine_type="trtllm"} 6.0
trtllm_num_requests_waiting{model_name="m",engine_type="trtllm"} 2.0
trtllm_kv_cache_used_blocks{model_name="m",engine_type="trtllm"} 12.0
trtllm_kv_cache_max_blocks{model_name="m",engine_type="trtllm"} 400.0
trtllm_kv_cache_utilization{model_name="m",engine_type="trtllm"} 0.9
"""


def loads(
    kind: str, text: bytes, *, dp_ranks: tuple[int, ...] = (0,), total_blocks: int = 0
) -> dict[int, tuple[int, int, int, int]]:
    """Return running, waiting, used, total by rank."""
    names = SERVERS[kind].metrics
    read = read_loads(
        names,
        samples_in(text, names.all),
        dp_ranks=dp_ranks,
        block_size=16,
        total_blocks=total_blocks,
        instance="i",
        iteration=7,
    )
    return {
        rank: (each.running_requests, each.waiting_requests, each.used_blocks, each.total_blocks)
        for rank, each in read.items()
    }


def test_vllm_tells_of_each_engine_by_its_index() -> None:
    assert loads("vllm", VLLM, dp_ranks=(0, 1)) == {0: (3, 1, 250, 1000), 1: (4, 0, 400, 800)}


def test_tensorrt_llm_tells_of_blocks_themselves() -> None:
    assert loads("trtllm-serve", TRTLLM) == {0: (6, 2, 12, 400)}


def test_an_engine_with_one_rank_has_rank_0_whatever_it_is_called() -> None:
    alone = b"\n".join(line for line in VLLM.splitlines() if b'engine="1"' in line) + b"\n"
    assert loads("vllm", alone) == {0: (4, 0, 400, 800)}


def test_ranks_that_the_worker_does_not_have_are_left_out() -> None:
    assert loads("vllm", VLLM.replace(b'engine="1"', b'engine="x"'), dp_ranks=(0, 1)) == {0: (3, 1, 250, 1000)}
    assert loads("vllm", VLLM, dp_ranks=(0,)) == {0: (3, 1, 250, 1000)}


def test_the_name_of_vllm_before_0_9_counts_where_the_newer_is_not_there() -> None:
    old = VLLM.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc")
    assert loads("vllm", old)[0] == (3, 1, 250, 1000)


def test_what_the_metrics_do_not_say_of_the_total_is_known_otherwise() -> None:
    unsaid = VLLM.replace(b'num_gpu_blocks="1000"', b'num_gpu_blocks="None"')
    assert loads("vllm", unsaid)[0] == (3, 1, 0, 0)
    assert loads("vllm", unsaid, total_blocks=100)[0] == (3, 1, 25, 100)


def test_without_used_tokens_the_ratio_counts() -> None:
    assert loads("sglang", SGLANG.replace(b"num_used_tokens", b"num_other_tokens"))[0] == (2, 5, 360, 400)


@pytest.mark.parametrize("kind", list(SERVERS))
def test_metrics_without_requests_are_no_load(kind: str) -> None:
    with pytest.raises(MalformedMessage, match=f"found no {SERVERS[kind].metrics.running}"):
        loads(kind, b"process_cpu_seconds_total 1.0\n")


def test_what_one_line_says_wrongly_is_told_and_other_lines_are_not_read() -> None:
    assert loads("vllm", b"nonsense{{{\n" + VLLM)[0][0] == 3
    with pytest.raises(MalformedMessage):
        loads("vllm", VLLM + b'vllm:num_requests_running{engine="0"} many\n')


@given(st.floats(), st.floats(), st.floats())
@example(0.0, float(1 << 53), 0.0)
def test_no_number_makes_a_report_that_may_not_be(running: float, waiting: float, ratio: float) -> None:
    samples = [
        Sample("vllm:num_requests_running", {}, running),
        Sample("vllm:num_requests_waiting", {}, waiting),
        Sample("vllm:kv_cache_usage_perc", {}, ratio),
        Sample("vllm:cache_config_info", {"num_gpu_blocks": "10"}, 1.0),
    ]
    told = [value for value in (running, waiting) if 0 <= value <= COUNT_MAX and not math.isnan(value)]
    names = SERVERS["vllm"].metrics
    try:
        read = read_loads(names, samples, dp_ranks=(0,), block_size=16, total_blocks=0, instance="i", iteration=1)
    except MalformedMessage:
        assert len(told) < 2
    else:
        assert isinstance(read[0], LoadReport)
        assert 0 <= read[0].used_blocks <= 10


def test_the_cache_is_that_of_the_first_engine() -> None:
    assert facts_of_metrics(VLLM) == EngineFacts(block_size=16, total_kv_blocks=1000, dp_ranks=2)
    assert facts_of_metrics(b"vllm:cache_config_info 1.0\n") == EngineFacts(dp_ranks=1)
    assert facts_of_metrics(b"") == EngineFacts()


@pytest.mark.parametrize(
    ("awake", "is_asleep"), [([], False), ([1.0], False), ([0.0], True), ([0.0, 1.0], False), ([0.0, 0.0], True)]
)
def test_an_engine_sleeps_while_none_of_its_ranks_is_awake(awake: list[float], is_asleep: bool) -> None:
    states = [Sample("vllm:engine_sleep_state", {"sleep_state": "awake"}, value) for value in awake]
    others = [Sample("vllm:engine_sleep_state", {"sleep_state": "discard_all"}, 0.0)]
    assert SERVERS["vllm"].is_asleep([*states, *others]) is is_asleep
    assert not SERVERS["sglang"].is_asleep(states)
