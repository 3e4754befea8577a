"""The models that this host may load, and its entry in the yard."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tokenyard import clock
from tokenyard.process.home import expanded
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.serve_args import OF_ENGINE
from tokenyard.protocol.settings import WorkerSettings
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, ServingInfo
from worker.models import NEEDS_OTHERS, ModelSpec, read_models


def read_catalog(settings: WorkerSettings) -> dict[str, ModelSpec]:
    """The models of the file, or the one model of the settings.

    Raises `tokenyard.protocol.errors.SettingsError`.
    """
    if settings.models:
        return read_models(settings.models)
    _check_path(settings)
    given: dict[str, object] = msgspec.json.decode(settings.engine_args, type=dict)
    if faults := [
        f"engine_args.{key}: {NEEDS_OTHERS[key]}" for key in given if key in NEEDS_OTHERS
    ]:
        raise SettingsError(faults)
    spec = ModelSpec(
        name=settings.serves,
        path=settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len or None,
        max_num_seqs=settings.max_num_seqs,
        enforce_eager=settings.enforce_eager,
        engine_args=given,
    )
    return {spec.name: spec}


def _check_path(settings: WorkerSettings) -> None:
    """Refuse a path that does not exist before the processes warm up.

    With ``on_start_failure`` retry it may be mounted later.
    """
    is_path = settings.model.startswith(("/", "./", "../", "~"))
    if settings.engine != "vllm" or settings.on_start_failure == "retry" or not is_path:
        return
    if not expanded(settings.model).exists():
        raise SettingsError([f"model: there is no {settings.model} on this host"])


class HostEntry:
    """Keeps the host's entry up to date."""

    def __init__(self, settings: WorkerSettings, catalog: Mapping[str, ModelSpec]) -> None:
        self._settings = settings
        self._models = {name: _model_info(spec) for name, spec in catalog.items()}
        self._failed: dict[str, str] = {}  # weights with which a model failed to load
        self._lost: set[str] = set()  # models whose last load was killed
        self._came_s: dict[str, float] = {}  # last time to load or wake, by model
        self._gone_s: dict[str, float] = {}  # last time to unload or fall asleep

    @property
    def info(self) -> HostInfo:
        """The entry as it is now."""
        return HostInfo(
            name=self._settings.name,
            host=socket.gethostname(),
            devices=self._settings.slots,
            models=list(self._models.values()),
        )

    def loaded(self, name: str, load_s: float) -> None:
        """A model was loaded in ``load_s``."""
        self._failed.pop(name, None)
        self._lost.discard(name)
        self._show(name, fault="", faulted_ms=0, faults=0)
        if load_s:
            self._show(name, load_s=load_s)
            self.came(name, load_s)

    def forgive(self, weights_of: Callable[[str], str]) -> set[str]:
        """Forget the failures of models that have other weights now; returns their names."""
        found = {name for name, weights in self._failed.items() if weights_of(name) != weights}
        for name in found:
            del self._failed[name]
            self._show(name, fault="", faulted_ms=0, faults=0)
        return found

    def came(self, name: str, seconds: float) -> None:
        """A model was loaded or woken in so many seconds."""
        self._came_s[name] = seconds
        self._note_swap(name)

    def gone(self, name: str, seconds: float) -> None:
        """A model was unloaded or put to sleep in so many seconds."""
        self._gone_s[name] = seconds
        self._note_swap(name)

    def _note_swap(self, name: str) -> None:
        self._show(name, swap_s=self._came_s.get(name, 0.0) + self._gone_s.get(name, 0.0))

    def _show(self, name: str, **fields: Any) -> None:
        self._models[name] = msgspec.structs.replace(self._models[name], **fields)

    def load_failed(
        self, name: str, reason: str, weights: str = "", *, is_lost: bool = False
    ) -> None:
        """A model could not be loaded, with these weights instead of its own.

        ``is_lost``: its process was killed from outside. The first time in a row that is no fault
        of the model; later ones may be the kernel's, because memory runs out.
        """
        if is_lost and name not in self._lost:
            self._lost.add(name)
            return
        self._failed[name] = weights
        faults = self._models[name].faults + 1
        self._show(name, fault=reason, faulted_ms=clock.wall_ms(), faults=faults)


def _model_info(spec: ModelSpec) -> ModelInfo:
    return ModelInfo(
        name=spec.name,
        adapters=[adapter.name for adapter in spec.adapters],
        ranks=spec.ranks,
        pin=spec.pin,
        max_model_wait_s=spec.max_model_wait_s,
        serving=ServingInfo(
            path=spec.path,
            revision=spec.revision,
            max_model_len=spec.max_model_len,
            trust_remote_code=spec.trust_remote_code,
            sampling=dict(spec.sampling),
            serve_args={
                **{name: spec.engine_args[name] for name in OF_ENGINE if name in spec.engine_args},
                **spec.serve_args,
            },
        ),
    )
