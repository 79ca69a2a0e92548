"""Settings of a worker whose engine runs in its process: what goes together, and what the engine is given of them."""

from pathlib import Path
from typing import Any

import click
import pytest

from kv_runtime.config.loading import ConfigurationError, load_settings
from kv_runtime.config.rendering import render
from kv_runtime.text.chat_messages import TextError
from kv_runtime.text.loading import load_text
from kv_runtime.text.model import Text
from worker_agent.commands.engine_choice import EngineChoice, chosen_engine, engine_text
from worker_agent.commands.print_engine_args import DYNAMIC_FLAGS, engine_args_options
from worker_agent.config import AgentSettings
from worker_agent.engine_args.arguments import EngineOptions
from worker_agent.engine_args.layers import EngineArgsInvalid
from worker_agent.engine_args.sources import installed_version

TRTLLM = "engine.kind=trtllm"


def loaded(*assignments: str) -> AgentSettings:
    return load_settings(AgentSettings, assignments=assignments)


def chosen(*assignments: str, **options: Any) -> EngineChoice:
    return chosen_engine(loaded(*assignments), EngineOptions(**options))


@pytest.mark.parametrize(
    ("assignments", "problem"),
    [
        ([TRTLLM, "engine.block_size=16"], "engine.block_size: found a value, allowed of the simulated engine alone"),
        ([TRTLLM, "engine.speed=2"], "engine.speed: found a value"),
        (["trtllm.loras={law: /x}"], "trtllm.loras: found a value, allowed where engine.kind is trtllm"),
        (["engine.kind=vllm"], "engine.kind"),
        (["worker.endpoint=a.b"], "worker.endpoint: found 'a.b', allowed namespace.component.endpoint"),
        (["worker.role=prefill", "worker.canary_wait_s=9"], "canary_wait_s: found 9.0, allowed 0 of role prefill"),
        (["worker.role=encode", "worker.canary_wait_s=9"], "it generates nothing"),
        (["events.sources=[{source: engine, endpoint: 'tcp://127.0.0.1:1'}]"], "that is the engine's own"),
        (
            ["events.sources=[{source: a, endpoint: 'ipc://x'}, {source: a, endpoint: 'ipc://y', dp_rank: 0}]"],
            "sources: found source 'a' of dp_ranks [None, 0], allowed each rank once",
        ),
        ([TRTLLM, "trtllm.loras={'': /x}"], "trtllm.loras"),
        (["engine.host_blocks=-1"], "engine.host_blocks"),
    ],
)
def test_what_does_not_go_together_is_named(assignments: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        loaded(*assignments)
    assert problem in str(error.value)


@pytest.mark.parametrize("kind", ["simulated", "trtllm"])
def test_what_is_printed_loads_again(kind: str, tmp_path: Path) -> None:
    settings = loaded(f"engine.kind={kind}", "worker.endpoint=dyn://a.b.c")
    file = tmp_path / "printed.yaml"
    file.write_text("".join(line for line in render(settings).splitlines(keepends=True) if "token" not in line))
    assert load_settings(AgentSettings, file=file) == settings


def test_an_endpoint_is_the_role_s_unless_it_is_named() -> None:
    assert loaded("worker.role=prefill").worker.endpoint_name == "dynamo.prefill.generate"
    assert loaded("worker.endpoint=dyn://a-1.B_2.c").worker.endpoint_name == "a-1.B_2.c"
    for text in ("dyn://", "a.b", "a.b.c.d", "a..c", "a.b.c ", "http://a.b.c", "dyn://dyn://a.b.c", f"a.b.{'c' * 65}"):
        with pytest.raises(ConfigurationError, match=r"worker\.endpoint: .*allowed namespace\.component\.endpoint"):
            loaded(f"worker.endpoint='{text}'")


def test_a_stop_has_time_for_all_that_has_to_end() -> None:
    own = ["trtllm.transfer_s=7", "trtllm.shutdown_s=11", "worker.drain_s=13"]
    assert loaded("worker.drain_s=13").drain_s == 13 + 5
    assert loaded(TRTLLM, *own).drain_s == 13 + 11 + 5
    assert loaded(TRTLLM, *own, "worker.role=prefill").drain_s == 13 + 7 + 11 + 5


# ------------------------------------------------------------------------------------------------- the engine
def test_the_simulated_engine_is_the_default_and_takes_no_engine_arguments() -> None:
    assert chosen() == EngineChoice(
        None, ("sim-8b",), "byte", polls_events=True, has_statistics=True, event_buffer=100_000
    )
    given: list[EngineOptions] = []

    def noted(options: EngineOptions) -> None:
        given.append(options)

    command = click.command(context_settings=DYNAMIC_FLAGS)(engine_args_options(noted))
    for words, places in (
        ("--gpu-count 0 --modality text --connector none --publish-kv-events", ["--publish-kv-events", "--gpu-count"]),
        ("--tensor-parallel-size 2 --override-engine-args {}", ["--tensor-parallel-size", "--override-engine-args"]),
        ("--trtllm.a=1 --workerid -1", ["--trtllm.a", "--workerid"]),
        ("stray", ["stray"]),
    ):
        command.main(words.split(), standalone_mode=False)
        with pytest.raises(EngineArgsInvalid) as refused:
            chosen_engine(loaded(), given.pop())
        assert [each.place for each in refused.value.findings] == places
        assert "expected options of this command; TensorRT-LLM's" in str(refused.value)


def test_the_role_the_model_and_logits_processors_of_the_settings_decide_the_engine_s_arguments() -> None:
    made = chosen(
        TRTLLM,
        "engine.model=models/x",
        "worker.role=decode",
        "trtllm.logits_processors={p: a.b:c}",
        override='{"max_num_tokens": 64}',
        publishes_kv_events=True,
    )
    assert made.args is not None
    assert (made.args.role, made.args.value("model"), made.args.value("skip_tokenizer_init")) == (
        "decode",
        "models/x",
        False,
    )
    assert (made.polls_events, made.has_statistics, made.event_buffer) == (True, False, 100_000)


def test_a_model_is_a_directory_with_its_configuration_or_a_name_on_the_hub(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    expected = r"--model: model: expected a directory with config\.json, or a name on the hub \(org/name\), found "
    for model, found in (
        ("/no/where", "'/no/where', a path that does not exist"),
        ("./model", "'./model', a path that does not exist"),
        ("a/b/c", "'a/b/c', a path that does not exist"),
        (str(tmp_path), "a directory without config.json"),
        (str(file), "a file"),
    ):
        with pytest.raises(EngineArgsInvalid, match=expected) as error:
            chosen(TRTLLM, f"engine.model={model}")
        assert str(error.value).endswith(found)
    (tmp_path / "config.json").touch()
    for model in (str(tmp_path), "org/model-1.5_b", "gpt2"):
        assert chosen(TRTLLM, f"engine.model={model}").names == (model,)


@pytest.mark.parametrize(
    ("text", "found"), [("__version__ = '1.5.0rc1'\n", "version 1.5.0rc1"), ("x = 1\n", "version unknown")]
)
def test_an_installed_engine_of_another_version_is_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: str
) -> None:
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_version() == found.removeprefix("version ")
    with pytest.raises(
        EngineArgsInvalid, match=rf"tensorrt_llm: expected 1\.3\.0rc0 or later, below 1\.5, found {found}"
    ):
        chosen(TRTLLM)
    assert chosen(TRTLLM, allows_unknown=True).args is not None


def test_what_is_polled_follows_from_arguments_and_role() -> None:
    statistics = {"publish-metrics": True}
    aggregated = chosen(TRTLLM, flags=statistics, publishes_kv_events=True)
    encoder = chosen(TRTLLM, "worker.role=encode", flags=statistics, publishes_kv_events=True)
    assert (aggregated.polls_events, aggregated.has_statistics) == (True, True)
    assert (encoder.polls_events, encoder.has_statistics, encoder.event_buffer) == (False, False, 0)


def test_adapters_need_their_weights_and_an_engine_that_loads_them(tmp_path: Path) -> None:
    loads = '{"enable_lora": true}'
    with pytest.raises(ConfigurationError, match="found law, allowed with the engine argument enable_lora true"):
        chosen(TRTLLM, f"trtllm.loras={{law: {tmp_path}}}")
    with pytest.raises(ConfigurationError, match=r"trtllm\.loras\.law: found '/nowhere', allowed a directory that"):
        chosen(TRTLLM, "trtllm.loras={law: /nowhere}", override=loads)
    assert chosen(TRTLLM, f"trtllm.loras={{law: {tmp_path}}}", override=loads).args is not None


def test_the_first_served_name_is_the_model_s_in_the_fleet() -> None:
    assert chosen(TRTLLM, "engine.model=m").names == ("m",)
    assert chosen(TRTLLM, "engine.model=m", "engine.served_names=[a, b]").names == ("a", "b")
    assert chosen("engine.served_names=[a, b]").names == ("a", "b")
    assert chosen(TRTLLM).names == ("TinyLlama/TinyLlama-1.1B-Chat-v1.0",)


def test_the_engine_is_given_the_section_the_end_tokens_and_the_log_level() -> None:
    text = load_text("byte")
    settings = loaded(TRTLLM, "trtllm.loras={law: /x, med: /y}")
    told = settings.trtllm.settings(text, "warning")
    assert told.loras == {"law": "/x", "med": "/y"}
    assert told.log_level == "warning"
    assert (told.end_ids, told.vocab_size) == (tuple(text.eos_ids), text.vocab_size)


def test_the_text_is_the_model_s_unless_another_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    def text_of(*assignments: str) -> Text:
        return engine_text(loaded(*assignments), chosen(*assignments))

    assert text_of().tokenizer_digest == load_text("byte").tokenizer_digest
    assert text_of(TRTLLM, "engine.model=no/where", "engine.text=byte").bos_id is None
    with pytest.raises(TextError, match="model: found 'no/where', allowed 'byte' or a local directory"):
        text_of(TRTLLM, "engine.model=no/where")
    with pytest.raises(TextError, match=r"tokenizer: found .* allowed a directory with tokenizer\.json"):
        text_of(f"engine.text={tmp_path}")
