"""The sums that the example models answer, for training and for checks."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Operation(StrEnum):
    """The operation of a model; each model has one."""

    ADD = "add"
    SUBTRACT = "subtract"

    @property
    def sign(self) -> str:
        """The character between the two numbers."""
        return "+" if self is Operation.ADD else "-"

    @property
    def model_name(self) -> str:
        """The name of the model's folder."""
        return "adder" if self is Operation.ADD else "subtractor"

    def apply(self, left: int, right: int) -> int:
        """The result of the operation."""
        return left + right if self is Operation.ADD else left - right


@dataclass(frozen=True)
class Problem:
    """A prompt such as ``27+48=`` and its answer ``75``, both in natural digit order."""

    prompt: str
    answer: str


# All numbers in training: one or two digits, never padded.
TRAINING_NUMBERS = range(100)
# The numbers of a check, 90 x 90 = 8100 pairs, all of them in the training set.
CHECKED_NUMBERS = range(10, 100)


def problems(operation: Operation, numbers: range) -> Iterator[Problem]:
    """Every ordered pair of ``numbers`` under ``operation``."""
    for left in numbers:
        for right in numbers:
            answer = operation.apply(left, right)
            yield Problem(f"{left}{operation.sign}{right}=", str(answer))
