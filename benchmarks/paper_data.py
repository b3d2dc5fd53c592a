"""Documents for `benchmarks.paper`: text of a small grammar in lengths like the paper's, or files of one's own.

The grammar can be learned in a few hundred steps, and other documents are of no help with it: every document has one
of a few topics, which says what may follow what, and repeats phrases of its own. So whoever sees the documents before
it in a row must first find out where it begins.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopack.bench.subjects import DISTRIBUTIONS, draw

END, UNKNOWN = 0, 1
"""The token that ends every document, and the one for words that are not in the vocabulary."""
TOPICS, SYMBOLS = 6, 48
SUCCESSORS = np.array([0.6, 0.25, 0.1, 0.05])
REPEATED, PHRASE = 0.06, 8
"""How often a phrase of the document's own begins again, and its tokens."""


@dataclass(frozen=True)
class Corpus:
    """Documents as arrays of token ids, (tokens,) int64 each, and where they are from."""

    name: str
    origin: str
    train: list[np.ndarray]
    validation: list[np.ndarray]
    vocabulary: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document for training."""
        return np.array([len(document) for document in self.train])


def load(name: str, options: argparse.Namespace) -> Corpus:
    """The documents of a distribution, or of `--text` files where `name` is `text`."""
    count = options.documents + held_out(options.documents)
    if name == "text":
        return from_files(options.text, count, options)
    lengths = draw(DISTRIBUTIONS[name], count, options.max_length, options.seed, options.scale)
    documents = write_grammar(lengths, options.seed)
    spread = f"lengths like {name}'s over {options.scale}: mean {lengths.mean():.0f}, deviation {lengths.std():.0f}"
    return Corpus(
        name,
        f"grammar of {TOPICS} topics, {spread}",
        documents[: options.documents],
        documents[options.documents :],
        SYMBOLS + 1,
    )


def held_out(documents: int) -> int:
    """How many documents are kept for validation."""
    return max(8, documents // 8)


def write_grammar(lengths: Sequence[int] | np.ndarray, seed: int) -> list[np.ndarray]:
    """A document of each length, its last token `END`; the same seed gives the same documents."""
    rng = np.random.default_rng([seed, 1])
    follows = np.stack([
        np.stack([rng.permutation(SYMBOLS)[: len(SUCCESSORS)] for _ in range(SYMBOLS)]) for _ in range(TOPICS)
    ])  # fmt: skip
    return [_write(follows[rng.integers(TOPICS)], int(length), rng) for length in lengths]


def _write(follows: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    chosen = rng.choice(len(SUCCESSORS), length, p=SUCCESSORS).tolist()
    again, where = rng.random(length).tolist(), rng.random(length).tolist()
    text = [int(rng.integers(SYMBOLS))]
    while len(text) < length - 1:
        at = len(text)
        if again[at] < REPEATED and at >= 2 * PHRASE:
            begin = int(where[at] * (at - PHRASE))
            text += text[begin : begin + PHRASE]
        else:
            text.append(int(follows[text[-1], chosen[at]]))
    return np.array([*(symbol + 1 for symbol in text[: length - 1]), END])


def from_files(path: Path, count: int, options: argparse.Namespace) -> Corpus:
    """At most `count` documents of text files, in random order, a ninth of them for validation."""
    texts = list(read_texts(path))
    held = held_out(min(options.documents, len(texts) * 8 // 9))
    if len(texts) < 2 * held:
        raise ValueError(f"{path}: wanted at least {2 * held} documents, found {len(texts)}")
    order = np.random.default_rng(options.seed).permutation(len(texts))[:count]
    train, validation = [texts[i] for i in order[held:]], [texts[i] for i in order[:held]]
    if options.tokenizer == "bytes":
        known: dict[str, int] = {}
        vocabulary = 256 + 2
    else:
        counted = Counter(word for text in train for word in words(text))
        known = {word: i + 2 for i, (word, _) in enumerate(counted.most_common(options.vocabulary - 2))}
        vocabulary = len(known) + 2

    def encode(text: str) -> np.ndarray:
        ids = [known.get(w, UNKNOWN) for w in words(text)] if known else [byte + 2 for byte in text.encode()]
        return np.array([*ids, END])

    encoded = [[encode(text) for text in part] for part in (train, validation)]
    over = sum(len(document) > options.max_length for part in encoded for document in part)
    cut = [[document[: options.max_length] for document in part] for part in encoded]
    origin = f"{path.name}, {options.tokenizer}, {over} documents cut after {options.max_length} tokens"
    return Corpus("text", origin, cut[0], cut[1], vocabulary)


def words(text: str) -> list[str]:
    """Words and single other characters; runs of white space count as one."""
    return re.findall(r"\w+|[^\w\s]|\s+", text)


def read_texts(path: Path) -> Iterator[str]:
    """The documents of a `.jsonl` file (a line each), of a `.txt` file (between blank lines), or of all in a folder."""
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.suffix in (".jsonl", ".txt")):
            yield from read_texts(file)
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(json.loads(line), f"{path}:{number}")
    else:
        yield from (part.strip() for part in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")) if part.strip())


def _text_of(record: Any, where: str) -> str:
    """`text` of a record, or all of its strings, line by line."""
    if isinstance(record, str) and record:
        return record
    values = record if isinstance(record, dict) else {}
    strings = [values["text"]] if "text" in values else list(values.values())
    found = "\n".join(value for value in strings if isinstance(value, str) and value)
    if not found:
        raise ValueError(f"{where}: wanted a string, or an object with strings, found {type(record).__name__} without")
    return found
