"""`tokenyard submit` against a running yard."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from click.testing import Result

from tests.cli.running import tokenyard
from tests.support.builders import random_name
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.keys import Keys
from tokenyard.program import Exit

Ask = Callable[..., Result]


def objects(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


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


def test_parameters_are_vllms(ask: Ask) -> None:
    two = ask("submit", "--param", "n=2", "--seed", "1", "--max-tokens", "3", "hello")
    assert len(two.stdout.splitlines()) == 2, two.output


def test_an_unknown_parameter_is_wrong_usage(ask: Ask) -> None:
    result = ask("submit", "--param", "tempperature=1", "hello")
    assert result.exit_code == Exit.USAGE
    assert "tempperature" in result.stderr


def test_a_failed_request_says_why(ask: Ask) -> None:
    result = ask("submit", "--model", "nobody-has-it", "hello")
    assert result.exit_code == Exit.FAILED
    assert "MODEL_UNAVAILABLE" in result.stderr
    assert result.stdout == ""


def test_one_failure_of_many_leaves_the_others(ask: Ask) -> None:
    long = "x" * 20_000  # more than the model takes
    result = ask("submit", "a", long, "b", "--json")
    assert result.exit_code == Exit.FAILED
    assert [each["status"] for each in objects(result)] == ["completed", "failed", "completed"]


def test_the_same_id_runs_once(ask: Ask) -> None:
    client = random_name("client")
    again = [ask("submit", "--client", client, "--id", "q1", "--json", "hi") for _ in range(2)]
    first, second = (objects(result)[0] for result in again)
    assert first == second


def test_when_time_is_over_it_says_how_to_get_the_result(ask: Ask) -> None:
    client = random_name("client")
    result = ask(
        "submit", "--timeout", "0.3", "--client", client, "--max-tokens", "300", "long story"
    )
    assert result.exit_code == Exit.TIMEOUT
    [line] = result.stderr.splitlines()
    request_id = line.split("--id ")[1].split()[0]
    later = ask("submit", "--client", client, "--id", request_id, "long story")
    assert later.exit_code == Exit.OK
    assert len(later.stdout.strip()) > 100


def test_without_a_coordinator_it_gives_up_in_time(ask: Ask) -> None:
    result = ask("--yard", random_name("empty"), "submit", "--timeout", "0.5", "hello")
    assert result.exit_code == Exit.UNAVAILABLE
    assert result.stderr.startswith("Error: ")


def test_a_coordinator_that_comes_late_is_waited_for(
    valkey_broker: Server, invoke: Callable[..., Result], keys: Keys
) -> None:
    results: list[Result] = []
    arguments = ("--redis-url", valkey_broker.url, "--yard", keys.yard, "info")
    assert invoke(*arguments).exit_code == Exit.UNAVAILABLE
    waiting = threading.Thread(
        target=lambda: results.append(
            invoke(*arguments[:-1], "submit", "--timeout", "20", "--json", "hello")
        )
    )
    waiting.start()
    with redis.Redis.from_url(valkey_broker.url) as connection:
        connection.set(keys.leader, "1:late", px=20_000)
        connection.hset(keys.info, mapping={"protocol": 99})
        waiting.join(20)
    # It has seen the coordinator that came, and what that speaks.
    eventually(lambda: results)
    assert "99" in results[0].stderr


def test_it_is_a_program(yard: dict[str, Any]) -> None:
    done = tokenyard("--redis-url", yard["url"], "submit", "--max-tokens", "2", "hello")
    assert done.returncode == Exit.OK, done.stderr
    assert len(done.stdout.rstrip("\n")) == 2
