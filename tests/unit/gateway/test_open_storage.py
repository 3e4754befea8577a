"""Where the gateway keeps files: a folder or a bucket, checked at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.batches.files import open_storage
from gateway.batches.folder import FolderStorage
from gateway.batches.storage import Storage
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


def some(storage: Storage | None) -> Storage:
    assert storage is not None
    return storage


def test_a_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(SettingsError, match="files_dir: no folder can be made"):
        FolderStorage(file).start()
