"""The header of each Lua file documents keys, arguments and answers as its method uses them."""

from __future__ import annotations

import ast
import enum
import inspect
import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import pytest
import redis

from tests.test_architecture import PACKAGES, ROOT
from tokenyard.protocol.keys import Keys
from tokenyard.scripts import answers, calls, client, leader, worker

LUA = Path(str(resources.files("tokenyard"))) / "scripts" / "lua"
NAMES = sorted(path.stem for path in LUA.glob("*.lua"))
INCLUDES = sorted(path.stem for path in (LUA / "include").glob("*.lua"))
TYPES = r"\((?:string|hash|stream|zset|set)\)"

#: The Python enum of a script's answers, if they have names.
ENUMS: dict[str, type[enum.IntEnum]] = {
    "submit": answers.Submitted,
    "dispatch": answers.Dispatched,
    "answer": answers.Answered,
    "bury": answers.Answered,
    "emit": answers.Published,
    "finish": answers.Published,
    "cancel": answers.Cancelled,
    "hand_back": answers.HandedBack,
    "transfer": answers.Transferred,
}
#: Scripts name a success after their action, enums by one word for all their scripts.
SUCCESS = {"ANSWERED": "DONE", "BURIED": "DONE", "FINISHED": "PUBLISHED"}
CONSTANTS: dict[str, dict[str, int]] = {
    "rescue": {"HELD": leader.RESCUE_HELD},
    "acquit": {"ACQUITTED": True, "CHANGED": False},
    "settle_cancelled": {"SETTLED": True, "STALE": False},
    "renew": {"HELD": True, "LOST": False},
    "request_cancel": {"REQUESTED": True, "FULL": False},
    "reconcile": {"ENDED": True, "STAYS": False},
    "retire": {"UNKNOWN": worker.RETIRE_UNKNOWN},
    "recognize": {},
    "record": {"RECORDED": 1, "NOT_LEADER": 0},
    "recount": {},
    "shift_leases": {},
    "resign": {"RESIGNED": 1, "NOT_LEADER": 0},
    "take_over": {"READY": 1},
}
#: Scripts that answer with texts or a single number.
WITHOUT_CODES = {
    "acknowledge",
    "astray",
    "attend",
    "command",
    "configure",
    "lead",
    "overdue",
    "probe",
    "register",
    "requeue",
    "signal",
    "stand_by",
    "watch_clients",
}


@dataclass
class Header:
    """The comment at the top of a Lua file."""

    purpose: str
    sections: dict[str, str] = field(default_factory=dict)

    def indices(self, table: str) -> set[int]:
        """Indices of KEYS or ARGV that are documented one by one."""
        return {
            int(i) for i in re.findall(rf"{table}\[(\d+)(?:\.\.\.)?\]", " ".join(self.sections))
        }

    def open_from(self, table: str) -> int | None:
        """First index of the repeating rest, or None."""
        found = re.search(rf"{table}\[(\d+)\.\.\.\]", " ".join(self.sections))
        return int(found[1]) if found else None


def read_header(name: str) -> tuple[Header, str]:
    """The header of a file, and its code without comments."""
    lines = (LUA / f"{name}.lua").read_text().splitlines()
    if lines[0].startswith("#!"):
        lines = lines[1:]
    end = next(i for i, line in enumerate(lines) if not line.startswith("--"))
    text = [line[2:].strip() for line in lines[:end]]
    start = next(i for i, line in enumerate(text) if not line)
    header = Header(" ".join(text[:start]))
    current = ""
    for line in text[start + 1 :]:
        opening = re.match(r"(KEYS\[\S+\]|ARGV\[\S+\]|Returns|Atomic|Without)\s*,?\s*(.*)", line)
        if opening:
            current = opening[1]
            header.sections[current] = opening[2]
        else:
            header.sections[current] += " " + line
    code = "\n".join(re.sub(r"--.*", "", line) for line in lines[end:])
    return header, code


def method_of(name: str) -> ast.FunctionDef:
    """The only function in tokenyard.scripts that names this file."""
    found = [
        function
        for module in (client, leader, worker)
        for function in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(function, ast.FunctionDef)
        and any(
            isinstance(node, ast.Call)
            and any(isinstance(arg, ast.Constant) and arg.value == name for arg in node.args)
            and ast.unparse(node.func) in ("self._run", "self._run_as_leader", "Call")
            for node in ast.walk(function)
        )
    ]
    assert len(found) == 1, f"{name}.lua: called by {[function.name for function in found]}"
    return found[0]


@pytest.mark.parametrize("name", NAMES)
def test_header_has_purpose_keys_answers_and_reason_for_atomicity(name: str) -> None:
    header, _ = read_header(name)

    assert header.purpose.endswith(".")
    assert {"KEYS[1]", "KEYS[1...]"} & header.sections.keys()
    assert header.sections["Returns"]
    is_reader = "no-writes" in calls.source(name).splitlines()[0]
    reason = "by itself" if is_reader else "because "
    assert header.sections["Atomic"].startswith(reason)
    for section, text in header.sections.items():
        if section.startswith("KEYS"):
            assert re.search(TYPES, text), f"{section}: of which type?"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("table", ["KEYS", "ARGV"])
def test_header_documents_exactly_the_indices_of_the_code(name: str, table: str) -> None:
    header, code = read_header(name)
    documented, rest = header.indices(table), header.open_from(table)
    used = {int(index) for index in re.findall(rf"{table}\[(\d+)\]", code)}

    assert documented == set(range(1, len(documented) + 1)), "no gaps"
    assert used <= documented
    assert documented - used <= ({rest} if rest else set()) | _named_by_loops(code)
    if rest:
        assert rest == max(documented)
        walked = rf"{table}\[[^\d\]]|unpack\({table}, "
        assert re.search(walked, code), "the rest is walked by a variable"


def _named_by_loops(code: str) -> set[int]:
    """Indices in a loop over literal bounds, `for i = 2, 5`."""
    return {
        index
        for low, high in re.findall(r"for i = (\d+), (\d+) do", code)
        for index in range(int(low), int(high) + 1)
    }


#: Expressions that build a key in a method, where they are not the key's own name.
BUILDERS = {
    "request": {r"\.ledger\("},
    "reply": {r"\.reply\(", r"destination\("},
    "replies": {r"\.replies\(", r"destination\("},
}


def builders(word: str) -> set[str]:
    """Expressions that build the key that begins with this word."""
    is_function = inspect.isfunction(getattr(Keys, word, None))
    return BUILDERS.get(word, {rf"\.{word}\(" if is_function else rf"\.{word}\b"})


def keys_of(header: Header) -> set[str]:
    """The first words of the keys of a script."""
    keys = " ".join(text for section, text in header.sections.items() if "KEYS" in section)
    return {
        alternative.partition(":")[0]
        for alternatives in re.findall(rf"(\S+(?: or \S+)*) {TYPES}", keys)
        for alternative in alternatives.split(" or ")
    }


@pytest.mark.parametrize("name", NAMES)
def test_one_method_builds_exactly_the_keys_of_the_header(name: str) -> None:
    """Given the keys in the header, I expect the method to build exactly these."""
    header, _ = read_header(name)
    method = ast.unparse(method_of(name))

    named = keys_of(header)

    assert named
    for word in set().union(*(keys_of(read_header(other)[0]) for other in NAMES)):
        is_built = any(re.search(builder, method) for builder in builders(word))
        is_another = any(builders(word) & builders(other) for other in named - {word})
        assert is_built is (word in named) or is_another, word


@pytest.mark.parametrize("name", NAMES)
def test_answers_in_the_header_match_code_and_python(name: str) -> None:
    header, code = read_header(name)
    documented = {
        word: int(number)
        for number, word in re.findall(r"(-?\d),? ([A-Z]{3}[A-Z_]*)", _codes(header))
    }
    if name in WITHOUT_CODES:
        assert not documented
        return
    assigned = re.search(
        r"^local ((?:[A-Z_]+, )*[A-Z_]+) = (-?\d+(?:, -?\d+)*)$", code, re.MULTILINE
    )
    assert assigned
    numbers = (int(number) for number in assigned[2].split(", "))
    assert documented == dict(zip(assigned[1].split(", "), numbers, strict=True))
    python = {code.name: code.value for code in ENUMS[name]} if name in ENUMS else CONSTANTS[name]
    python = {"NOT_LEADER": calls.NOT_LEADER} | python
    for word, number in documented.items():
        assert python[SUCCESS.get(word, word)] == number


def _codes(header: Header) -> str:
    """The Returns line, with `{1, server id} ACCEPTED` read as `1 ACCEPTED`."""
    return re.sub(r"\{(\d), [^}]+\}", r"\1", header.sections["Returns"])


@pytest.mark.parametrize("kind", sorted({kind.__name__ for kind in ENUMS.values()}))
def test_every_answer_in_python_is_given_by_a_script(kind: str) -> None:
    returns = " ".join(
        read_header(name)[0].sections["Returns"]
        for name, enum_ in ENUMS.items()
        if enum_.__name__ == kind
    )
    words = {SUCCESS.get(word, word) for word in re.findall(r"[A-Z_]{4,}", returns)}

    assert {code.name for code in getattr(answers, kind)} <= words


@pytest.mark.parametrize("name", NAMES)
def test_includes_exist_and_are_spliced_in(name: str) -> None:
    _, code = read_header(name)
    text = (LUA / f"{name}.lua").read_text()
    included = re.findall(r"^-- @include (\w+)$", text, re.MULTILINE)

    for include in included:
        assert re.search(rf"\b{include}\(", code), f"{include} is not used"
    assert "@include" not in calls.source(name)
    assert {word for word in INCLUDES if re.search(rf"\b{word}\(", code)} == set(included)


def test_every_include_is_explained_and_needed() -> None:
    everything = "".join(path.read_text() for path in LUA.rglob("*.lua"))

    for include in INCLUDES:
        assert (LUA / "include" / f"{include}.lua").read_text().startswith("-- ")
        assert f"-- @include {include}\n" in everything


def test_only_new_requests_are_refused_by_a_server_without_memory() -> None:
    flags = {name: calls.source(name).splitlines()[0] for name in NAMES}
    refusing = [name for name, line in flags.items() if not re.search("allow-oom|no-writes", line)]

    assert refusing == ["probe", "requeue", "submit"]


# On a Redis Cluster: `calls._command` says why each call names a key that never exists.


@pytest.mark.parametrize("name", NAMES)
def test_a_script_refuses_a_call_without_the_key_that_never_exists(
    name: str, connection: redis.Redis, keys: Keys
) -> None:
    with pytest.raises(redis.ResponseError, match="the last of KEYS must be <yard>:never"):
        connection.eval(calls.source(name), 1, keys.info)
    assert not list(connection.scan_iter(keys.lane("").removesuffix("lane:") + "*", count=10_000))


def test_every_call_names_that_key_and_no_script_writes_it() -> None:
    # Given the only place that names the command
    callers = [
        file.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if re.search(r"[\"'](?:FCALL|EVALSHA)[\"']", file.read_text())
    ]
    assert callers == ["tokenyard/scripts/calls.py"]
    assert inspect.getsource(calls).count('"EVALSHA"') == 1

    # I expect it to add the key, and nobody else to know its name.
    call = client.probe(Keys("y"))
    assert calls.command_of(call)[2:] == (2, *call.keys, "tokenyard:{y}:never")
    assert not any("never'" in path.read_text() for path in LUA.rglob("*.lua"))


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_a_script_derives_are_of_its_own_slot(name: str) -> None:
    """They begin as one of KEYS does, so that they are at the node that runs it."""
    subcommands = "MEMORY', 'USAGE|XINFO', 'STREAM|"
    keyed = rf"redis\.p?call\(\s*'(?:{subcommands}[A-Z]+)',\s*([^,)]+)"
    named = re.findall(keyed, calls.source(name))

    assert not [key for key in named if key.startswith(("'", '"'))]
