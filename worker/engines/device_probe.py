"""Prints vLLM's platform and the number of usable GPUs as JSON, for `worker.engines.devices`.

Runs in a separate process, because it imports torch and creates a CUDA context, which must not be
forked.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Print the answer in the last line of standard output; vLLM may print before it."""
    import torch
    from vllm.platforms import current_platform

    gpus, fault = 0, ""
    if current_platform.device_type != "cpu":
        try:
            torch.cuda.init()
            gpus = torch.cuda.device_count()
        except (RuntimeError, AssertionError) as error:  # no driver; torch without CUDA
            fault = str(error).splitlines()[0]
    answer = {"platform": current_platform.device_type, "gpus": gpus, "fault": fault}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()
