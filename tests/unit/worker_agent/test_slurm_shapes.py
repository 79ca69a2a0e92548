"""Tasks of an allocation, and the workers that are placed on them."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.worker_agent.engine_arguments import effective
from worker_agent.engine_args.slurm import Shape, ShapeRefused, engine_arguments, moe_backend, placed, tasks_per_node


def shape(role: Any = "decode", workers: int = 1, gpus: int = 8, **rest: Any) -> Shape:
    sizes = {"max_batch_size": 64, "max_num_tokens": 4096, "max_seq_len": 8192}
    return Shape(role=role, workers=workers, gpus=gpus, **{**sizes, **rest})


@pytest.mark.parametrize(("text", "tasks"), [("4(x2)", (4, 4)), ("4(x2),3", (4, 4, 3)), ("8", (8,)), ("1,2", (1, 2))])
def test_tasks_per_node(text: str, tasks: tuple[int, ...]) -> None:
    assert tasks_per_node(text) == tasks


@pytest.mark.parametrize("text", ["", "4(2)", "0", "4(x0)", "4,,4", "4(x9999)", "x4"])
def test_other_forms_of_tasks_are_refused(text: str) -> None:
    with pytest.raises(ShapeRefused, match="tasks per node"):
        tasks_per_node(text)


def test_small_workers_share_a_node_and_large_ones_take_whole_nodes() -> None:
    found = placed(["a", "b", "c"], [8, 8, 8], [shape("prefill", 2, 4), shape("decode", 1, 16)])
    assert [(each.role, each.nodes, each.gpus_per_node) for each in found] == [
        ("prefill", ("a",), 4), ("prefill", ("a",), 4), ("decode", ("b", "c"), 8),
    ]  # fmt: skip


def test_too_few_gpus_are_refused_with_both_counts() -> None:
    with pytest.raises(ShapeRefused, match=r"decode worker 0 of 16 GPUs .* need 20 GPUs, 2 nodes have 16"):
        placed(["a", "b"], [8, 8], [shape("prefill", 1, 4), shape("decode", 1, 16)])
    with pytest.raises(ShapeRefused, match="2 nodes, but tasks of 1"):
        placed(["a", "b"], [8], [])


@given(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=6),
       st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4, 8, 16])), max_size=3))  # fmt: skip
def test_no_gpu_has_two_workers(tasks: list[int], wanted: list[tuple[int, int]]) -> None:
    nodes = [f"n{number}" for number in range(len(tasks))]
    shapes = [shape("prefill", workers, gpus) for workers, gpus in wanted]
    try:
        found = placed(nodes, tasks, shapes)
    except ShapeRefused:
        return
    used = Counter(dict.fromkeys(nodes, 0))
    for each in found:
        used.update(dict.fromkeys(each.nodes, each.gpus_per_node))
    assert all(used[node] <= has for node, has in zip(nodes, tasks, strict=True))
    assert sorted(len(each.nodes) * each.gpus_per_node for each in found) == sorted(
        gpus for workers, gpus in wanted for _ in range(workers)
    )


@pytest.mark.parametrize(
    ("gpu", "precision", "gpus", "attention_dp", "backend"),
    [
        ("b200", "nvfp4", 16, True, "CUTEDSL"),
        ("b200", "nvfp4", 8, True, "CUTLASS"),
        ("b200", "fp8", 16, True, "DEEPGEMM"),
        ("b200", "fp8", 8, False, "TRTLLM"),
        ("h200", "fp8", 16, True, "CUTLASS"),
        ("h200", "fp8", 8, False, "CUTLASS"),
    ],
)
def test_the_backend_of_the_experts(gpu: Any, precision: Any, gpus: int, attention_dp: bool, backend: str) -> None:
    assert moe_backend(gpu, precision, shape(gpus=gpus, attention_dp=attention_dp)) == backend


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_is_made_has_no_warnings(role: Any) -> None:
    made = engine_arguments(shape(role, gpus=16, attention_dp=True, mtp_layers=1, slots=288), "CUTEDSL", 8)
    args = effective(made, role=role, publishes_kv_events=True, gpu_count=16)
    assert args.warnings == ()
    assert made["moe_config"] == {
        "backend": "CUTEDSL", "load_balancer": {"num_slots": 288, "layer_updates_per_iter": 1},
    }  # fmt: skip
    assert made["speculative_config"] == {"decoding_type": "MTP", "num_nextn_predict_layers": 1}


def test_refused_shapes() -> None:
    with pytest.raises(ShapeRefused, match="decode: 288 slots are no multiple of 64 GPUs"):
        engine_arguments(shape(gpus=64, slots=288), "CUTEDSL", 8)
    with pytest.raises(ShapeRefused, match="NVFP4 needs a B200"):
        moe_backend("h200", "nvfp4", shape())
