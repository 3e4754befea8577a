"""What the models file may say, and what it means."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.unit.worker.models_file import Write
from worker.models import MAX_NAME_BYTES, AdapterSpec, ModelSpec, read_models


def test_a_path_is_enough(write: Write, tmp_path: Path) -> None:
    found = read_models(write('[models.adder]\npath = "m"'))

    assert found == {"adder": ModelSpec(name="adder", path=str(tmp_path / "m"))}


def test_all_fields_of_a_model_are_read(write: Write, tmp_path: Path) -> None:
    file = write("""
        [models.big]
        path = "./m"
        revision = "v2"
        dtype = "bfloat16"
        quantization = "fp8"
        max_model_len = 4096
        max_num_seqs = 128
        enforce_eager = true
        kv_cache_gib = 1.5
        tensor_parallel_size = 2
        pipeline_parallel_size = 3
        trust_remote_code = true
        max_lora_rank = 32
        sleep_level = 2
        pin = 1
        max_model_wait_s = 2.5

        [models.big.sampling]
        temperature = 0
        max_tokens = 512
        logit_bias = { 5 = -1.0 }

        [models.big.engine_args]
        gpu_memory_utilization = 0.8
        hf_overrides = { rope_theta = 1e6 }

        [models.big.serve_args]
        tool_call_parser = "hermes"
        enable_auto_tool_choice = true
        default_chat_template_kwargs = { enable_thinking = false }

        [models.big.adapters.legal]
        path = "a"

        [models.big.adapters.medical]
        path = "org/medical-lora"
        revision = "main"
    """)

    big = ModelSpec(
        name="big",
        path=str(tmp_path / "m"),
        revision="v2",
        dtype="bfloat16",
        quantization="fp8",
        max_model_len=4096,
        max_num_seqs=128,
        enforce_eager=True,
        kv_cache_gib=1.5,
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        trust_remote_code=True,
        adapters=(
            AdapterSpec(name="legal", path=str(tmp_path / "a")),
            AdapterSpec(name="medical", path="org/medical-lora", revision="main"),
        ),
        max_lora_rank=32,
        sampling={"temperature": 0, "max_tokens": 512, "logit_bias": {"5": -1.0}},
        sleep_level=2,
        engine_args={"gpu_memory_utilization": 0.8, "hf_overrides": {"rope_theta": 1e6}},
        serve_args={
            "tool_call_parser": "hermes",
            "enable_auto_tool_choice": True,
            "default_chat_template_kwargs": {"enable_thinking": False},
        },
        pin=1,
        max_model_wait_s=2.5,
    )
    assert read_models(file) == {"big": big}
    assert big.ranks == 6
    # A new field must be added above.
    defaults = ModelSpec(name="big", path="")
    names = [each.name for each in dataclasses.fields(ModelSpec) if each.name != "name"]
    assert [name for name in names if getattr(big, name) == getattr(defaults, name)] == []


def test_defaults_apply_to_all_models_unless_a_model_overrides_them(write: Write) -> None:
    file = write("""
        [defaults]
        dtype = "float16"
        max_num_seqs = 8
        [defaults.sampling]
        temperature = 0.0
        max_tokens = 64
        [defaults.engine_args]
        block_size = 16

        [models.one]
        path = "m"

        [models.two]
        path = "m"
        dtype = "float32"
        sampling.max_tokens = 8
        engine_args.seed = 1
    """)

    one, two = read_models(file).values()

    assert (one.dtype, one.max_num_seqs) == ("float16", 8)
    assert one.sampling == {"temperature": 0.0, "max_tokens": 64}
    assert one.engine_args == {"block_size": 16}
    assert (two.dtype, two.max_num_seqs) == ("float32", 8)
    assert two.sampling == {"temperature": 0.0, "max_tokens": 8}
    assert two.engine_args == {"block_size": 16, "seed": 1}


def test_relative_paths_start_at_the_file_and_a_tilde_at_home(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "x").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    write(f"""
        [models.beside]
        path = "m"
        [models.at-home]
        path = "~/x"
        [models.absolute]
        path = "{home}/x"
        [models.hub]
        path = "meta-llama/Llama-3.1-8B"
        [models.bucket]
        path = "s3://bucket/models/x"
    """)

    found = {name: spec.path for name, spec in read_models(Path("../models.toml")).items()}

    assert Path(found["beside"]).is_absolute()
    assert Path(found["beside"]).samefile(tmp_path / "m")
    assert found["at-home"] == found["absolute"] == str(home / "x")
    assert found["hub"] == "meta-llama/Llama-3.1-8B"
    assert found["bucket"] == "s3://bucket/models/x"


def test_the_refusal_of_a_model_beyond_one_host_names_ray(write: Write) -> None:
    [found] = read_models(
        write("""
            [models.huge]
            path = "org/huge"
            tensor_parallel_size = 8
            pipeline_parallel_size = 2
            engine_args.distributed_executor_backend = "ray"
        """)
    ).values()

    assert found.ranks == 1


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B", "a b", "größe", "q" * MAX_NAME_BYTES, "x"]
)
def test_names_may_have_the_form_that_requests_use(write: Write, name: str) -> None:
    assert list(read_models(write(f'[models."{name}"]\npath = "m"'))) == [name]


def test_the_models_of_the_example_can_be_read() -> None:
    found = read_models(Path(__file__).parents[3] / "examples/arithmetic/models.toml")

    assert set(found) == {"adder", "subtractor"}
    assert [adapter.name for adapter in found["adder"].adapters] == ["adder-subtracts"]


@pytest.mark.parametrize("given", ["chat.jinja", "./chat.jinja", "sub/../chat.jinja"])
def test_a_chat_template_is_read_beside_the_file(write: Write, tmp_path: Path, given: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "chat.jinja").write_text("é{{ messages[0] }}", encoding="utf-8")

    found = read_models(
        write(f'[defaults.serve_args]\nchat_template = "{given}"\n[models.one]\npath = "m"')
    )

    assert found["one"].serve_args == {"chat_template": "é{{ messages[0] }}"}


def test_a_chat_template_may_stand_in_the_file_itself(write: Write) -> None:
    text = '[models.one]\npath = "m"\nserve_args.chat_template = "{{ messages }}"'

    assert read_models(write(text))["one"].serve_args == {"chat_template": "{{ messages }}"}
