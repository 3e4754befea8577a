"""From the announcements of hosts to the profiles of models: pure functions.

Announcements come from other machines and other versions: what cannot be read is left out, and what
a gateway must not do makes the model a fault.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import msgspec

from tokenyard.protocol.serve_args import problem
from tokenyard.protocol.wire import SamplingParams
from tokenyard.protocol.worker_info import (
    HostInfo,
    ModelInfo,
    ServingInfo,
    decode_host,
    split_hosts,
)

#: Defaults for sampling that vLLM's front end applies, and their names in a generation config.
_SAMPLING: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}
_MAX_NAME_BYTES: Final = 200


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model, and the arguments of ``vllm serve`` that shape its requests and answers."""

    name: str
    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Sampling parameters that the front end fills in, so that a worker's default does not.
    stated: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()  # names, which requests use like a model's
    fault: str = ""  # why it cannot be served, as far as its announcement shows

    @property
    def fingerprint(self) -> str:
        """The same on all gateways that render this model in the same way."""
        shown = json.dumps([self.name, self.path, dict(self.arguments)], sort_keys=True)
        return f"tokenyard-{blake2b(shown.encode(), digest_size=4).hexdigest()}"


@dataclass(frozen=True, slots=True)
class OwnRules:
    """What the operator of this gateway has said, beside what hosts announce."""

    paths: Mapping[str, str] = field(default_factory=dict)  # model to its place on this machine
    trust_remote_code: bool = False
    allowed_media_domains: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Announced:
    """What all hosts say together, and what is wrong with it."""

    profiles: Mapping[str, ModelProfile]  # by name of the model
    complaints: Collection[str]
    load_faults: Mapping[str, str] = field(default_factory=dict)  # where no host can load it
    only: str = ""  # the only model that is there; where none is, the only one


def read_hosts(entries: Mapping[bytes, bytes], live: Collection[str], rules: OwnRules) -> Announced:
    """The models of all hosts.

    Where hosts differ, all gateways must choose the same: the first by name of those in ``live``
    (controllers with workers), else the last to stop. A name to which this gateway has a path is
    known before any host announces it.
    """
    hosts, complaints = _decoded(entries)
    there, gone = split_hosts(hosts, live)
    there.sort(key=lambda host: host.name)
    hosts = [*there, *gone]
    profiles: dict[str, ModelProfile] = {}
    by: dict[str, str] = {}
    for host in hosts:
        for model in host.models:
            if model.serving is None or not _is_usable(model.name):
                continue
            profile = profile_of(model, model.serving, rules)
            counts = profiles.setdefault(model.name, profile)
            first = by.setdefault(model.name, host.name)
            if counts != profile and host.name in live:
                complaints.append(
                    f"hosts {first} and {host.name} announce {model.name!r} with other settings; "
                    f"those of {first} count: give all hosts the same models file"
                )
    infos = [model for host in hosts for model in host.models]
    adapters = {name for profile in profiles.values() for name in profile.adapters}
    own = {name: path for name, path in rules.paths.items() if name not in adapters}
    known = {name: ModelProfile(name, path) for name, path in own.items()} | profiles
    bases = known.keys() & {model.name for host in there for model in host.models} or known.keys()
    loadable = {model.name for model in infos if not model.fault}
    faults = {one.name: f"it cannot be loaded: {one.fault}" for one in infos if one.fault}
    return Announced(
        known,
        complaints,
        {name: fault for name, fault in faults.items() if name not in loadable},
        next(iter(bases)) if len(bases) == 1 else "",
    )


def _decoded(entries: Mapping[bytes, bytes]) -> tuple[list[HostInfo], list[str]]:
    hosts, complaints = [], []
    for name, packed in entries.items():
        try:
            hosts.append(decode_host(packed))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            complaints.append(f"the entry of host {name!r} cannot be read: {error}")
    return hosts, complaints


def profile_of(model: ModelInfo, serving: ServingInfo, rules: OwnRules) -> ModelProfile:
    """The profile of one announced model."""
    fault = next(_faults(serving), "")
    arguments: dict[str, Any] = dict(serving.serve_args)
    stated = tuple(name for name in _SAMPLING if name in serving.sampling)
    arguments["override_generation_config"] = {
        _SAMPLING[name]: serving.sampling[name] for name in stated
    }
    if serving.revision:
        arguments["revision"] = serving.revision
    if serving.max_model_len:
        arguments["max_model_len"] = serving.max_model_len
    if serving.trust_remote_code and rules.trust_remote_code:
        arguments["trust_remote_code"] = True
    adapters = tuple(name for name in model.adapters if _is_usable(name) and name != model.name)
    path = rules.paths.get(model.name, serving.path)
    return ModelProfile(model.name, path, arguments, stated, adapters, fault)


def _faults(serving: ServingInfo) -> Iterator[str]:
    for name, value in serving.serve_args.items():
        if why := problem(name, value):
            yield f"its host announces {name!r} in serve_args, which cannot be applied: {why}"
    given = {name: value for name, value in serving.sampling.items() if name in _SAMPLING}
    try:
        msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        yield f"its host announces sampling defaults that cannot be applied: {error}"


def by_request_name(profiles: Mapping[str, ModelProfile]) -> dict[str, ModelProfile]:
    """The profile for each name that a request may use; an adapter has that of its model."""
    found = {
        name: profile
        for base in sorted(profiles, reverse=True)
        for profile in [profiles[base]]
        for name in profile.adapters
    }
    return found | dict(profiles)


def _is_usable(name: str) -> bool:
    return name.isprintable() and 0 < len(name.encode(errors="replace")) <= _MAX_NAME_BYTES
