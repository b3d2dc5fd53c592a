"""spaCy with spacy-transformers: pipelines that share one transformer, updated as `spacy train`
does.

Losses are those that spaCy gives for each component: it has an optimizer of its own, to which no
hook of torch's gets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from compat.programs._drivers import Steps
from compat.programs._words import WORDS


def train(told: dict[str, Any], folder: Path, output: Path) -> Steps:
    """Make a pipeline and update it."""
    import spacy
    from spacy.training import Example

    spacy.util.fix_random_seed(0)
    component, spans = told["component"], told["spans"]
    nlp = spacy.blank("en")
    cut: dict[str, Any] = {
        "@span_getters": spans,
        **({"window": 128, "stride": 96} if "strided" in spans else {}),
    }
    model = {
        "@architectures": "spacy-transformers.TransformerModel.v3",
        "name": str(folder / "bert"),
    }
    nlp.add_pipe("transformer", config={"model": {**model, "get_spans": cut}})
    listener = {"@architectures": "spacy-transformers.TransformerListener.v1", "grad_factor": 1.0}
    listener |= {"pooling": {"@layers": "reduce_mean.v1"}}
    nlp.add_pipe(component, config={"model": {**told["head"], "tok2vec": listener}})
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
    return [
        nlp.update(examples[first : first + 8], sgd=optimizer, drop=0.0, losses={})
        for first in range(0, 32, 8)
    ]
