"""The model that a bridge serves, as the yard announces it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from gateway.announcements import ModelProfile, OwnRules, read_hosts
from tokenyard import clock
from tokenyard.broker.connection import open_connection, translated
from tokenyard.protocol.errors import SettingsError, TokenyardError
from tokenyard.protocol.gateway_settings import BridgedTask, BridgeSettings
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.serve_args import OF_ENGINE
from tokenyard.protocol.worker_info import decode_workers

log = logging.getLogger("tokenyard.bridge")

#: Time between two looks at what hosts announce.
_LOOK_S: Final = 0.25
_TASKS: Final[tuple[BridgedTask, ...]] = get_args(BridgedTask)


class NotAnnounced(Exception):
    """No host has it yet, or no worker what must be known of it."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model by its name in the yard, its place on hosts, and what a front end asks of it."""

    name: str
    path: str
    max_model_len: int  # tokens
    adapters: int  # how many it has
    task: BridgedTask
    arguments: Mapping[str, Any]  # of the engine, that a front end needs too


def until_announced(
    settings: BridgeSettings,
    is_stopped: Callable[[], object],
    turned: Callable[[str], object],
    fatal: type[TokenyardError],
) -> ServedModel | None:
    """The model, once a host announces it; None where that is not to be waited for any more.

    ``turned`` is told after each look why it waits. Raises errors of the kind ``fatal``.
    """
    keys, told = Keys(settings.yard), ""
    with open_connection(settings.redis_url) as connection:
        run: Any = connection
        while not is_stopped():
            try:
                with translated(settings.redis_url):
                    return find_model(run.hgetall(keys.hosts), run.hgetall(keys.workers), settings)
            except fatal:
                raise
            except (NotAnnounced, TokenyardError) as error:
                why = str(error)
            turned(why)
            if why != told:
                log.warning("waiting: %s", why)
                told = why
            clock.sleep(_LOOK_S)
    return None


def find_model(
    hosts: Mapping[bytes, bytes], workers: Mapping[bytes, bytes], settings: BridgeSettings
) -> ServedModel:
    """The model of ``settings``, or the yard's only one.

    Raises `NotAnnounced`, or `SettingsError` where the yard has several, or the front end cannot
    ask for the model's task.
    """
    announced, loaded = read_hosts(hosts, (), OwnRules()), decode_workers(workers).values()
    names = sorted(announced.profiles.keys() | {one.model for one in loaded if one.model})
    name = settings.model or announced.only or (names[0] if len(names) == 1 else "")
    if not name and names:
        raise SettingsError([f"model: give one of {', '.join(names)}"])
    if name not in names:
        raise NotAnnounced(f"no host announces the model {name!r}" if name else "no host is there")
    profile = announced.profiles.get(name) or ModelProfile(name, "")
    ready = [one for one in loaded if one.model == name]
    own = max((one.max_model_len for one in ready), default=0)
    known = (settings.max_model_len, profile.arguments.get("max_model_len"), own)
    most = next((int(one) for one in known if one), 0)
    if not most:
        why = f"no worker has loaded {name!r} yet, and its models file does not say"
        raise NotAnnounced(f"{why}: give max_model_len to begin before one has")
    told = {task for one in ready for task in one.tasks}
    task = settings.task
    if task == "auto":
        if not told and profile.arguments.get("runner") == "pooling":
            why = f"no worker has loaded {name!r} yet"
            raise NotAnnounced(f"{why}: give task to begin before one has")
        if not told and settings.front == "vllm":
            log.warning("no worker has loaded %r yet: it is taken for one that generates", name)
        task = next((one for one in _TASKS if one in told), "generate")
    replace(settings, task=task)  # raises where the front end cannot ask for it
    shared = {key: one for key, one in profile.arguments.items() if key in OF_ENGINE}
    return ServedModel(name, profile.path, most, len(profile.adapters), task, shared)
