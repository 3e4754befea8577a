"""vLLM's HTTP front end, with the queue in the place of its engine."""

import os
from typing import Final

#: openai's classes would build their validators at first use, in the middle of a request, and
#: everybody waits for it; so they do when they are imported. Read by the package ``openai``.
_DEFERS_VALIDATORS: Final = "DEFER_PYDANTIC_BUILD"
os.environ.setdefault(_DEFERS_VALIDATORS, "false")
