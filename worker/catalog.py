"""What this host may load, and what became of it the last time: its entry in the yard."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

import msgspec

from tokenyard.settings import WorkerSettings
from tokenyard.worker_info import HostInfo, ModelInfo
from worker.models import ModelSpec, read_models


def read_catalog(settings: WorkerSettings) -> dict[str, ModelSpec]:
    """The models of the file, or the one model of the settings.

    Raises `tokenyard.errors.SettingsError`.
    """
    if settings.models:
        return read_models(settings.models)
    spec = ModelSpec(
        name=settings.serves,
        path=settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len or None,
        max_num_seqs=settings.max_num_seqs,
        enforce_eager=settings.enforce_eager,
        engine_args=msgspec.json.decode(settings.engine_args, type=dict),
    )
    return {spec.name: spec}


class HostEntry:
    """Keeps the host's entry up to date."""

    def __init__(self, settings: WorkerSettings, catalog: Mapping[str, ModelSpec]) -> None:
        self._settings = settings
        self._models = {name: _model_info(spec) for name, spec in catalog.items()}

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
        """A model has been loaded, and how long it took."""
        model = self._models[name]
        self._models[name] = msgspec.structs.replace(
            model, load_s=load_s or model.load_s, fault="", faulted_ms=0, faults=0
        )

    def faulted(self, name: str, reason: str) -> None:
        """A model could not be loaded."""
        model = self._models[name]
        self._models[name] = msgspec.structs.replace(
            model, fault=reason, faulted_ms=int(time.time() * 1000), faults=model.faults + 1
        )


def _model_info(spec: ModelSpec) -> ModelInfo:
    return ModelInfo(
        name=spec.name,
        adapters=[adapter.name for adapter in spec.adapters],
        ranks=spec.ranks,
        pin=spec.pin,
        max_model_wait_s=spec.max_model_wait_s,
    )
