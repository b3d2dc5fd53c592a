"""Train a small model offline: padded batches against packed rows.

Trains a small Llama from the same seed on the same documents: as padded batches, as packed rows in
stock transformers, and as packed rows with autopack. Needs no download and no GPU; takes about two
minutes on two CPU cores. The text is the documentation that every Python installation carries: half
of its documents are a few lines long, a few are pages long, as in instruction data sets. Exit
status 1 if the losses of padded batches and of autopack differ.
"""

from __future__ import annotations

import argparse
import ast
import math
import platform
import random
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from autopack.bench.subjects import SIZES
from autopack.commands import keep_freed_memory
from autopack.errors import AutopackError
from autopack.packing.checks import check_ints
from autopack.pages.parts import text_table
from autopack.version import __version__

END_OF_TEXT, END_OF_TEXT_ID = "<|endoftext|>", 0
SHORTEST, FEWEST = 60, 128
"""Characters below which a text is left out ("Return x."), and texts below which there is too
little to train on."""
LOSS_TOLERANCE = 1e-5
"""Relative; up to 1e-6 is seen, and in a packed row that leaks the loss differs by 4e-3 and more.
"""
PADDED, STOCK, ENABLED = "padded", "packed, stock", "packed, autopack"
# Not in every installation, or not documentation: the text should change as little as possible
# between machines.
_SKIPPED = frozenset(
    """
    __pycache__ dist-packages ensurepip idlelib lib2to3 pydoc_data site-packages test tests tkinter
    turtledemo
    """.split()
)
Example = dict[str, list[int]]


class CorpusTooSmall(AutopackError):
    """Error for a Python installation with too little documentation to train on."""

    code = "corpus-too-small"


@dataclass(frozen=True)
class DemoSettings:
    """Settings of the training. The defaults take about two minutes on two CPU cores."""

    steps: int = 25
    seed: int = 0
    batch_size: int = 16
    longest: int = 512


@dataclass
class DemoArm:
    """Training with one layout of batches: its model and optimizer, and the results so far."""

    model: Any
    optimizer: Any
    lay_out: Callable[[Sequence[Example]], dict[str, Any]]
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0

    def step(self, batch: Sequence[Example]) -> None:
        """Train the model on a batch, and record loss, time and tokens.

        Gradients are clipped: steps of some seeds would otherwise diverge, which blows up rounding
        in every arm.
        """
        import torch

        call, started = self.lay_out(batch), time.perf_counter()
        loss = self.model(**call).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.zero_grad()
        self.losses.append(loss.item())
        self.seconds += time.perf_counter() - started
        self.tokens += call["input_ids"].numel()


@dataclass(frozen=True)
class DemoResult:
    """The arms of the demo by name, and the sorted `lengths` of their documents, in tokens."""

    settings: DemoSettings
    lengths: list[int]
    arms: dict[str, DemoArm]

    def difference(self, name: str) -> float:
        """Return the largest relative difference of an arm's losses from padded's; inf if nan."""
        pairs = zip(self.arms[name].losses, self.arms[PADDED].losses, strict=True)
        found = [abs(one / other - 1) for one, other in pairs]
        return math.inf if any(map(math.isnan, found)) else max(found)

    def same(self, name: str) -> bool:
        """Return True if an arm has the padded arm's losses, within float32 rounding."""
        return self.difference(name) <= LOSS_TOLERANCE

    def speed(self, name: str) -> float:
        """Return the padded arm's seconds divided by an arm's."""
        return self.arms[PADDED].seconds / self.arms[name].seconds


def collect_documents(root: Path | None = None) -> list[str]:
    """Return the distinct docstrings of Python's standard library, by file.

    `root` is its directory, by default the running interpreter's. Raises `CorpusTooSmall` for fewer
    than `FEWEST` texts.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    texts = dict.fromkeys(text for text in _docstrings(root) if len(text) >= SHORTEST)
    if len(texts) < FEWEST:
        raise CorpusTooSmall(
            "the demo trains on the documentation inside the Python installation and wants at "
            f"least {FEWEST} texts, but found {len(texts)} under {root}: this Python seems to be "
            "shipped without its source files. Run the demo with a Python from python.org, conda, "
            "uv or a distribution's full package."
        )
    return list(texts)


def _docstrings(root: Path) -> Iterator[str]:
    """Yield every docstring ("" for none) in Python files below `root`, parsed and not imported."""
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.intersection(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                # invalid escape sequences in the standard library's own sources
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ast.get_docstring(node) or ""


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Return a byte-level BPE tokenizer of `tokenizers`, of `vocabulary` tokens, trained on texts.

    Any text can be encoded and decoded without loss.
    """
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocabulary, min_frequency=0, show_progress=False, special_tokens=[END_OF_TEXT]
    )
    return tokenizer


def tokenize(texts: Sequence[str], tokenizer: Any, longest: int) -> list[Example]:
    """Return an example per text: its ids and the end-of-text id, cut after `longest` tokens."""
    encodings = tokenizer.encode_batch(list(texts))
    return [{"input_ids": [*encoding.ids, END_OF_TEXT_ID][:longest]} for encoding in encodings]


def draw_batches(
    examples: Sequence[Example], size: int, steps: int, seed: int
) -> list[list[Example]]:
    """Return `steps` mini-batches of `size` examples, shuffled by a seed anew in every epoch."""
    generator = random.Random(seed)
    endless = chain.from_iterable(iter(lambda: generator.sample(examples, len(examples)), None))
    return [list(islice(endless, size)) for _ in range(steps)]


def pad(examples: Sequence[Example]) -> dict[str, Any]:
    """Return call arguments with one example per row, padded on the right to the longest."""
    import torch

    from autopack.bench.race import Batch

    return Batch([torch.tensor(example["input_ids"]) for example in examples]).padded(
        END_OF_TEXT_ID
    )


def compare(settings: DemoSettings) -> DemoResult:
    """Train all arms on Python's documentation, one step of each by turns, and return the results.

    Writes its stages to stderr. Raises `CorpusTooSmall` if this Python holds too little text.
    """
    tell = partial(print, file=sys.stderr, flush=True)
    tell("collecting the documentation of this Python installation")
    texts = collect_documents()
    tell(f"training a tokenizer on {len(texts):,} documents")
    examples = tokenize(
        texts, train_tokenizer(texts, SIZES["small"]["vocab_size"]), settings.longest
    )
    batches = draw_batches(examples, settings.batch_size, settings.steps, settings.seed)
    tell("importing torch and transformers")
    from tqdm import tqdm

    import autopack

    collate = autopack.PackingCollator()
    ways: dict[str, Any] = {
        PADDED: lambda batch: {**pad(batch), "use_cache": False},
        STOCK: collate,
        ENABLED: collate,
    }
    arms = {
        name: DemoArm(*_model_and_optimizer(settings), lay_out) for name, lay_out in ways.items()
    }
    autopack.enable(arms[ENABLED].model)
    largest = max(batches, key=lambda batch: pad(batch)["input_ids"].numel())
    for arm in arms.values():  # first calls cost what no other call does
        arm.model(**arm.lay_out(largest)).loss.backward()
        arm.model.zero_grad()
    tell(f"training in {len(arms)} ways, {len(batches)} steps each")
    for batch in tqdm(batches, unit="step"):
        for arm in arms.values():
            arm.step(batch)
    return DemoResult(settings, sorted(len(example["input_ids"]) for example in examples), arms)


def _model_and_optimizer(settings: DemoSettings) -> tuple[Any, Any]:
    """Return a Llama and its AdamW, whose rate rises for five steps, then falls to a tenth."""
    import torch

    from autopack.bench.subjects import build

    form: dict[str, Any] = {"attn": "sdpa", "dtype": torch.float32, "seed": settings.seed}
    model = build("llama", "small", "causal-lm", settings.longest, **form).train()
    # The second beta and the clipped norm are those of most language models. They also keep the
    # training calm: where it is not, Adam blows rounding up a thousandfold, whichever way the
    # batches are made.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / 5, 1 - 0.9 * n / settings.steps)
    )
    optimizer.register_step_post_hook(lambda *_: rates.step())
    return model, optimizer


def write_table(result: DemoResult) -> str:
    """Return the demo's result as text: its settings, a table of the arms, and a verdict."""
    import torch

    settings, lengths, arms = result.settings, result.lengths, result.arms
    half, most = (lengths[len(lengths) * tenths // 10] for tenths in (5, 9))
    real = arms[ENABLED].tokens
    parameters = sum(parameter.numel() for parameter in arms[PADDED].model.parameters())
    head = "|tokens|padding|seconds|real tokens/s|speed|first loss|last loss|difference|".split("|")
    rows = [
        (
            f"{name}|{arm.tokens:,}|{1 - real / arm.tokens:.1%}|{arm.seconds:.1f}|"
            f"{real / arm.seconds:,.0f}|{result.speed(name):.2f}x|{arm.losses[0]:.6f}|"
            f"{arm.losses[-1]:.6f}|{result.difference(name):.1e}|"
            f"{'equal' if result.same(name) else 'LEAKS' if name == STOCK else 'WRONG'}"
        ).split("|")
        for name, arm in arms.items()
    ]
    table = "\n".join(text_table([head, *rows], "<>>>>>>>><"))
    return f"""\
autopack {__version__} demo: the same training with padded batches and with packed rows

{len(lengths):,} documents from the documentation of Python {platform.python_version()}, \
{sum(lengths):,} tokens; median {half}, one in ten above {most}, longest {lengths[-1]}
a Llama of {parameters / 1e6:.1f} M parameters, sdpa, float32, CPU threads: \
{torch.get_num_threads()}; {settings.steps} steps of {settings.batch_size} documents, in the same \
order, seed {settings.seed}

Padding costs time and teaches nothing; packed rows have none. Every optimizer step sees the
same documents, so its loss must be the same within float32 rounding. The largest relative
difference of all steps is shown.

{table}

{_verdict(result)}"""


def _verdict(result: DemoResult) -> str:
    """Return one or two sentences on the losses and speed of packing with autopack."""
    if not result.same(ENABLED):
        return (
            "FAILED: the losses of padded training and of packed rows with autopack differ by more "
            "than rounding. Please report this with the output of `autopack doctor`."
        )
    leaks = "\nStock transformers lets documents of a packed row see each other: its losses differ."
    return (
        f"Packed rows with autopack: {result.speed(ENABLED):.1f} times the tokens a second, the "
        f"same losses.{'' if result.same(STOCK) else leaks}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=DemoSettings.steps, help="optimizer steps (%(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=DemoSettings.seed,
        help="of weights and order (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo, print its table; return 0 if autopack's losses are the padded ones, else 1."""
    check_ints(steps=args.steps)
    keep_freed_memory()
    result = compare(DemoSettings(steps=args.steps, seed=args.seed))
    print(write_table(result))
    return 0 if result.same(ENABLED) else 1
