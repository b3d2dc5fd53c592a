"""sentence-transformers: sentences encoded and trained on, stock and with an enabled encoder.

    python -m benchmarks.sentences                                      about three minutes on two cores
    python -m benchmarks.sentences --sentences 64 --layers 1 --rounds 2 a first look
    python -m benchmarks.sentences --json benchmarks/results/sentences.json

The arms, each on a copy of the same BERT with mean pooling and the same sentences:

* `training`: one step of `MultipleNegativesRankingLoss` on pairs, drawn as trainers draw them.
* `as they come`: embeddings of batches in that order, as a service gets them.
* `encode`: `SentenceTransformer.encode`, which sorts sentences by length first, so that little padding is left.

Before anything is timed, embeddings and losses must agree within 1e-5.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks import interleave, workload

MEAN, SIGMA, LONGEST = 40, 0.8, 254
"""Words of a sentence or short passage: lognormal, as those of retrieval corpora are."""
TASKS = ("training", "as they come", "encode")
GOAL = 1.3
STATISTICS = ("median", "min", "cpu median")
TOLERANCE = 1e-5


def sentences(count: int, options: argparse.Namespace, seed: int) -> list[str]:
    """Sentences of random words."""
    generator = random.Random(seed)
    lengths = (generator.lognormvariate(math.log(MEAN) - SIGMA**2 / 2, SIGMA) for _ in range(count))
    chosen = range(options.vocabulary - 4)
    return [" ".join(f"w{w}" for w in generator.choices(chosen, k=min(max(round(n), 2), LONGEST))) for n in lengths]


def build(options: argparse.Namespace) -> Any:
    """A SentenceTransformer of a random BERT and a tokenizer of words."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [*special, *(f"w{number}" for number in range(options.vocabulary - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    config = BertConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=4 * options.hidden,
        max_position_embeddings=256,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        BertModel(config).save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=256
        ).save_pretrained(folder)
        tower = Transformer(folder)
    return SentenceTransformer(modules=[tower, Pooling(options.hidden)], device="cpu")


def arms(options: argparse.Namespace, encoder: Any) -> dict[str, Callable[[], Any]]:
    """By task, what one arm does; each returns embeddings or a loss."""
    import torch
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    texts, others = (sentences(options.sentences, options, options.seed + i) for i in range(2))
    size, loss_of = options.batch, MultipleNegativesRankingLoss(encoder)

    def features(some: list[str]) -> dict[str, Any]:
        return dict(encoder.preprocess(some) if hasattr(encoder, "preprocess") else encoder.tokenize(some))

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
        return encoder.encode(texts, batch_size=size, convert_to_tensor=True, show_progress_bar=False)

    return dict(zip(TASKS, (training, as_they_come, encode), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    workload.add_arguments(parser, rounds=5)
    options = parser.parse_args()
    interleave.keep_freed_memory()

    import torch

    import autopack

    torch.set_num_threads(options.threads)
    where = interleave.origin()
    torch.manual_seed(options.seed)
    stock = build(options)
    enabled = copy.deepcopy(stock)
    autopack.enable(enabled)
    prepared = {"stock": arms(options, stock), "enabled": arms(options, enabled)}
    off = {task: float((prepared["stock"][task]() - prepared["enabled"][task]()).abs().max()) for task in TASKS}
    if max(off.values()) > TOLERANCE:
        raise SystemExit(f"the arms do not agree within {TOLERANCE}: {off}")
    times = {task: interleave.interleave({n: a[task] for n, a in prepared.items()}, options.rounds) for task in TASKS}
    speeds = {
        task: {key: found["stock"][key] / found["enabled"][key] for key in STATISTICS} for task, found in times.items()
    }
    result = {
        "benchmark": "sentences",
        "origin": where,
        "settings": workload.settings(options),
        "largest differences": off,
        "seconds": times,
        "speed of stock": speeds,
    }
    interleave.write(options.json, result, describe(result))


def describe(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    settings = result["settings"]
    lines = [
        interleave.heading(result["origin"]),
        "",
        f"BERT, {settings['layers']} layers x {settings['hidden']}, fp32, mean pooling; {settings['sentences']} "
        f"sentences of {MEAN} words on average, batches of {settings['batch']}",
        f"{settings['rounds']} interleaved rounds; embeddings and losses agree within "
        f"{max(result['largest differences'].values()):.0e}",
        "",
        f"{'real tokens/s / stock':<24}{'of medians':>12}{'of minima':>12}{'of cpu':>12}",
    ]
    for task, speed in result["speed of stock"].items():
        lines.append(f"{task:<24}" + "".join(f"{speed[key]:>12.3f}" for key in STATISTICS))
    lines += ["", f"Goal: at least {GOAL} where sentences are not sorted."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
