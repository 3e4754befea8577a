"""Every kind of model: a client, HTTP, a batch, a bridge have the answers of `vllm.LLM`."""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args

import httpx
import msgspec
import numpy as np
import pytest
from openai import OpenAI

from benchmarks.media_models import picture, shown, write_picture_model, write_sound_model
from benchmarks.pooling_models import ENGINE_ARGS, Kind, write_pooling_model
from tests.batch.running import batch
from tests.engines.test_media import TEXT, WRITE_DOWN, said, sound
from tests.engines.test_pooling import NEAR, QUERY, TASKS_OF, TEXTS
from tests.gateway.stand import Door
from tests.gateway.test_batches import ended, lines_of, order, upload
from tests.support.builders import random_name
from tests.support.llm import GREEDY, answers_of_llm
from tests.support.media_models import SeeingKind
from tests.support.processes import ROOT, Plant, Program
from tests.support.servers import Server
from tests.support.torchvision import torchvision
from tests.support.waiting import eventually
from tokenyard import Client, arrays
from tokenyard.process.embedded_broker import free_port
from tokenyard.protocol.media import name_of
from tokenyard.protocol.wire import Request, SamplingParams, pack_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

CHATS: Final = "/v1/chat/completions"
TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
#: Of the tasks that pool, the endpoint and what it calls the texts.
ENDPOINTS: Final = {
    "embed": ("/v1/embeddings", "input"),
    "classify": ("/classify", "input"),
    "token_embed": ("/pooling", "input"),
    "token_classify": ("/pooling", "input"),
    "score": ("/score", "text_2"),
}
SOUND: Final = sound()
HEARD: Final = {
    "type": "input_audio",
    "input_audio": {"data": base64.b64encode(SOUND).decode(), "format": "wav"},
}
PICTURES: Final = [
    said(shown(picture(1)), TEXT),
    said(shown(picture(1)), TEXT, shown(picture(2, 30, 120))),
]
CONVERSATIONS: Final[dict[str, list[Any]]] = {
    "smolvlm": PICTURES,
    "qwen2_audio": [said(HEARD, TEXT)],
    **dict.fromkeys(get_args(SeeingKind), PICTURES),
}


class BatchWorker(Program):
    """Runs the batches of a yard."""

    def _start(self, module: str, words: list[str]) -> Any:
        return super()._start(module, [*words, "batch", "worker"])


class Kinds:
    """A yard whose one worker may load a model of any kind, and a gateway before it."""

    def __init__(self, broker: Server, folder: Path) -> None:
        self.folder = folder
        self.models = {
            **{kind: write_pooling_model(kind, folder / kind) for kind in get_args(Kind)},
            "smolvlm": write_picture_model(folder / "smolvlm"),
            "whisper": write_sound_model(folder / "whisper"),
        }
        more = folder / "more"
        more.mkdir()
        command = [sys.executable, "-m", "tests.support.media_models", str(more)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=200)
        self.models |= {path.name: path for path in more.iterdir()}
        assert len(self.models) == 14
        self.plant = Plant(broker.url)
        file = folder / "models.toml"
        file.write_text(self._models_file())
        self.plant.coordinator()
        self.plant.host(file, engine="vllm", device="cpu", slots=1, leak_tolerance=1.0)
        self.door = Door(self.plant, set(self.models), is_forked=False, files_dir=folder / "files")

    def _models_file(self) -> str:
        lines = ['[defaults]\ndtype = "float32"\nmax_num_seqs = 16\nenforce_eager = true']
        lines += ["kv_cache_gib = 0.0625\nmax_model_wait_s = 0.5"]
        for name, path in self.models.items():
            lines.append(f'[models.{name}]\npath = "{path}"')
            for key, value in ENGINE_ARGS.get(name, {}).items():  # type: ignore[call-overload]
                task = value["task"] if key == "pooler_config" else ""
                shown_as = f'{{ task = "{task}" }}' if task else json.dumps(value)
                lines.append(f"engine_args.{key} = {shown_as}")
        return "\n".join(lines)


@pytest.fixture(scope="module")
def kinds(
    no_leftover_processes: None, valkey_broker: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kinds]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(torchvision()))
        made = Kinds(valkey_broker, tmp_path_factory.mktemp("kinds"))
        with made.plant:
            made.door.wait()
            made.plant._start("tokenyard", {}, BatchWorker)
            yield made


@pytest.fixture
def client(kinds: Kinds) -> Iterator[Client]:
    with Client(kinds.plant.url, kinds.plant.keys.yard, result_timeout_s=120.0) as one:
        yield one


@pytest.fixture
def http(kinds: Kinds) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=kinds.door.url, timeout=120.0) as one:
        yield one


def answers_of_batch(kinds: Kinds, url: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """The bodies of the answers to a batch over HTTP, in the order of its lines."""
    lines = [
        {"custom_id": f"{at:02}", "method": "POST", "url": url, "body": body}
        for at, body in enumerate(bodies)
    ]
    with OpenAI(base_url=f"{kinds.door.url}/v1", api_key="none", timeout=90.0) as sdk:
        done = ended(sdk, order(sdk, upload(sdk, lines), url).id)
        assert done.error_file_id is None, sdk.files.content(done.error_file_id).text
        found = sorted(lines_of(sdk, done.output_file_id), key=lambda line: line["custom_id"])
    return [line["response"]["body"] for line in found]


def rows_of_table(kinds: Kinds, kind: str, task: str) -> list[Any]:
    """The last column of a table of the texts."""
    source, target = (kinds.folder / f"{random_name('table')}.jsonl" for _ in range(2))
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    named = ("--model", kind, "--task", task, "--column", "text", "--into", "numbers")
    ended_as = batch(kinds.plant, "run", source, "-o", target, *named, timeout_s=200.0)
    assert ended_as.returncode == 0, ended_as.stderr
    return [json.loads(line)["numbers"] for line in target.read_text().splitlines()]


@contextlib.contextmanager
def behind_vllm_serve(kinds: Kinds, kind: Kind) -> Iterator[httpx.Client]:
    """A front end of vLLM for a model that is loaded; its engine is the yard."""
    port = free_port()
    rest = {"": kinds.models[kind], "host": "127.0.0.1", "port": port, "dtype": "float32"}
    options = {"front": "vllm", "model": kind, "metrics_port": 0}
    unit = kinds.plant._start("gateway.bridge", options | rest)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0) as client:

        def is_up() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return client.get("/health").is_success
            return False

        try:
            eventually(is_up, timeout_s=300)
            yield client
        finally:
            unit.stop()


@pytest.mark.parametrize("kind", get_args(Kind))
def test_numbers(
    kind: Kind, kinds: Kinds, client: Client, http: httpx.Client, tmp_path: Path
) -> None:
    expected = answers_of_llm(
        kinds.models[kind],
        tmp_path,
        engine_args=ENGINE_ARGS[kind],
        pool=TASKS_OF[kind],
        texts=TEXTS,
        query=QUERY,
    )
    client.submit([*TEXTS], model=kind, task=TASKS_OF[kind][0]).result()
    with behind_vllm_serve(kinds, kind) as bridged:
        # A request that fails ends no other, nor the front end.
        path, name = ENDPOINTS[TASKS_OF[kind][0]]
        late = {"X-Request-Id": "~~normal~~1~late"}  # its deadline is in 1970
        assert bridged.post(path, json={"model": kind, name: "a"}, headers=late).is_server_error
        check_numbers(kind, kinds, client, http, bridged, expected)


def check_numbers(
    kind: Kind,
    kinds: Kinds,
    client: Client,
    http: httpx.Client,
    bridged: httpx.Client,
    expected: Mapping[str, list[Any]],
) -> None:
    for task in TASKS_OF[kind]:
        assert len({str(one) for one in expected[task]}) == len(TEXTS)
        is_score = task == "score"
        path, name = ENDPOINTS[task]
        body = {"model": kind, name: TEXTS, **({"text_1": QUERY} if is_score else {})}
        over_http, over_bridge = (one.post(path, json=body) for one in (http, bridged))
        assert over_http.status_code == 200, over_http.text
        assert over_bridge.status_code == 200, over_bridge.text
        query = {"query": QUERY} if is_score else {}
        result = client.submit([*TEXTS], model=kind, task=task, **query).result()
        [again] = (
            answers_of_batch(kinds, "/v1/score", [body])
            if is_score
            else [rows_of_table(kinds, kind, task)]
        )
        found = {
            "client": [one for one in arrays(result) if one is not None],
            "http": [numbers_in(one) for one in over_http.json()["data"]],
            "bridge": [numbers_in(one) for one in over_bridge.json()["data"]],
            "batch": [numbers_in(one) for one in again["data"]] if is_score else again,
        }
        for way, answers in found.items():
            assert len(answers) == len(TEXTS), way
            for one, theirs in zip(answers, expected[task], strict=True):
                flat = np.asarray(one, np.float32)
                np.testing.assert_allclose(
                    flat.reshape(np.shape(theirs)), theirs, **NEAR, err_msg=f"{task} by {way}"
                )


def numbers_in(answer: dict[str, Any]) -> Any:
    """The numbers of one text in the answer of an endpoint."""
    (name,) = answer.keys() & {"embedding", "probs", "data", "score"}
    return answer[name]


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_pictures_and_sound_in_a_chat(
    kind: str, kinds: Kinds, client: Client, http: httpx.Client, tmp_path: Path
) -> None:
    chats = CONVERSATIONS[kind]
    expected = answers_of_llm(kinds.models[kind], tmp_path, chats=chats)["chats"]
    results = [client.submit(chat, model=kind, **GREEDY).result() for chat in chats]
    bodies = [{"model": kind, "messages": chat, **GREEDY} for chat in chats]
    over_http = [http.post(CHATS, json=body).json() for body in bodies]

    assert [[one.usage.prompt_tokens, one.tokens, one.text] for one in results] == expected
    texts = [[prompt_tokens, text] for prompt_tokens, _, text in expected]
    assert [text_in(one) for one in over_http] == texts
    assert [text_in(one) for one in answers_of_batch(kinds, CHATS, bodies)] == texts
    assert len({text for _, text in texts}) == len(chats)


def text_in(answer: dict[str, Any]) -> list[Any]:
    """The prompt's tokens and the text of a chat completion."""
    assert "choices" in answer, answer
    return [answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]]


def test_a_transcription(kinds: Kinds, http: httpx.Client, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model, file = kinds.models["whisper"], tmp_path / "a.wav"
    file.write_bytes(SOUND)
    prompt = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(WRITE_DOWN)
    told = answers_of_llm(model, tmp_path, sound=str(file), prompt=prompt)["sound"]
    [[_, tokens, text]] = told

    # A client has no form for it: it builds the prompt, and names the sound.
    plant, name = kinds.plant, name_of(SOUND)
    request = Request(
        id="heard",
        model="whisper",
        tokens=pack_tokens(prompt),
        media={"audio": [name]},
        params=SamplingParams(**GREEDY),  # type: ignore[arg-type]
    )
    plant.connection.set(plant.keys.media("anon", "heard"), msgspec.msgpack.encode({name: SOUND}))
    plant.push(request)
    assert plant.result("heard", timeout_s=120.0).tokens == tokens

    form = {"model": "whisper", "language": "en", "temperature": 0, "max_completion_tokens": 12}
    heard = http.post(TRANSCRIPTIONS, data=form, files={"file": ("a.wav", SOUND)})
    assert heard.status_code == 200, heard.text
    url = f"data:audio/wav;base64,{base64.b64encode(SOUND).decode()}"
    [batched] = answers_of_batch(kinds, TRANSCRIPTIONS, [{**form, "file_url": url}])
    assert batched["text"] == heard.json()["text"]
    assert text.strip().startswith(heard.json()["text"].strip())
    assert heard.json()["text"].strip()
