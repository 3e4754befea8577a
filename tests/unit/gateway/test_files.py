"""Files of the gateway: uploads in pieces, hostile names, limits, tenants."""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from gateway.batches.api import BatchesApi, routes
from gateway.batches.files import FileStore, name_of, new_id, open_storage, storage_of
from gateway.batches.storage import FolderStorage, Storage
from gateway.http.errors import GatewayError
from gateway.http.incoming import Bodies
from gateway.http.principal import Principal
from gateway.http.routes import Call, Router
from tests.support.fake_clock import FakeClock
from tests.support.s3 import needs_s3
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.gateway_settings import GatewaySettings

LIMIT = 1000
ALICE, BOB = Principal(tenant="alice"), Principal(tenant="bob")
URL = "http://gateway"
EXPIRY = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
BOUNDARY = {"Content-Type": "multipart/form-data; boundary=cut"}


@dataclass
class Heard:
    status: int
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.body)
        return read


class Asker:
    """Asks `BatchesApi` as a server would; nothing listens on the Redis of its settings."""

    def __init__(self, storage: Storage, limit: int = LIMIT, **values: Any) -> None:
        settings = GatewaySettings(redis_url="redis://127.0.0.1:1", max_file_bytes=limit, **values)
        self.storage = storage
        self.router = Router()
        self.api = BatchesApi(settings, storage, Bodies(settings))
        self.router.add(routes, self.api.handler)

    def ask(
        self,
        request: httpx.Request,
        principal: Principal = ALICE,
        pieces: Iterable[bytes] | None = None,
        *,
        breaks: bool = False,
    ) -> Heard:
        """Send a request in pieces; with ``breaks`` the connection ends before the body does."""
        body = iter([request.read()] if pieces is None else pieces)
        sent: list[Message] = []

        async def receive() -> Message:
            piece = next(body, None)
            if piece is None and breaks:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": request.method,
            "path": request.url.path,
            "query_string": request.url.query,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
        }
        try:
            asyncio.run(self.serve(Call(scope, receive, send, principal)))
        except GatewayError as error:
            return Heard(error.status, error.body())
        return Heard(sent[0]["status"], b"".join(one["body"] for one in sent[1:]))

    async def serve(self, call: Call) -> None:
        endpoint, params = self.router.find(call.path)
        method = call.scope["method"]
        if endpoint is None or method not in endpoint.served:
            raise self.router.refusal(method, call.path)
        _, handler = endpoint.served[method]
        await handler(replace(call, params=params))

    def get(self, path: str, principal: Principal = ALICE) -> Heard:
        return self.ask(httpx.Request("GET", URL + path), principal)

    def upload(self, content: bytes = b"{}\n", name: str = "in.jsonl", **form: str) -> Heard:
        return self.ask(upload(content, name, **form))

    def batch(self, principal: Principal = ALICE, **change: Any) -> Heard:
        """Ask for a batch of a new file of Alice's, but for some fields."""
        right = {"endpoint": "/v1/completions", "completion_window": "24h"}
        if "input_file_id" not in change:
            right["input_file_id"] = self.upload().json["id"]
        request = httpx.Request("POST", f"{URL}/v1/batches", json=right | change)
        return self.ask(request, principal)

    def stored(self) -> list[str]:
        """The names of all objects of Alice's."""
        return sorted(self.storage.names("tenant-alice/"))


def upload(content: bytes = b"{}\n", name: str = "in.jsonl", **form: str) -> httpx.Request:
    data = {"purpose": "batch", **form}
    return httpx.Request("POST", f"{URL}/v1/files", data=data, files={"file": (name, content)})


@pytest.fixture
def asker(storage: Storage) -> Asker:
    return Asker(storage)


def test_a_file_is_stored_shown_read_and_deleted(asker: Asker) -> None:
    content = bytes(range(256)) * 3
    made = asker.upload(content, "in.jsonl")
    assert made.status == 200
    file = made.json
    assert (file["object"], file["bytes"], file["filename"]) == ("file", 768, "in.jsonl")
    assert (file["purpose"], file["status"]) == ("batch", "processed")
    at = f"/v1/files/{file['id']}"

    assert asker.get(at).json == file
    assert asker.get("/v1/files").json["data"] == [file]
    assert asker.get("/v1/files?purpose=batch_output").json["data"] == []
    assert asker.get(f"{at}/content").body == content

    gone = asker.ask(httpx.Request("DELETE", URL + at))
    assert gone.json == {"id": file["id"], "object": "file", "deleted": True}
    assert asker.get(at).status == 404
    assert asker.stored() == []


@pytest.mark.parametrize("size", [1, 7, 100])
def test_an_upload_may_come_in_pieces_of_any_size(asker: Asker, size: int) -> None:
    content = b"\r\n--line\r\n" * 50
    request = upload(content)
    raw = request.read()
    made = asker.ask(request, pieces=[raw[at : at + size] for at in range(0, len(raw), size)])

    assert asker.get(f"/v1/files/{made.json['id']}/content").body == content


@pytest.mark.long
def test_an_upload_is_not_held_in_memory(storage: Storage) -> None:
    asker = Asker(storage, limit=2**30)
    size, piece = 64 * 2**20, bytes(2**16)

    def body() -> Iterator[bytes]:
        yield b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(size // len(piece)):
            yield piece
        yield b"\r\n--cut--\r\n"

    request = httpx.Request("POST", f"{URL}/v1/files", headers=BOUNDARY)
    tracemalloc.start()
    made = asker.ask(request, pieces=body())
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert made.json["bytes"] == size
    assert most < size / 2


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("..\\..\\boot.ini", "boot.ini"),
        ("/", "upload"),
        ("..", ".."),
        ("a\x1bb", "ab"),
        ("x" * 1000, "x" * 255),
    ],
)
def test_a_hostile_name_is_only_shown(asker: Asker, name: str, shown: str) -> None:
    made = asker.upload(name=name)

    assert made.json["filename"] == shown
    name = f"tenant-alice/{made.json['id']}"
    assert asker.stored() == [name, f"{name}.json"]


@pytest.mark.parametrize("tenant", ["..", ".", "a/../../b", "/etc", "a b", "ä", "x" * 100])
def test_a_tenant_stays_in_its_folder(storage: Storage, tenant: str) -> None:
    files = FileStore(storage)
    with files.put(tenant) as new:
        new.upload.write(b"x")
        new.commit("in.jsonl", "batch")

    assert [one.id for one in files.list(tenant)] == [new.id]
    assert files.find(tenant, new.id) is not None
    assert name_of(tenant, new.id).count("/") == 1
    assert list(files.list("b")) == list(files.list("")) == []
    if isinstance(storage, FolderStorage):
        path = storage.path(name_of(tenant, new.id))
        assert path.resolve().parent.parent == storage.path("").resolve()


def test_nobody_else_can_read_a_folder_of_files(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "files")
    before = os.umask(0o022)
    try:
        storage.start()
        storage.write("tenant-a/about", b"x")
        with storage.upload("tenant-a/content") as new:
            new.write(b"x")
            new.commit()
    finally:
        os.umask(before)

    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"files": 0o700, "tenant-a": 0o700, "about": 0o600, "content": 0o600}


@pytest.mark.parametrize(
    "name", ["..", "file-", "file-" + "0" * 31, "file-" + "A" * 32, "file-" + "0" * 32 + "\n"]
)
def test_what_is_no_id_is_never_a_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "tenant-alice").mkdir(parents=True)
    files = FileStore(FolderStorage(tmp_path))

    assert files.find("alice", name) is None
    assert not files.delete("alice", name)
    with pytest.raises(ValueError, match="no id"):
        name_of("alice", name)


@pytest.mark.parametrize("path", ["/v1/files/..%2f..%2fetc", "/v1/files/../x", "/v1/files/a/b/c"])
def test_a_hostile_path_is_not_found(asker: Asker, path: str) -> None:
    assert asker.get(path).status == 404


def test_another_tenant_finds_nothing(asker: Asker) -> None:
    at = f"/v1/files/{asker.upload().json['id']}"

    assert asker.get(at, BOB).status == 404
    assert asker.get(f"{at}/content", BOB).status == 404
    assert asker.get("/v1/files", BOB).json["data"] == []
    assert asker.ask(httpx.Request("DELETE", URL + at), BOB).status == 404
    assert asker.get(at).status == 200


@pytest.mark.parametrize("purpose", ["vision", "user_data"])
def test_a_request_can_have_the_content_of_its_tenants_file(asker: Asker, purpose: str) -> None:
    made = asker.upload(purpose=purpose).json
    files = FileStore(asker.storage)

    content = files.content("alice", made["id"], made["bytes"])
    assert len(content) == made["bytes"] > 0
    for tenant, most, status in (("bob", 100, 404), ("", 100, 404), ("alice", 1, 400)):
        with pytest.raises(GatewayError) as refused:
            files.content(tenant, made["id"], most)
        assert refused.value.status == status


def test_another_tenant_cannot_use_a_file_in_a_batch(asker: Asker) -> None:
    heard = asker.batch(BOB)

    assert (heard.status, heard.json["error"]["param"]) == (404, "input_file_id")


@pytest.mark.parametrize("has_length", [True, False])
def test_a_file_above_the_limit_is_refused(asker: Asker, has_length: bool) -> None:
    assert asker.upload(bytes(LIMIT)).status == 200
    before = asker.stored()
    request = upload(bytes(LIMIT + 1))
    if not has_length:
        del request.headers["content-length"]

    assert asker.ask(request).status == 413
    assert asker.ask(upload(bytes(10**6))).status == 413
    assert asker.stored() == before


def test_a_connection_that_ends_leaves_nothing(asker: Asker) -> None:
    request = upload(bytes(900))

    assert asker.ask(request, pieces=[request.read()[:600]], breaks=True).status == 499
    assert asker.stored() == []


def test_what_a_killed_gateway_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path)
    folder = tmp_path / "tenant-alice"
    folder.mkdir(parents=True)
    old, new = folder / f"{new_id()}.part", folder / f"{new_id()}.part"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))

    storage.start()

    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({**EXPIRY, "expires_after[seconds]": "3599"}, "expires_after[seconds]"),
        ({**EXPIRY, "expires_after[seconds]": "²"}, "expires_after[seconds]"),
        ({"no_such_field": "1"}, "no_such_field"),
        ({"other": "x" * 5000}, "other"),
    ],
)
def test_a_field_that_cannot_be_obeyed_is_refused(
    asker: Asker, form: dict[str, str], param: str
) -> None:
    heard = asker.upload(**form)

    assert (heard.status, heard.json["error"]["param"]) == (400, param)
    assert asker.stored() == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no form",
        b"--cut\r\n",
        b"--cut--\r\n",
        b"--cut\r\n\r\nno name\r\n--cut--\r\n",
        b'--cut\r\nContent-Disposition: form-data; name="file"\r\n\r\nends in the middle',
        b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--cut--\r\n',
        b'--cut\r\nContent-Disposition: form-data; name="file"\r\n\r\n\r\n--cut--\r\n',
        b"--cut\r\n" + b"A" * 100_000,
        b'--cut\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 20 + b"--cut--\r\n",
    ],
)
def test_a_broken_form_is_refused(asker: Asker, body: bytes) -> None:
    request = httpx.Request("POST", f"{URL}/v1/files", headers=BOUNDARY, content=body)

    assert asker.ask(request).status == 400
    assert asker.stored() == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": ["/v1/completions"]}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "9999999d"}, "completion_window"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "v" * 513}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"seconds": 3600}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_a_wrong_batch_is_refused_by_its_field(
    asker: Asker, change: dict[str, Any], param: str
) -> None:
    heard = asker.batch(**change)

    assert heard.status == (404 if "etc" in str(change) else 400)
    assert heard.json["error"]["param"] == param


def test_a_file_expires(asker: Asker, fake_clock: FakeClock) -> None:
    made = asker.upload(**EXPIRY).json
    assert made["expires_at"] == made["created_at"] + 3600
    lasting = asker.upload().json
    assert lasting["expires_at"] is None
    at = f"/v1/files/{made['id']}"
    assert asker.get(at).json == made
    # If its time is over
    fake_clock.advance(3601.0)
    # I expect nobody to find it, and nothing to be left once files are listed.
    assert asker.get(at).status == asker.get(f"{at}/content").status == 404
    assert asker.get("/v1/files").json["data"] == [lasting]
    assert not [name for name in asker.stored() if made["id"] in name]
    assert asker.get(f"/v1/files/{lasting['id']}/content").status == 200


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_follow_each_other(asker: Asker, order: str) -> None:
    made = [asker.upload().json for _ in range(5)]
    made.sort(key=lambda one: (one["created_at"], one["id"]), reverse=order == "desc")
    seen: list[Any] = []
    after = "" if order == "desc" else "&order=asc"
    while True:
        page = asker.get(f"/v1/files?limit=2{after}").json
        seen += page["data"]
        if not page["has_more"]:
            break
        after = f"&order={order}&after={page['last_id']}"

    assert seen == made
    assert asker.get("/v1/files?limit=0").status == 400


def over_quota(heard: Heard) -> bool:
    return (heard.status, heard.json["error"]["code"]) == (413, "QUOTA_EXCEEDED")


def test_a_tenant_has_so_many_files(storage: Storage) -> None:
    asker = Asker(storage, max_tenant_files=3)
    made = [asker.upload().json["id"] for _ in range(3)]
    before = asker.stored()
    # I expect the next to be refused, with nothing left of it, and nobody else to notice.
    assert over_quota(asker.upload())
    assert asker.stored() == before
    assert asker.ask(upload(), BOB).status == 200
    # A batch needs room for two,
    assert asker.ask(httpx.Request("DELETE", f"{URL}/v1/files/{made[1]}")).status == 200
    assert over_quota(asker.batch(input_file_id=made[0]))
    # and an upload for one.
    assert asker.upload().status == 200


def test_a_tenant_has_so_many_bytes_with_the_outputs_of_its_batches(storage: Storage) -> None:
    asker = Asker(storage, max_tenant_bytes=3000)
    assert asker.upload(bytes(900)).status == 200
    storage.write(name_of("alice", new_id()), bytes(1500))  # as a batch writes it
    assert over_quota(asker.upload(bytes(900)))
    unsized = upload(bytes(100))
    pieces = [unsized.read()]
    del unsized.headers["content-length"]
    assert over_quota(asker.ask(unsized, pieces=pieces))
    assert asker.upload(bytes(10)).status == 200


def test_what_is_on_its_way_counts(storage: Storage) -> None:
    # Given an upload that has not come to its end
    asker = Asker(storage, max_tenant_bytes=1900)
    second: list[Heard] = []

    def pieces(request: httpx.Request) -> Iterator[bytes]:
        raw = request.read()
        yield raw[:200]
        with ThreadPoolExecutor(1) as thread:
            second.append(thread.submit(asker.upload, bytes(700)).result())
        yield raw[200:]

    first = upload(bytes(700))
    # I expect another one to find no room, until it broke off.
    assert asker.ask(first, pieces=pieces(first)).status == 200
    assert over_quota(second[0])
    broken = upload(bytes(400))
    assert asker.ask(broken, pieces=[broken.read()[:100]], breaks=True).status == 499
    assert asker.upload(bytes(200)).status == 200
    assert not asker.api._coming


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e3", "\u00b2"])
def test_a_strange_length_is_refused(asker: Asker, length: str) -> None:
    request = upload()
    raw = request.read()
    request.headers["content-length"] = length
    assert asker.ask(request, pieces=[raw]).status == 413


# Where they lie: a folder or a bucket, checked at the start.


@pytest.mark.parametrize("url", ["bucket/prefix", "https://host/bucket", "s3:/bucket", "s3:///x"])
def test_a_url_that_names_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="files_url: must be like s3://"):
        GatewaySettings(redis_url="redis://unused", files_url=url)


def test_files_have_one_place(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="give one of them"):
        GatewaySettings(redis_url="redis://unused", files_dir=tmp_path, files_url="s3://yard")


@needs_s3
def test_a_bucket_that_cannot_be_used_is_refused_at_the_start(s3: str) -> None:
    with pytest.raises(SettingsError, match="s3://nobodys cannot be used"):
        some(open_storage(None, "s3://nobodys")).start()
    some(open_storage(None, s3)).start()
    assert open_storage(None, "") is None


@pytest.mark.parametrize("place", ["/", "/files", "s3://bucket", "s3://bucket/prefix"])
def test_a_storage_is_found_again_by_where_its_objects_lie(place: str) -> None:
    name = name_of("lab/..", new_id())
    is_s3 = place.startswith("s3:")
    if is_s3:
        pytest.importorskip("obstore", reason="buckets need it")
    there = some(open_storage(None if is_s3 else Path(place), place if is_s3 else ""))
    again = storage_of(there.location(name))
    assert type(again) is type(there)
    assert again.location(name) == there.location(name)


def some(storage: Storage | None) -> Storage:
    assert storage is not None
    return storage


def test_a_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(SettingsError, match="files_dir: no folder can be made"):
        FolderStorage(file).start()
