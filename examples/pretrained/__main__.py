"""A pretrained model, padded, enabled or packed, and each text alone: what is the same, and what it
takes.

    python -m examples.pretrained --sentences         all-MiniLM-L6-v2
    python -m examples.pretrained --language-model    SmolLM2-135M; 5 GB of memory

Exit status 1 if anything but the time differs, 2 if the weights are missing or others
(examples/pretrained/README.md)."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from tqdm import tqdm

from autopack.errors import AutopackError

from .language_model import LanguageSettings, compare_language_model
from .sentences import SentenceSettings, compare_sentences
from .table import language_model_table, sentences_table


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--sentences", action="store_true")
    which.add_argument("--language-model", action="store_true")
    tell, progress = (
        partial(print, file=sys.stderr, flush=True),
        partial(tqdm, unit="step", file=sys.stderr),
    )
    try:
        if parser.parse_args(given).sentences:
            result = compare_sentences(SentenceSettings(), tell, progress)
            print(sentences_table(result))
        else:
            result = compare_language_model(LanguageSettings(), tell, progress)
            print(language_model_table(result))
    except AutopackError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if result.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
