"""Checks an example model as the queue uses it: vLLM on a CPU, greedy, batched requests."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import click

from problems import CHECKED_NUMBERS, Operation, Problem, problems

Precision = Literal["float32", "bfloat16"]

# The check fails below this share of right answers.
REQUIRED_ACCURACY = 0.99
# The longest answer, "198" or "-89", has three tokens; the spare ones reveal a missing EOS.
ANSWER_TOKENS = 6
CONTEXT_LENGTH = 64
SHOWN_MISTAKES = 10

# vLLM reads these at import: one process, 1 GiB of KV cache, no pinning to cores.
CPU_SETTINGS: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
}


def operation_of(model: Path) -> Operation:
    """The operation in the folder's name; raises click.UsageError for any other name."""
    for operation in Operation:
        if operation.model_name == model.name:
            return operation
    raise click.UsageError(f"{model.name!r} is no known model: give --operation")


def answers(
    model: Path, dtype: Precision, prompts: list[str], adapter: Path | None = None
) -> list[str]:
    """The greedy answer to each prompt, in order, without its EOS."""
    for name, value in CPU_SETTINGS.items():
        os.environ.setdefault(name, value)
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    # Linux lets a process use AMX only on request; without AMX this does nothing.
    torch.cpu._init_amx()  # noqa: SLF001  # has no public name
    engine = LLM(
        model=str(model),
        dtype=dtype,
        max_model_len=CONTEXT_LENGTH,
        enforce_eager=True,
        distributed_executor_backend="uni",
        enable_lora=adapter is not None,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    lora = LoRARequest(adapter.name, 1, str(adapter)) if adapter else None
    outputs = engine.generate(prompts, greedy, lora_request=lora)
    return [output.outputs[0].text for output in outputs]


def mistakes(asked: list[Problem], given: list[str]) -> list[str]:
    """One line per wrong answer."""
    return [
        f"{problem.prompt} answered {answer!r}, not {problem.answer!r}"
        for problem, answer in zip(asked, given, strict=True)
        if answer != problem.answer
    ]


@click.command(help="Ask MODEL, a model folder, for all pairs of two-digit numbers.")
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--operation",
    type=click.Choice([each.value for each in Operation]),
    help="What the model does.  [default: by the folder's name]",
)
@click.option(
    "--adapter",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A LoRA adapter for it; then give --operation, too.",
)
@click.option(
    "--dtype", type=click.Choice(get_args(Precision)), default="float32", show_default=True
)
def main(model: Path, operation: str | None, adapter: Path | None, dtype: Precision) -> None:
    """Print right/total; exits with 1 below ``REQUIRED_ACCURACY``."""
    wanted = Operation(operation) if operation else operation_of(model.resolve())
    asked = list(problems(wanted, CHECKED_NUMBERS))
    wrong = mistakes(asked, answers(model, dtype, [problem.prompt for problem in asked], adapter))
    for line in wrong[:SHOWN_MISTAKES]:
        click.echo(line)
    right = len(asked) - len(wrong)
    name = adapter.name if adapter else model.name
    click.echo(f"{name} {dtype}: {right}/{len(asked)} right")
    sys.exit(0 if right >= REQUIRED_ACCURACY * len(asked) else 1)


if __name__ == "__main__":
    main()
