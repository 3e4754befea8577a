"""A server that speaks S3's API: moto's, as a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.servers import free_port
from tests.support.waiting import eventually

_START_S = 60.0
#: moto may be missing here, but not on a CI machine.
needs_s3 = pytest.mark.skipif(
    None in (importlib.util.find_spec("moto"), importlib.util.find_spec("obstore"))
    and os.environ.get("CI") != "true",
    reason="pip install --no-deps -r tests/gateway/requirements.txt",
)


@contextmanager
def running_s3(log: Path) -> Iterator[dict[str, str]]:
    """The variables by which programs find it; it has a bucket `yard`."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", url.rpartition(":")[2]]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:

        def has_bucket() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            request = urllib.request.Request(f"{url}/yard", method="PUT")
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10.0):
                return True
            return False

        eventually(has_bucket, timeout_s=_START_S, every_s=0.1)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
    finally:
        process.kill()
        process.wait()
