"""Prints what vLLM's platform and CUDA are here, as JSON: run by `worker.engines.devices`.

A process of its own, because it takes a CUDA context, which must not be forked, and because it
imports torch.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """The last line of standard output is the answer; vLLM may write before."""
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
