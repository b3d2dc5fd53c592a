"""spaCy with spacy-transformers: pipelines that share one transformer, updated as `spacy train` does.

    python3 -m venv ENV && ENV/bin/pip install "torch==2.13.0" "spacy-transformers==1.4.0" "transformers==4.53.2"
    ENV/bin/pip install -e .

The tiny encoder has no dropout, so that steps can be compared. Losses are those that spaCy gives for each component:
it has an optimizer of its own, to which no hook of torch's gets.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._encoder import save_encoder
from compat.programs._watched import driven, watched
from compat.programs._words import WORDS

NAME = "spacy-transformers"
PACKAGE = "spacy-transformers"
STAND_INS = ()
RUNS: dict[str, tuple[str, str]] = {
    "NER, strided spans": ("ner", "spacy-transformers.strided_spans.v1"),
    "NER, whole texts": ("ner", "spacy-transformers.doc_spans.v1"),
    "tagger": ("tagger", "spacy-transformers.doc_spans.v1"),
    "text classifier": ("textcat", "spacy-transformers.strided_spans.v1"),
}
"""The component of each run beside the transformer, and how texts are cut for that."""
APART: frozenset[str] = frozenset()


def prepare(folder: Path) -> None:
    """Write the encoder."""
    save_encoder(folder / "bert")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, which makes a pipeline and updates it."""
    return driven("spacy_transformers_", run, folder, output)


def _train(run: str, folder: Path, steps: list[dict[str, float]]) -> None:
    import spacy
    from spacy.training import Example

    spacy.util.fix_random_seed(0)
    component, spans = RUNS[run]
    nlp = spacy.blank("en")
    cut: dict[str, Any] = {"@span_getters": spans}
    if "strided" in spans:
        cut |= {"window": 128, "stride": 96}
    model = {"@architectures": "spacy-transformers.TransformerModel.v3", "name": str(folder / "bert")}
    nlp.add_pipe("transformer", config={"model": {**model, "get_spans": cut}})
    listener = {"@architectures": "spacy-transformers.TransformerListener.v1", "grad_factor": 1.0}
    listener |= {"pooling": {"@layers": "reduce_mean.v1"}}
    heads: dict[str, dict[str, Any]] = {
        "ner": {
            "@architectures": "spacy.TransitionBasedParser.v2",
            "state_type": "ner",
            "extra_state_tokens": False,
            "hidden_width": 64,
            "maxout_pieces": 2,
            "use_upper": False,
            "tok2vec": listener,
        },
        "tagger": {"@architectures": "spacy.Tagger.v2", "tok2vec": listener},
        "textcat": {
            "@architectures": "spacy.TextCatParametricAttention.v1",
            "exclusive_classes": True,
            "tok2vec": listener,
        },
    }
    nlp.add_pipe(component, config={"model": heads[component]})
    draw, examples = random.Random(0), []
    for number in range(32):
        words = draw.choices(WORDS, k=draw.randrange(3, 60))
        said: dict[str, Any] = {"entities": [(0, len(words[0]), "PERSON")]}
        if component == "tagger":
            said = {"tags": [draw.choice(["A", "B"]) for _ in words]}
        if component == "textcat":
            said = {"cats": {"good": float(number % 2), "bad": float(1 - number % 2)}}
        examples.append(Example.from_dict(nlp.make_doc(" ".join(words)), said))
    optimizer = nlp.initialize(lambda: examples)
    optimizer.learn_rate = 1e-3
    for first in range(0, 32, 8):
        steps.append(nlp.update(examples[first : first + 8], sgd=optimizer, drop=0.0, losses={}))


if __name__ == "__main__":
    with watched(Path(sys.argv[3])) as found:
        _train(sys.argv[1], Path(sys.argv[2]), found)
