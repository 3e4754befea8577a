"""Batches of a gateway in a batch worker whose vLLM is older than they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from gateway.batches.work import _front_end
from tests.support.vllm_versions import write_distribution
from tokenyard.protocol.errors import SettingsError


def test_a_batch_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path, "0.26.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    nothing = cast("Any", None)
    with pytest.raises(SettingsError, match=r"batches of a gateway: .* 0\.26\.0 is installed"):
        _front_end(nothing, nothing, nothing)
