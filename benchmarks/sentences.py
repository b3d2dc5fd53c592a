"""Sentences encoded, trained on, ranked and scored, stock and enabled: sentence-transformers and
lm-eval.

    python -m benchmarks.sentences                                      about five minutes on two cores
    python -m benchmarks.sentences --sentences 64 --layers 1 --rounds 2 a first look
    python -m benchmarks.sentences --json benchmarks/results/sentences.json

The arms, on copies of the same random models and on the same sentences, which come in no order of
length. Of a BERT with mean pooling:

* `training`: one step of `MultipleNegativesRankingLoss` on pairs, drawn as trainers draw them.
* `as they come`: embeddings of batches in that order, as a service gets them.
* `encode`: `SentenceTransformer.encode`, which sorts sentences by length first, so that little
  padding is left.

Of a BERT with one score, `predict`: `CrossEncoder.predict` on pairs of sentences. Of a Llama,
`loglikelihood`: that of lm-eval's `HFLM` for continuations of the sentences, which it sorts by
length; left out where lm-eval is not installed.

Before anything is timed, embeddings, losses and scores must agree within 1e-5.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import random
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

from autopack.bench.subjects import Lengths, draw
from benchmarks import interleave, workload

LONGEST_ROW = 512
"""Positions of the models: two sentences and what stands between them."""
MEAN, SIGMA, LONGEST = 40, 0.8, 254
"""Words of a sentence or short passage: lognormal, as those of retrieval corpora are."""
CONTINUED = 12
"""Words of a continuation, at most."""
GOAL = 1.3


def sentences(count: int, options: argparse.Namespace, seed: int) -> list[str]:
    """Sentences of random words."""
    generator = random.Random(seed)
    lengths = draw(Lengths(MEAN, SIGMA), count, LONGEST, seed, shortest=2).tolist()
    chosen = range(options.vocabulary - 4)
    return [" ".join(f"w{w}" for w in generator.choices(chosen, k=n)) for n in lengths]


def tokenizer_of_words(options: argparse.Namespace) -> Any:
    """A tokenizer that knows the words of sentences."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [*special, *(f"w{number}" for number in range(options.vocabulary - len(special)))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    named = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "eos_token": "[SEP]",
        "model_max_length": LONGEST_ROW,
    }
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def build(options: argparse.Namespace) -> dict[str, Any]:
    """By name, a SentenceTransformer, a CrossEncoder and, where lm-eval is installed, an HFLM of
    random models."""
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    sizes = {
        "vocab_size": options.vocabulary,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "intermediate_size": 4 * options.hidden,
        "max_position_embeddings": LONGEST_ROW,
    }
    tokenizer = tokenizer_of_words(options)
    config = BertConfig(
        **sizes, num_labels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    found: dict[str, Any] = {}
    for name, model in (
        ("encoder", BertModel(config)),
        ("scorer", BertForSequenceClassification(config)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            if name == "scorer":
                found[name] = CrossEncoder(folder, device="cpu")
            else:
                modules = [Transformer(folder), Pooling(options.hidden)]
                found[name] = SentenceTransformer(modules=modules, device="cpu")
    if importlib.util.find_spec("lm_eval") is not None:
        from lm_eval.models.huggingface import HFLM

        llama = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=3)).eval()
        found["harness"] = HFLM(
            pretrained=llama, tokenizer=tokenizer, batch_size=options.batch, device="cpu"
        )
    return found


def arms(options: argparse.Namespace, models: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """By task, what one arm does; each returns embeddings, scores or a loss."""
    encoder, scorer, harness = models["encoder"], models["scorer"], models.get("harness")
    found = arms_of_encoder(options, encoder)
    texts, others = (sentences(options.sentences, options, options.seed + i) for i in range(2))
    pairs = list(zip(texts, others, strict=True))

    def predict() -> Any:
        return scorer.predict(
            pairs, batch_size=options.batch, convert_to_tensor=True, show_progress_bar=False
        )

    found["predict"] = predict
    if harness is not None:
        found["loglikelihood"] = arm_of_harness(harness, texts, others)
    return found


def arm_of_harness(harness: Any, texts: list[str], others: list[str]) -> Callable[[], Any]:
    """The likelihoods of continuations, as tasks with questions and answers have them."""
    import torch
    from lm_eval.api.instance import Instance

    asked = [
        Instance("loglikelihood", {}, (one, " " + " ".join(other.split()[:CONTINUED])), number)
        for number, (one, other) in enumerate(zip(texts, others, strict=True))
    ]

    def loglikelihood() -> Any:
        return torch.tensor([found for found, _ in harness.loglikelihood(asked, disable_tqdm=True)])

    return loglikelihood


def arms_of_encoder(options: argparse.Namespace, encoder: Any) -> dict[str, Callable[[], Any]]:
    """What is done with a SentenceTransformer."""
    import torch
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    texts, others = (sentences(options.sentences, options, options.seed + i) for i in range(2))
    size, loss_of = options.batch, MultipleNegativesRankingLoss(encoder)

    def features(some: list[str]) -> dict[str, Any]:
        return dict(
            encoder.preprocess(some) if hasattr(encoder, "preprocess") else encoder.tokenize(some)
        )

    batches = [features(texts[first : first + size]) for first in range(0, len(texts), size)]
    pair = [features(texts[:size]), features(others[:size])]

    def training() -> Any:
        encoder.train()
        encoder.zero_grad()
        loss = loss_of([dict(part) for part in pair], None)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def as_they_come() -> Any:
        encoder.eval()
        return torch.cat([encoder(dict(batch))["sentence_embedding"] for batch in batches])

    def encode() -> Any:
        return encoder.encode(
            texts, batch_size=size, convert_to_tensor=True, show_progress_bar=False
        )

    return {"training": training, "as they come": as_they_come, "encode": encode}


def race_of(options: argparse.Namespace, *, task: str) -> interleave.Race:
    """Return the race of a task."""
    import torch

    import autopack

    torch.manual_seed(options.seed)
    stock = build(options)
    enabled = copy.deepcopy(stock)
    autopack.enable(enabled)
    each = {"stock": arms(options, stock)[task], "enabled": arms(options, enabled)[task]}
    goals = {"stock": GOAL} if task in ("training", "as they come") else {}
    return interleave.Race(each, "enabled", goals)


if __name__ == "__main__":
    tasks = ["training", "as they come", "encode", "predict"]
    tasks += ["loglikelihood"] if importlib.util.find_spec("lm_eval") else []
    races = {task: partial(race_of, task=task) for task in tasks}
    interleave.main("sentences", __doc__, races, sentences=256, batch=32, **workload.LLAMA)
