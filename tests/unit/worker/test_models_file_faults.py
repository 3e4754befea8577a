"""A models file is refused with all its faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.worker.models_file import Write, fault, faults
from tokenyard.protocol.serve_args import MAX_TEMPLATE_BYTES
from worker.models import read_models


@pytest.mark.parametrize("path", ["./gone", "../gone", "/gone", "~/gone", "a/b/c", "what is this"])
def test_a_missing_folder_is_a_fault(write: Write, path: str) -> None:
    found = fault(write(f'[models.x]\npath = "{path}"'))

    assert found.startswith("models.x.path: there is nothing at /")


def test_the_home_of_an_unknown_user_is_a_fault(write: Write) -> None:
    found = fault(write('[models.x]\npath = "~no-such-user/x"'))

    assert found.startswith("models.x.path: there is nothing at ")
    assert found.endswith("/~no-such-user/x")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_num_seq = 1", "models.x.max_num_seq: is not known; did you mean max_num_seqs?"),
        ("flavour = 1", "models.x.flavour: is not known; more of vLLM's arguments go into engine_"),
        ("5-mini.path = 'm'", "models.x.5-mini: is not known; a name with a dot or a slash stands"),
        ("name = 'y'", "models.x.name: is not known"),
        ("max_num_seqs = '1'", "models.x.max_num_seqs: Expected `int`, got `str`"),
        ("max_num_seqs = 0", "models.x.max_num_seqs: Expected `int` >= 1"),
        ("max_num_seqs = 1.5", "models.x.max_num_seqs: Expected `int`, got `float`"),
        ("max_num_seqs = true", "models.x.max_num_seqs: Expected `int`, got `bool`"),
        ("max_model_len = -1", "models.x.max_model_len: Expected `int` >= 1"),
        ("kv_cache_gib = -1", "models.x.kv_cache_gib: Expected `float` >= 0"),
        ("kv_cache_gib = inf", "models.x.kv_cache_gib: use text, finite numbers"),
        ("kv_cache_gib = nan", "models.x.kv_cache_gib: "),
        ("max_model_wait_s = -0.5", "models.x.max_model_wait_s: Expected `float` >= 0"),
        ("pin = -1", "models.x.pin: Expected `int` >= 0"),
        ("sleep_level = 3", "models.x.sleep_level: Expected `int` <= 2"),
        ("tensor_parallel_size = 0", "models.x.tensor_parallel_size: Expected `int` >= 1"),
        ("max_lora_rank = 12", "models.x.max_lora_rank: Invalid enum value 12; use 1, 8, 16"),
        ("dtype = 'int4'", "models.x.dtype: Expected `str` matching regex '^(auto|half|float16"),
        ("trust_remote_code = 'true'", "models.x.trust_remote_code: Expected `bool`, got `str`"),
        ("trust_remote_code = 1", "models.x.trust_remote_code: Expected `bool`, got `int`"),
        ("revision = 2024-01-01", "models.x.revision: Expected `str`, got `date`"),
        ("sampling = 1", "models.x.sampling: must be a table"),
        ("engine_args = []", "models.x.engine_args: must be a table"),
        ("adapters = ['a']", "models.x.adapters: must be a table"),
    ],
)
def test_a_fault_names_its_key(write: Write, line: str, message: str) -> None:
    found = fault(write(f'[models.x]\npath = "m"\n{line}'))

    assert found.startswith(message)


SAMPLING = [
    ("temperture = 0", "temperture: is not known; did you mean temperature?"),
    ("best_of = 2", "best_of: is not known; use presence_penalty, "),
    ("temperature = -1", "temperature: Expected `float` >= 0"),
    ("temperature = inf", "temperature: use text, finite numbers"),
    ("top_p = 0.0", "top_p: Expected `float` > 0"),
    ("max_tokens = 0", "max_tokens: Expected `int` >= 1"),
    ("min_tokens = 17", "min_tokens: must not exceed max_tokens, which is 16"),
    ("min_tokens = 5\nmax_tokens = 4", "min_tokens: must not exceed max_tokens, which is 4"),
    ("stop = [1]", "stop: Expected `str`, got `int` - at `$[0]`"),
    ("logit_bias = { x = 1 }", "logit_bias: Expected `int`, got `str`"),
    ("structured_outputs = { x = 1 }", "structured_outputs: Object contains unknown field"),
    ("n = 2", "n: is not known; only a request itself can say it"),
    ("detokenize = false", "detokenize: is not known; only a request itself can say it"),
]
#: Arguments with a field of their own.
ENGINE_ARGS = [
    ("max_num_seqs = 8", "max_num_seqs: give the model's own key max_num_seqs instead"),
    ("trust_remote_code = true", "trust_remote_code: give the model's own key"),
    ("model = 'm'", "model: give the model's own key path instead"),
    ("kv_cache_memory_bytes = 1", "kv_cache_memory_bytes: give the model's own key kv_cache_"),
    ("enable_sleep_mode = true", "enable_sleep_mode: give the model's own key sleep_level"),
    ("enable_lora = true", "enable_lora: list adapters instead"),
    ("served_model_name = 'y'", "served_model_name: requests use the name of the table"),
    ("data_parallel_size = 2", "data_parallel_size: leave it out: each worker holds one whole"),
    ("data_parallel_rank = 1", "data_parallel_rank: leave it out: each worker holds one whole"),
    ("nnodes = 2", "nnodes: leave it out, or give distributed_executor_backend"),
    ("distributed_executor_backend = 'mp'", "distributed_executor_backend: leave it out, or s"),
    ("when = 2024-01-01", "when: use text, finite numbers, true, false, lists and tables only"),
]


@pytest.mark.parametrize(
    ("table", "line", "message"),
    [
        *(("sampling", *one) for one in SAMPLING),
        *(("engine_args", *one) for one in ENGINE_ARGS),
    ],
)
def test_a_fault_in_a_table_of_a_model_names_its_key(
    write: Write, table: str, line: str, message: str
) -> None:
    found = fault(write(f'[models.x]\npath = "m"\n[models.x.{table}]\n{line}'))

    assert found.startswith(f"models.x.{table}.{message}")


@pytest.mark.parametrize("key", ["path", "revision", "adapters", "trust_remote_code"])
def test_fields_of_a_single_model_are_no_defaults(write: Write, key: str) -> None:
    found = fault(write(f'[models.x]\npath = "m"\n[defaults]\n{key} = true'))

    assert found == f"defaults.{key}: is not known; say it of each model that needs it"


@pytest.mark.parametrize("name", ["", " ", " x", "x\\n", "\\u0000", "é" * 101])
def test_invalid_names_are_refused(write: Write, name: str) -> None:
    found = fault(write(f'[models."{name}"]\npath = "m"'))

    assert found.endswith("name it with 1 to 200 printable bytes")


def test_each_name_stands_for_one_model_or_adapter(write: Write) -> None:
    adapter = '{ path = "a" }'
    file = write(f"""
        [models.one]
        path = "m"
        adapters = {{ two = {adapter}, same = {adapter} }}
        [models.two]
        path = "m"
        adapters = {{ two = {adapter}, same = {adapter} }}
    """)

    assert faults(file) == [
        "models.two: models.one.adapters.two has this name too; give it another",
        "models.two.adapters.two: models.one.adapters.two has this name too; give it another",
        "models.two.adapters.same: models.one.adapters.same has this name too; give it another",
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, ".path: {folder} is no adapter: no adapter_config.json there"),
        ("{", ".path: {folder}/adapter_config.json cannot be used: "),
        ('{"r": "8"}', ".path: {folder}/adapter_config.json cannot be used: Expected `int`"),
        ("{}", ".path: {folder}/adapter_config.json cannot be used: Object missing required"),
        ('{"r": 17}', ": has rank 17: raise max_lora_rank, which is 16"),
    ],
)
def test_a_folder_without_an_adapter_is_refused(
    write: Write, tmp_path: Path, config: str | None, message: str
) -> None:
    folder = tmp_path / "b"
    folder.mkdir()
    if config is not None:
        (folder / "adapter_config.json").write_text(config, encoding="utf-8")

    found = fault(write('[models.x]\npath = "m"\n[models.x.adapters.y]\npath = "b"'))

    assert found.startswith(f"models.x.adapters.y{message.format(folder=folder)}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "models: list at least one"),
        ("[models]", "models: list at least one"),
        ("models = 1", "models: must be a table"),
        ("[models.x]", "models.x.path: is missing: give a folder, or a Hugging Face name"),
        ('[models.x]\npath = ""', "models.x.path: Expected `str` of length >= 1"),
        ("[models.x]\npath = 1", "models.x.path: Expected `str`, got `int`"),
        ("[models]\nx = 1", "models.x: must be a table"),
        ("[models.x]\npath = 'm'\n[models.x.adapters.y]", "models.x.adapters.y.path: is missing"),
        ("[models.x]\npath = 'm'\nadapters.y = 'a'", "models.x.adapters.y: must be a table"),
        ("[model.x]\npath = 'm'", "model: is not known; did you mean models?"),
        ("[models.x", "is not TOML: "),
        ("[models.x]\n[models.x]", "is not TOML: "),
    ],
)
def test_files_of_a_wrong_form_are_refused(write: Write, text: str, message: str) -> None:
    assert faults(write(text))[0].startswith(message)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    assert fault(tmp_path / "gone.toml") == "cannot be read: No such file or directory"
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    assert fault(tmp_path / "latin.toml").startswith("is not TOML: ")


def test_all_faults_are_reported_together(write: Write) -> None:
    file = write("""
        [default]
        [defaults]
        dtype = 1
        sampling.temperature = -1
        [models.one]
        path = "./gone"
        max_num_seqs = 0
        [models."two.5"]
        pth = "m"
        sampling.top_p = 7
        engine_args.model = "m"
    """)

    assert [found.partition(": ")[0] for found in faults(file)] == [
        "default",
        "defaults.dtype",
        "defaults.sampling.temperature",
        "models.one.max_num_seqs",
        "models.one.path",
        'models."two.5".pth',
        'models."two.5".sampling.top_p',
        'models."two.5".engine_args.model',
        'models."two.5".path',
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("port = 80", "is not a model's"),
        ('api_key = ["x"]', "is not a model's"),
        ('ssl_keyfile = "k"', "is not a model's"),
        ('middleware = ["os.system"]', "is not a model's"),
        ('tool_parser_plugin = "evil.py"', "loads code"),
        ('lora_modules = ["a=b"]', "list adapters"),
        ("max_num_seqs = 4", "own key max_num_seqs"),
        ("max_logprobs = 4", "say it in engine_args"),
        ('tool_calling_parser = "x"', "did you mean tool_call_parser?"),
        ('nonsense = "x"', "is not known; an engine's arguments go into engine_args"),
        ("tool_call_parser = 7", "Expected `str`"),
        ('tool_strict_level = "most"', "use auto, function, parameter"),
        ("default_chat_template_kwargs = { day = 2026-01-01 }", "use text, finite numbers"),
        ('chat_template = "./missing.jinja"', "cannot be read: No such file"),
        ('chat_template = "."', "cannot be read: Is a directory"),
        ('chat_template = "a/adapter_config.json"', None),
        ('chat_template = "plain.txt"', "is no chat template"),
        ('chat_template = "long.jinja"', "has more than"),
    ],
)
def test_arguments_for_gateways_are_checked(
    write: Write, tmp_path: Path, line: str, complaint: str | None
) -> None:
    (tmp_path / "plain.txt").write_text("hello")
    (tmp_path / "long.jinja").write_text("{" * (MAX_TEMPLATE_BYTES + 1))
    file = write(f'[models.one]\npath = "m"\n[models.one.serve_args]\n{line}')

    if complaint is None:
        assert read_models(file)
        return
    found = fault(file)

    assert found.startswith("models.one.serve_args.")
    assert complaint in found
