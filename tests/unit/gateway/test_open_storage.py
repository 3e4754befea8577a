"""Where the gateway keeps files: a folder or a bucket, checked at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.batches.files import name_of, new_id, open_storage, storage_of
from gateway.batches.storage import FolderStorage, Storage
from tests.support.s3 import needs_s3
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.gateway_settings import GatewaySettings


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
