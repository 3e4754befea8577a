"""`tokenyard submit` against a running yard."""

from __future__ import annotations

import json
import shlex
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import pytest
import redis
from click.testing import Result

from tests.cli.running import Ask, environment, objects
from tests.support.builders import random_name
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.cli.shared.printer import Printer
from tokenyard.client import submission
from tokenyard.process.program import Exit
from tokenyard.protocol import replies
from tokenyard.protocol.errors import QueueFull
from tokenyard.protocol.keys import Keys


def test_a_prompt_is_answered_on_one_line(ask: Ask) -> None:
    result = ask("submit", "12+34=", "--max-tokens", "4")
    assert result.exit_code == Exit.OK, result.output
    assert len(result.stdout.rstrip("\n")) == 4


def test_answers_come_in_the_order_of_the_prompts(ask: Ask) -> None:
    alone = [ask("submit", prompt).stdout for prompt in ("a", "b", "c")]
    assert ask("submit", "a", "b", "c").stdout == "".join(alone)


def test_prompts_come_from_standard_input_and_from_files(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("c\n\n")
    result = ask("submit", "a", "-", "--file", str(tmp_path / "prompts"), "--json", input="b\n  \n")
    assert [(each["index"], each["prompt"]) for each in objects(result)] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]


def test_a_task_that_pools_prints_numbers(ask: Ask) -> None:
    options = ["--task", "embed"]
    both = ask("submit", *options, "hello", "there")
    assert both.exit_code == Exit.OK, both.output
    lines = [json.loads(line) for line in both.stdout.splitlines()]
    assert [len(line) for line in lines] == [8, 8]
    assert lines[0] != lines[1]

    result = ask("submit", *options, "hello", "--json")
    (found,) = objects(result)
    assert (found["data"], "shapes" in found) == (lines[:1], False)


def test_numbers_have_the_shape_of_their_input(capsys: pytest.CaptureFixture[str]) -> None:
    data = struct.pack("<5f", 0.1, 1.0, 2.0, 3.0, 4.0)
    result = replies.Result(
        id="q", status="completed", tokens=[], data=data, shapes=[[], None, [2, 2]]
    )
    Printer("me", as_json=False).result(result)
    assert capsys.readouterr().out == "0.100000001\nnull\n[[1.0,2.0],[3.0,4.0]]\n"


@pytest.mark.parametrize("options", [["--max-tokens", "3"], ["--stream"], ["--query", "q"]])
def test_what_a_task_does_not_have_is_refused(ask: Ask, options: list[str]) -> None:
    result = ask("submit", "--task", "embed", *options, "hello")
    assert result.exit_code == Exit.USAGE, result.output


def test_a_request_counts_for_its_tenant(ask: Ask) -> None:
    tenant = random_name("tenant")
    result = ask("submit", "--tenant", tenant, "--max-tokens", "3", "hello")
    assert result.exit_code == Exit.OK, result.output
    used = json.loads(ask("tenants", "usage", tenant, "--json").stdout)
    assert [(each["tenant"], each["tokens_out"]) for each in used] == [(tenant, 3)]


Seen = list[tuple[list[Any], dict[str, Any]]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What is asked of a client, which refuses it: prompts and options."""
    found: Seen = []

    class Refusing:
        client_id = "me"

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def map(self, prompts: Iterable[Any], **options: Any) -> None:
            found.append((list(prompts), options))
            raise QueueFull(1.0)

        def submit_many(self, items: list[Any], **options: Any) -> None:
            self.map([item["prompt"] for item in items], **options)

    monkeypatch.setattr("tokenyard.cli.submit.Client", Refusing)
    return found


@pytest.mark.parametrize("texts", [("a",), ("a", "b")])
@pytest.mark.parametrize(
    ("given", "said"), [(("--chat",), []), (("--system", "Be brief."), ["Be brief."])]
)
def test_a_chat_is_asked_with_what_its_system_says(
    invoke: Ask, seen: Seen, given: tuple[str, ...], said: list[str], texts: tuple[str, ...]
) -> None:
    invoke("--redis-url", "redis://h", "submit", *given, "--class", "high", *texts)
    [(prompts, options)] = seen
    first = [{"role": "system", "content": text} for text in said]
    assert prompts == [[*first, {"role": "user", "content": text}] for text in texts]
    assert options["priority_class"] == "high"


@pytest.mark.parametrize(
    ("given", "params"),
    [
        (("--chat",), {"max_tokens": None}),
        (("--chat", "--max-tokens", "7"), {"max_tokens": 7}),
        (("--system", "s", "--param", "max_tokens=8"), {"max_tokens": 8}),
        ((), {}),
    ],
)
def test_an_answer_has_as_many_tokens_as_by_vllms_server(
    invoke: Ask, seen: Seen, given: tuple[str, ...], params: dict[str, Any]
) -> None:
    invoke("--redis-url", "redis://h", "submit", *given, "hi")
    [(_, options)] = seen
    assert options["params"] == params
    assert options["priority_class"] == "normal"


def test_token_ids_are_answered_with_token_ids(ask: Ask) -> None:
    result = ask("submit", "--ids", "1,2,3", "--max-tokens", "2")
    assert result.exit_code == Exit.OK, result.output
    assert len([int(word) for word in result.stdout.split(",")]) == 2


def test_json_has_the_whole_result(ask: Ask) -> None:
    [answer] = objects(ask("submit", "--json", "--max-tokens", "3", "hello"))
    assert answer["status"] == "completed"
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["provenance"]["engine"] == "simulated"
    assert answer["prompt"] == "hello"


def test_a_stream_is_the_same_answer(ask: Ask) -> None:
    whole = ask("submit", "hello")
    streamed = ask("submit", "--stream", "hello")
    assert streamed.stdout == whole.stdout


def test_a_stream_in_json_has_deltas_and_the_result(ask: Ask) -> None:
    *deltas, result = objects(ask("submit", "--stream", "--json", "--max-tokens", "5", "hello"))
    assert {delta["event"] for delta in deltas} == {"delta"}
    assert [token for delta in deltas for token in delta["tokens"]] == result["tokens"]


def test_parameters_have_the_names_of_vllm(ask: Ask) -> None:
    two = ask("submit", "--param", "n=2", "--seed", "1", "--max-tokens", "3", "hello")
    assert len(two.stdout.splitlines()) == 2, two.output


def test_one_failure_of_many_leaves_the_others_complete(ask: Ask) -> None:
    long = "x" * 20_000  # longer than the model's context
    result = ask("submit", "a", long, "b", "--json")
    assert result.exit_code == Exit.FAILED
    assert [each["status"] for each in objects(result)] == ["completed", "failed", "completed"]


def test_the_same_id_runs_once(ask: Ask) -> None:
    client = random_name("client")
    again = [ask("submit", "--client", client, "--id", "q1", "--json", "hi") for _ in range(2)]
    first, second = (objects(result)[0] for result in again)
    assert first == second


@pytest.mark.long
def test_timeout_prints_how_to_get_the_result(ask: Ask) -> None:
    client = random_name("client")
    result = ask(
        "submit", "--timeout", "0.3", "--client", client, "--max-tokens", "600", "long story"
    )
    assert result.exit_code == Exit.TIMEOUT
    said, _ = result.stderr.splitlines()
    assert " continues; for its result: " in said
    command = shlex.split(said.partition(" for its result: tokenyard ")[2])
    assert command[2:] == ["--client", client]
    later = ask(*command, "--timeout", "60")
    assert later.exit_code == Exit.OK
    assert len(later.stdout.strip()) > 100


def test_timeout_of_many_prints_how_to_list_them(ask: Ask) -> None:
    client = random_name("client")
    long = ("--timeout", "0.3", "--client", client, "--max-tokens", "600")
    result = ask("submit", *long, "a story", "another")
    assert result.exit_code == Exit.TIMEOUT
    said = result.stderr.splitlines()[0]
    assert said.endswith(f"continue: tokenyard requests --client {client}")
    listed = ask(*said.partition("tokenyard ")[2].split(), "--json")
    assert [one["client"] for one in json.loads(listed.stdout)] == [client, client]


def test_an_answer_in_json_has_id_and_client(ask: Ask) -> None:
    """`explain` and `result` need both."""
    arguments = ("--json", "--verbose", "--stream", "--max-tokens", "3")
    for client in ("ann-1", None):
        named = ("--client", client) if client else ()
        found = objects(ask("submit", *arguments, *named, "hello"))
        [owner] = {one["client"] for one in found}
        assert client in {None, owner}
        assert {one["event"] for one in found} == {"accepted", "delta", "result"}
        assert (found[0]["event"], found[0]["position"]) == ("accepted", 0)
        told = ask("explain", found[-1]["id"], "--client", owner)
        assert told.exit_code == Exit.OK, told.output


def test_verbose_prints_the_explain_command(ask: Ask) -> None:
    result = ask("submit", "--verbose", "--client", "ann-2", "--id", "it's", "hello")
    command = shlex.split(result.stderr.partition("its timeline: tokenyard ")[2])
    assert "before it" in result.stderr
    assert command == ["explain", "it's", "--client", "ann-2"]
    assert ask(*command).exit_code == Exit.OK


def test_a_failure_prints_the_explain_command(ask: Ask) -> None:
    result = ask("submit", "--model", "nobody-has-it", "--client", "ann-3", "hello")
    assert (result.exit_code, result.stdout) == (Exit.FAILED, "")
    failed, hint = result.stderr.splitlines()
    assert " of client 'ann-3': MODEL_UNAVAILABLE" in failed
    command = shlex.split(hint.partition("tokenyard ")[2])
    assert f"'{command[1]}'" in failed
    assert "MODEL_UNAVAILABLE" in ask(*command).stdout
    several = ask("submit", "--model", "nobody-has-it", "--client", "ann-4", "hello", "again")
    *failures, hint = several.stderr.splitlines()
    assert len(failures) == 2
    listed = ask(*hint.partition("tokenyard ")[2].split(), "--json")
    assert {one["id"] for one in json.loads(listed.stdout)} == {
        failure.split("'")[1] for failure in failures
    }


@pytest.mark.long
def test_ctrl_c_prints_how_to_get_the_result(yard: dict[str, Any], ask: Ask) -> None:
    client = random_name("client")
    command = [sys.executable, "-m", "tokenyard", "--redis-url", yard["url"], "submit"]
    command += ["--client", client, "--id", "q1", "--max-tokens", "600", "--verbose", "a story"]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            accepted = process.stderr.readline()
            assert accepted.startswith("request 'q1' of client")
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=30)[1]
        finally:
            process.kill()
    told = [line for line in rest.splitlines() if "continues" in line]
    later = f"tokenyard result q1 --client {client}"
    assert told == [f"request 'q1' of client '{client}' continues; for its result: {later}"]
    assert "Traceback" not in rest
    assert process.returncode not in {0, None}
    assert ask("result", "q1", "--client", client, "--timeout", "60").exit_code == Exit.OK


def test_accepted_but_not_durable_request_is_named(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a server without a replica."""
    monkeypatch.setattr(submission, "WAIT_S", 0.2)
    client = random_name("client")
    asked = ("hello", "--id", "q1", "--client", client)

    result = ask("submit", *asked, "--durability", "replicated")

    assert result.exit_code == Exit.UNAVAILABLE
    first, why = result.stderr.splitlines()
    later = f"tokenyard result q1 --client {client}"
    assert first.startswith(f"request 'q1' of client '{client}' continues")
    assert first.endswith(f"for its result: {later}")
    assert "accepted, but not known to be safe (durability replicated)" in why
    assert ask("result", "q1", "--client", client, "--timeout", "60").exit_code == Exit.OK
    assert ask("submit", *asked).exit_code == Exit.OK
    assert ask("submit", "hello", "--durability", "certain").exit_code == Exit.USAGE


def test_submit_without_a_coordinator_fails_in_time(ask: Ask) -> None:
    result = ask("--yard", random_name("empty"), "submit", "--timeout", "0.5", "hello")
    assert result.exit_code == Exit.UNAVAILABLE
    assert result.stderr.startswith("Error: ")


def test_submit_waits_for_a_late_coordinator(
    valkey_broker: Server, invoke: Ask, keys: Keys
) -> None:
    results: list[Result] = []
    arguments = ("--redis-url", valkey_broker.url, "--yard", keys.yard, "info")
    assert invoke(*arguments).exit_code == Exit.UNAVAILABLE
    waiting = threading.Thread(
        target=lambda: results.append(
            invoke(*arguments[:-1], "submit", "--timeout", "50", "--json", "hello")
        )
    )
    waiting.start()
    with redis.Redis.from_url(valkey_broker.url) as connection:
        connection.set(keys.leader, "1:late", px=600_000)
        connection.hset(keys.info, mapping={"protocol": 99})
        waiting.join(60)
    # It has read the handshake of the late coordinator.
    eventually(lambda: results)
    assert "99" in results[0].stderr
