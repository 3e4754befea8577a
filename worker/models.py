"""The models that a host may load: their specs, and the file that lists them.

docs/models.md describes the file. Its keys are the fields of `ModelSpec` and `AdapterSpec`, whose
types define the valid values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from tokenyard.process.home import expanded
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.serve_args import MAX_TEMPLATE_BYTES, OF_ENGINE, REFUSED
from tokenyard.protocol.serve_args import TAKEN as SERVE_ARGS
from tokenyard.protocol.settings import read_toml
from tokenyard.protocol.texts import did_you_mean
from tokenyard.protocol.wire import SamplingParams

Location = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0.0)]
#: The ranks that vLLM supports.
LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter; requests use its name like a model's."""

    name: str
    path: Location  # a folder, or a Hugging Face name
    revision: str = ""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model and its engine's settings; the engine chooses what is left out."""

    name: str  # used by requests
    path: Location  # a folder, or a name that vLLM can resolve
    revision: str = ""
    dtype: Annotated[str, Meta(pattern="^(auto|half|float16|bfloat16|float|float32)$")] = "auto"
    quantization: str = ""
    max_model_len: Count | None = None  # tokens, prompt plus output
    max_num_seqs: Count = 64  # concurrent requests
    enforce_eager: bool = False  # no compilation: starts faster; small models run as fast
    kv_cache_gib: Amount = 0.0  # 0: the device's remaining memory
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    trust_remote_code: bool = False
    adapters: tuple[AdapterSpec, ...] = ()
    max_lora_rank: LoraRank = 16
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults for its requests
    # Sleep level on a host with sleepers; 0: unload instead.
    sleep_level: Annotated[int, Meta(ge=0, le=2)] = 1
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # more of vLLM's EngineArgs
    serve_args: Mapping[str, Any] = field(default_factory=dict)  # of `vllm serve`, for gateways
    pin: Annotated[int, Meta(ge=0)] = 0  # workers of the yard that always hold it
    max_model_wait_s: Amount = 0.0  # longest wait of a request for the model; 0: the yard decides

    @property
    def ranks(self) -> int:
        """Devices of this host that the model occupies; Ray allocates its own, on all hosts."""
        if self.engine_args.get(_EXECUTOR) == _RAY:
            return 1
        return self.tensor_parallel_size * self.pipeline_parallel_size


MAX_NAME_BYTES: Final = 200
_TABLES: Final = ("defaults", "models")
_EXECUTOR: Final = "distributed_executor_backend"
_RAY: Final = "ray"

Kinds = Mapping[str, Any]


def _kinds(of: type, without: Collection[str]) -> Kinds:
    """The type of each field, with its bounds."""
    hints = get_type_hints(of, include_extras=True)
    return {key: kind for key, kind in hints.items() if key not in without}


_KEYS: Final = _kinds(ModelSpec, {"name"})
#: Keys that ``defaults`` cannot set: remote code, for example, is trusted per model only.
_OF_ONE_MODEL: Final = {"path", "revision", "adapters", "trust_remote_code"}
_DEFAULT_KEYS: Final = _kinds(ModelSpec, {"name", *_OF_ONE_MODEL})
_ADAPTER_KEYS: Final = _kinds(AdapterSpec, {"name"})
#: They set the shape of a reply, which its reader must know in advance.
_OF_THE_REQUEST: Final = {"n", "detokenize"}
_SAMPLING_KEYS: Final = _kinds(SamplingParams, _OF_THE_REQUEST)
#: Engine arguments with which an engine waits for others that nobody starts, and what to do.
NEEDS_OTHERS: Final = {
    **dict.fromkeys(
        (
            *("data_parallel_size", "data_parallel_size_local", "data_parallel_rank"),
            *("data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port"),
            *("data_parallel_backend", "data_parallel_hybrid_lb", "data_parallel_external_lb"),
            *("data_parallel_multi_port_external_lb", "enable_elastic_ep"),
        ),
        "leave it out: each worker holds one whole copy of the model, so start more workers",
    ),
    **dict.fromkeys(
        ("nnodes", "node_rank", "master_addr", "master_port"),
        f'leave it out, or give distributed_executor_backend = "{_RAY}" for a model beyond one'
        " host",
    ),
}
#: Engine arguments that belong elsewhere in the file, and where.
_SAID_ELSEWHERE: Final = {
    **{key: f"give the model's own key {key} instead" for key in _KEYS},
    "model": "give the model's own key path instead",
    "kv_cache_memory_bytes": "give the model's own key kv_cache_gib instead",
    "enable_sleep_mode": "give the model's own key sleep_level instead",
    "enable_lora": "list adapters instead",
    "served_model_name": "requests use the name of the table",
    **NEEDS_OTHERS,
}

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_HUB_NAME: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_URL: Final = re.compile(r"[a-z0-9]+://")


def read_models(path: Path) -> dict[str, ModelSpec]:
    """Read a models file; returns its models by name.

    Raises `tokenyard.protocol.errors.SettingsError` with every fault of the file.
    """
    tables = read_toml(path)
    reading = _Reading(path.parent)
    found = reading.models(tables)
    if reading.faults:
        raise SettingsError([f"{path}: {fault}" for fault in reading.faults])
    return found


class _Reading:
    """One pass over a file, which collects all faults instead of stopping at the first.

    ``at`` is always a place in the file in TOML notation.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self.faults: list[str] = []

    def models(self, tables: Mapping[str, Any]) -> dict[str, ModelSpec]:
        """All models; valid only if there are no faults."""
        for key, value in tables.items():
            if key not in _TABLES:
                self._unknown(_dotted("", key), key, value, _TABLES)
        defaults = self._values("defaults", tables.get("defaults", {}), _DEFAULT_KEYS)
        listed = self._table("models", tables.get("models", {}))
        if not listed:
            self._fault("models", "list at least one: a table [models.<name>] with a path")
        found = {name: self._model(name, table, defaults) for name, table in listed.items()}
        self._check_names(found)
        return found

    def _model(self, name: str, table: Any, defaults: Mapping[str, Any]) -> ModelSpec:
        at = _dotted("models", name)
        own = self._values(at, table, _KEYS)
        merged = {
            key: {**defaults.get(key, {}), **own.get(key, {})}
            for key in ("sampling", "engine_args", "serve_args")
        }
        path = self._path(at, table, own)
        spec = ModelSpec(**{**defaults, **own, **merged, "name": name, "path": path})
        self._check_sampling(at, spec.sampling)
        for adapter in spec.adapters:
            self._check_adapter(at, adapter, spec.max_lora_rank)
        return spec

    def _values(self, at: str, table: Any, kinds: Kinds) -> dict[str, Any]:
        """The valid values of a table, by key."""
        found: dict[str, Any] = {}
        for key, value in self._table(at, table).items():
            place = _dotted(at, key)
            if key not in kinds:
                self._unknown(place, key, value, kinds)
            elif key == "sampling":
                found[key] = self._values(place, value, _SAMPLING_KEYS)
            elif key == "engine_args":
                found[key] = self._engine_args(place, value)
            elif key == "serve_args":
                found[key] = self._serve_args(place, value)
            elif key == "adapters":
                found[key] = self._adapters(place, value)
            elif problem := _problem(value, kinds[key]):
                self._fault(place, problem)
            else:
                found[key] = value
        return found

    def _engine_args(self, at: str, table: Any) -> dict[str, Any]:
        given = dict(self._table(at, table))
        for key, value in given.items():
            place = _dotted(at, key)
            if key in _SAID_ELSEWHERE:
                self._fault(place, _SAID_ELSEWHERE[key])
            elif key == _EXECUTOR and value != _RAY:
                self._fault(place, f'leave it out, or say "{_RAY}" for a model beyond one host')
            elif problem := _problem(value, Any):
                self._fault(place, problem)
        return given

    def _serve_args(self, at: str, table: Any) -> dict[str, Any]:
        given = dict(self._table(at, table))
        for key, value in given.items():
            place = _dotted(at, key)
            if key not in SERVE_ARGS:
                self._fault(place, _why_no_serve_arg(key))
            elif problem := _problem(value, SERVE_ARGS[key]):
                self._fault(place, problem)
            elif key == "chat_template":
                given[key] = self._template(place, value)
        return given

    def _template(self, at: str, value: str) -> str:
        """A chat template as text: gateways on other machines do not have its file."""
        if "{" in value:
            return value
        file = self._folder / expanded(value)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            self._fault(at, f"{file} cannot be read: {getattr(error, 'strerror', None) or error}")
            return value
        if len(text.encode()) > MAX_TEMPLATE_BYTES:
            self._fault(at, f"{file} has more than {MAX_TEMPLATE_BYTES} bytes")
        elif "{" not in text:
            self._fault(at, f"{file} is no chat template: it has no {{{{ ... }}}}")
        return text

    def _adapters(self, at: str, table: Any) -> tuple[AdapterSpec, ...]:
        found = []
        for name, given in self._table(at, table).items():
            place = _dotted(at, name)
            own = self._values(place, given, _ADAPTER_KEYS)
            path = self._path(place, given, own)
            found.append(AdapterSpec(**{**own, "name": name, "path": path}))
        return tuple(found)

    def _path(self, at: str, table: Any, own: Mapping[str, Any]) -> str:
        """The location of a model or adapter: an absolute path, or a name for vLLM to resolve."""
        place, path = f"{at}.path", str(own.get("path", ""))
        if isinstance(table, Mapping) and "path" not in table:
            self._fault(place, "is missing: give a folder, or a Hugging Face name")
        if not path or _URL.match(path):
            return path
        found = self._folder / expanded(path)
        if found.exists():
            return str(found)
        if path[0] in "/.~" or not _HUB_NAME.fullmatch(path):
            self._fault(place, f"there is nothing at {found}")
        return path

    def _check_names(self, found: Mapping[str, ModelSpec]) -> None:
        """Check that names are usable, and unique across models and adapters."""
        taken: dict[str, str] = {}
        for name, spec in found.items():
            at = _dotted("models", name)
            adapters = [(each.name, _dotted(f"{at}.adapters", each.name)) for each in spec.adapters]
            for each, place in [(name, at), *adapters]:
                if not _is_usable(each):
                    self._fault(place, f"name it with 1 to {MAX_NAME_BYTES} printable bytes")
                if taken.setdefault(each, place) != place:
                    self._fault(place, f"{taken[each]} has this name too; give it another")

    def _check_sampling(self, at: str, sampling: Mapping[str, Any]) -> None:
        most = sampling.get("max_tokens", SamplingParams().max_tokens)
        if sampling.get("min_tokens", 0) > most:
            self._fault(f"{at}.sampling.min_tokens", f"must not exceed max_tokens, which is {most}")

    def _check_adapter(self, at: str, adapter: AdapterSpec, room: int) -> None:
        """Check that a folder holds an adapter whose rank fits."""
        place = _dotted(f"{at}.adapters", adapter.name)
        folder = Path(adapter.path)
        if not folder.is_absolute():  # missing (reported already), or not on this host yet
            return
        try:
            rank = _config_decoder.decode((folder / "adapter_config.json").read_bytes()).r
        except OSError:
            self._fault(f"{place}.path", f"{folder} is no adapter: no adapter_config.json there")
        except msgspec.MsgspecError as error:
            self._fault(f"{place}.path", f"{folder}/adapter_config.json cannot be used: {error}")
        else:
            if rank > room:
                self._fault(place, f"has rank {rank}: raise max_lora_rank, which is {room}")

    def _table(self, at: str, value: Any) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        self._fault(at, "must be a table")
        return {}

    def _unknown(self, at: str, key: str, value: Any, known: Iterable[str]) -> None:
        hint = did_you_mean(key, known) or f"; {_advice(key, value, known)}"
        self._fault(at, f"is not known{hint}")

    def _fault(self, at: str, message: str) -> None:
        self.faults.append(f"{at}: {message}")


class _AdapterConfig(msgspec.Struct):
    """The fields of PEFT's adapter_config.json that are checked."""

    r: Count


_config_decoder = msgspec.json.Decoder(_AdapterConfig)


def _dotted(at: str, key: str) -> str:
    """The key of a table in TOML notation."""
    written = key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)
    return f"{at}.{written}" if at else written


def _is_usable(name: str) -> bool:
    return name.isprintable() and name == name.strip() and 0 < len(name.encode()) <= MAX_NAME_BYTES


def _problem(value: Any, kind: Any) -> str:
    """Why a value is invalid; "" if it is valid."""
    try:
        msgspec.convert(value, kind, str_keys=True)
        json.dumps(value, allow_nan=False)
    except msgspec.ValidationError as error:
        is_choice = get_origin(kind) is Literal
        return f"{error}; use {', '.join(map(str, get_args(kind)))}" if is_choice else str(error)
    except (TypeError, ValueError):  # a date; infinity
        return "use text, finite numbers, true, false, lists and tables only"
    return ""


def _why_no_serve_arg(key: str) -> str:
    """Why `serve_args` cannot have a key, and where it belongs."""
    if key in REFUSED:
        return REFUSED[key]
    if key in _SAID_ELSEWHERE:
        return _SAID_ELSEWHERE[key]
    if key in OF_ENGINE:
        return "the engine needs it, too: say it in engine_args"
    hint = did_you_mean(key, SERVE_ARGS) or "; an engine's arguments go into engine_args"
    return f"is not known{hint}"


def _advice(key: str, value: Any, known: Iterable[str]) -> str:
    """Advice on an unknown key that resembles no known one."""
    if known is _SAMPLING_KEYS and key in _OF_THE_REQUEST:
        return "only a request itself can say it"
    if known is _DEFAULT_KEYS and key in _OF_ONE_MODEL:
        return "say it of each model that needs it"
    if known is _KEYS and isinstance(value, Mapping):
        return "a name with a dot or a slash stands in quotation marks"
    if known is _KEYS or known is _DEFAULT_KEYS:
        return "more of vLLM's arguments go into engine_args"
    return f"use {', '.join(known)}"
