"""Trains the example models: two tiny Llamas that add and subtract numbers below 100.

Each model memorizes the whole table of one operation, so that each request to the queue has one
known right answer. The result is an ordinary Hugging Face model folder.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from problems import CHECKED_NUMBERS, TRAINING_NUMBERS, Operation, Problem, problems

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
VOCABULARY = (PAD, BOS, EOS, UNK, *"0123456789+-= ")
TOKEN_IDS = {token: index for index, token in enumerate(VOCABULARY)}

# The last message is the whole prompt: single sums need no history.
CHAT_TEMPLATE = "{{ messages[-1]['content'] | trim }}"

# Tokens, prompt plus answer; "99+99=198" with its EOS needs 10.
CONTEXT_LENGTH = 64
# The label that torch's cross entropy ignores.
IGNORED = -100
# A run fails below this share of right answers.
REQUIRED_ACCURACY = 0.99

console = Console()


@dataclass(frozen=True)
class Recipe:
    """How to train; ``batch`` counts problems, ``learning_rate`` is the peak of the schedule."""

    steps: int
    batch: int
    learning_rate: float
    seed: int


@dataclass(frozen=True)
class Table:
    """Problems as tensors of shape [problem, token], padded on the right.

    ``labels`` holds the next token at each place of the answer and ``IGNORED`` elsewhere.
    """

    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Score:
    """The grades of greedy answers; ``weakest`` is the lowest probability of a right token."""

    right: int
    total: int
    weakest: float

    @property
    def is_enough(self) -> bool:
        """Whether the share of right answers reaches ``REQUIRED_ACCURACY``."""
        return self.right >= REQUIRED_ACCURACY * self.total


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character, without BOS or spaces between tokens."""
    characters = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token=UNK))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model() -> LlamaForCausalLM:
    """Build a Llama of about 0.3 million weights; heads of 32, the minimum of vLLM's CPU kernel."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        pad_token_id=TOKEN_IDS[PAD],
        bos_token_id=TOKEN_IDS[BOS],
        eos_token_id=TOKEN_IDS[EOS],
    )
    return LlamaForCausalLM(config)


def encode(problem: Problem, width: int) -> tuple[list[int], list[int]]:
    """The inputs and labels of one problem, each ``width`` tokens long."""
    text = [TOKEN_IDS[character] for character in problem.prompt + problem.answer]
    silent = len(problem.prompt) - 1
    labels = [IGNORED] * silent + text[silent + 1 :] + [TOKEN_IDS[EOS]]
    padding = width - len(text)
    return text + [TOKEN_IDS[PAD]] * padding, labels + [IGNORED] * padding


def build_table(operation: Operation, numbers: range) -> Table:
    """Every pair of ``numbers`` under ``operation``, encoded."""
    chosen = list(problems(operation, numbers))
    width = max(len(problem.prompt + problem.answer) for problem in chosen)
    rows = [encode(problem, width) for problem in chosen]
    inputs, labels = zip(*rows, strict=True)
    return Table(torch.tensor(inputs), torch.tensor(labels))


def batches(table: Table, recipe: Recipe) -> Iterator[Table]:
    """Yield ``recipe.steps`` batches; the table is reshuffled after each pass."""
    generator = torch.Generator().manual_seed(recipe.seed)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(recipe.steps):
        if len(order) < recipe.batch:
            order = torch.randperm(len(table.inputs), generator=generator)
        taken, order = order[: recipe.batch], order[recipe.batch :]
        yield Table(table.inputs[taken], table.labels[taken])


def logits_of(model: LlamaForCausalLM, inputs: Tensor) -> Tensor:
    """Scores of shape [problem, token, vocabulary].

    It needs no attention mask: a causal model does not see the padding on the right.
    """
    logits: Tensor = model(input_ids=inputs, use_cache=False).logits
    return logits


def train(model: LlamaForCausalLM, table: Table, recipe: Recipe) -> None:
    """Fit ``model`` to the answers of ``table``, in place."""
    optimizer = AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    schedule = OneCycleLR(optimizer, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1)
    model.train()
    with progress_bar() as progress:
        task = progress.add_task("training", total=recipe.steps, loss=float("nan"))
        for batch in batches(table, recipe):
            logits = logits_of(model, batch.inputs)
            loss = functional.cross_entropy(
                logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED
            )
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.update(task, advance=1, loss=loss.item())


def progress_bar() -> Progress:
    """A display of steps, remaining time and the last batch's loss (nats per answer token)."""
    return Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.5f}"),
        console=console,
    )


def score(model: LlamaForCausalLM, table: Table) -> Score:
    """Grade greedy decoding in one pass.

    If each right token is the most likely one after the right tokens before it, greedy decoding
    follows exactly that path, so there is no need to generate.
    """
    model.train(False)
    with torch.no_grad():
        probabilities = logits_of(model, table.inputs).softmax(-1)
    asked = table.labels != IGNORED
    hits = (probabilities.argmax(-1) == table.labels) | ~asked
    wanted = table.labels.clamp_min(0).unsqueeze(-1)
    given = probabilities.gather(-1, wanted).squeeze(-1)
    return Score(int(hits.all(-1).sum()), len(hits), float(given[asked].min()))


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a complete model folder: configuration, weights and tokenizer."""
    model.generation_config = GenerationConfig(
        do_sample=False, pad_token_id=TOKEN_IDS[PAD], eos_token_id=TOKEN_IDS[EOS]
    )
    model.save_pretrained(folder)
    # The chat template goes into tokenizer_config.json, not into its own file.
    build_tokenizer().save_pretrained(folder, save_jinja_files=False)


def make(operation: Operation, recipe: Recipe, out: Path) -> Score:
    """Train, save and grade the model of one operation."""
    torch.manual_seed(recipe.seed)
    model = build_model()
    started = time.monotonic()
    train(model, build_table(operation, TRAINING_NUMBERS), recipe)
    seconds = time.monotonic() - started
    save(model, out / operation.model_name)
    result = score(model, build_table(operation, CHECKED_NUMBERS))
    console.print(
        f"{operation.model_name}: {result.right}/{result.total} right, "
        f"weakest right token {result.weakest:.4f}, trained in {seconds:.0f} s"
    )
    return result


@click.command(help="Train the adder, the subtractor or both.")
@click.option(
    "--operation",
    type=click.Choice([*(each.value for each in Operation), "both"]),
    default="both",
    show_default=True,
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(__file__).parent / "models",
    help="Folder that gets one folder per model.  [default: models, beside this script]",
)
@click.option("--steps", type=click.IntRange(min=100), default=1500, show_default=True)
@click.option("--batch", type=click.IntRange(1, 10_000), default=512, show_default=True)
@click.option("--learning-rate", type=float, default=2e-3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="CPU threads; another number rounds differently, so it gives other weights.",
)
def main(
    operation: str,
    out: Path,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    threads: int,
) -> None:
    """Train the chosen models; exits with 1 if too few answers of one are right."""
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    recipe = Recipe(steps, batch, learning_rate, seed)
    chosen = list(Operation) if operation == "both" else [Operation(operation)]
    scores = [make(each, recipe, out) for each in chosen]
    sys.exit(0 if all(each.is_enough for each in scores) else 1)


if __name__ == "__main__":
    main()
