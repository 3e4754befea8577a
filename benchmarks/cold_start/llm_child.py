"""The new interpreter of `measure_llm`: makes a `vllm.LLM`, asks it, reports the time of each step.

It imports almost nothing before it reads the clock. Arguments: a JSON object of arguments for
`LLM`, the prompt, the most tokens of an answer, and the file for the JSON report.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Run; times are from the monotonic clock, which all processes of a host share."""
    ends = {"process": time.monotonic()}
    arguments, prompt, tokens, report = sys.argv[1:]

    from vllm import LLM, EngineArgs, SamplingParams

    ends["import"] = time.monotonic()

    from worker.engines.cpu_features import request_amx

    # vLLM's own single-process executor, which also times its phases.
    from worker.engines.stopwatch import Stopwatch
    from worker.engines.vllm.executor import SingleExecutor

    stopwatch = Stopwatch()
    owner: Any = EngineArgs  # `Any`, because a method is replaced
    make_config = owner.create_engine_config

    def timed(*args: Any, **named: Any) -> Any:
        with stopwatch.phase("config"):
            return make_config(*args, **named)

    owner.create_engine_config = timed
    request_amx()
    llm = LLM(**json.loads(arguments), distributed_executor_backend=SingleExecutor)
    inner_s = stopwatch.phases_s | llm.llm_engine.model_executor.phases_s
    ends["executor"] = time.monotonic()
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    ends["first token"] = time.monotonic()
    greedy = SamplingParams(temperature=0.0, max_tokens=int(tokens))
    [output] = llm.generate([prompt], greedy, use_tqdm=False)
    answer = output.outputs[0].text
    Path(report).write_text(json.dumps({"ends": ends, "inner_s": inner_s, "answer": answer}))


if __name__ == "__main__":
    main()
