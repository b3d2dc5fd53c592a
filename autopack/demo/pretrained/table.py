"""The results on pretrained models as plain text."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from autopack.demo.pretrained import language_model, sentences
from autopack.demo.pretrained.differences import relative_difference
from autopack.demo.pretrained.language_model import STOCK_ROW, LanguageComparison
from autopack.demo.pretrained.sentences import SentenceComparison
from autopack.demo.pretrained.weights import MINILM, SMOLLM2, Weights
from autopack.version import __version__

_REPORT = "Please report this with the output of `autopack doctor`."


def sentences_table(result: SentenceComparison) -> str:
    """The whole result of the demo of sentences: embeddings, losses, retrieval and speed."""
    settings = result.settings
    setting = [
        f"  text      {2 * settings.held_out} sentences and passages out of the documentation of Python {_python()}",
        f"            ({result.pairs:,} docstrings: the first paragraph, and what stands below it)",
        f"  batches   {settings.batch_size} as they come, cut after {settings.longest} tokens: {result.real_tokens:,} "
        f"tokens, {result.padded_tokens:,} padded",
        f"  training  {settings.steps} steps of {settings.batch_size} other pairs, AdamW, in-batch negatives, no "
        f"dropout, seed {settings.seed}",
    ]
    encoding = [
        "Embeddings of the same weights: the largest difference in any coordinate (vectors have length one).",
        *(f"  {f'{way} and {other}':<28}{value:>14.1e}" for (way, other), value in result.differences.items()),
    ]
    training = ["Training: losses of each step.", _columns("step", sentences.WAYS)]
    for number, losses in enumerate(zip(*(result.losses[way] for way in sentences.WAYS), strict=True)):
        training.append(_columns(str(number + 1), [f"{loss:.6f}" for loss in losses]))
    most = max(result.loss_difference(way, "alone") for way in sentences.WAYS)
    training.append(f"  largest relative difference: {most:.1e}, {_equal(result.losses_equal)}")
    retrieval = [
        f"Retrieval: {settings.held_out} queries, each with one passage among {settings.held_out} (held out).",
        _columns("", sentences.WAYS),
    ]
    for name, found in (("before", result.before), ("after", result.after)):
        by_way = [found[way] for way in sentences.WAYS]
        retrieval.append(_columns(f"accuracy@1 {name}", [f"{each.accuracy_at_1:.4f}" for each in by_way]))
        retrieval.append(_columns(f"MRR {name}", [f"{each.mrr:.6f}" for each in by_way]))
    retrieval.append(f"  {'identical' if result.retrieval_equal else 'NOT identical'} in all ways")
    encoded, trained = (_speeds(s) for s in (result.encoding_seconds, result.training_seconds))
    speed = [
        "Speed, relative to stock on padded batches in this run.",
        _columns("", sentences.WAYS),
        _columns("encoding", encoded),
        _columns("training", trained),
    ]
    heading = _heading("sentences", MINILM, result.parameters, result.threads)
    blocks = [[*heading, *setting], encoding, training, retrieval, speed, [sentences_verdict(result)]]
    return "\n\n".join("\n".join(block) for block in blocks)


def sentences_verdict(result: SentenceComparison) -> str:
    """One sentence: the same results, and how much faster; or what went wrong."""
    if not result.embeddings_equal:
        return f"FAILED: embeddings differ by more than rounding. {_REPORT}"
    if not result.losses_equal:
        return f"FAILED: losses differ by more than rounding. {_REPORT}"
    if not result.retrieval_equal:
        return f"FAILED: the ways do not find the same passages. {_REPORT}"
    encoding, training = (s["padded"] / s["enabled"] for s in (result.encoding_seconds, result.training_seconds))
    return (
        f"Enabled: {encoding:.1f} times the speed in encoding and {training:.1f} in training, the same embeddings, "
        "losses and retrieval."
    )


def language_model_table(result: LanguageComparison) -> str:
    """The whole result of the demo of a language model: perplexity, losses and speed."""
    settings, ways = result.settings, language_model.WAYS
    setting = [
        f"  text      documents out of the documentation of Python {_python()}, cut after {settings.longest} tokens",
        f"  held out  {settings.held_out} documents, {sum(result.targets):,} tokens to predict, in batches of "
        f"{settings.batch_size}",
        f"  training  {settings.steps} steps of {settings.batch_size} other documents, clipped gradient descent, seed "
        f"{settings.seed}: {result.real_tokens:,} tokens, {result.padded_tokens:,} padded",
    ]
    evaluation = ["Perplexity of the held-out documents.", _columns("", [*ways, STOCK_ROW])]
    for name, found in (("before", result.before), ("after", result.after)):
        shown = [f"{result.perplexity(found[way]):.6f}" for way in (*ways, STOCK_ROW) if way in found]
        evaluation.append(_columns(name, shown))
    leak = relative_difference(result.before[STOCK_ROW], result.before["alone"])
    said = "it LEAKS" if leak > language_model.LOSS_TOLERANCE else "it does not leak in this release"
    evaluation.append(f"  {STOCK_ROW}: the packed rows in the stock model, whose losses are off by {leak:.1e}: {said}")
    training = ["Training: losses of each step.", _columns("step", ways)]
    for number, losses in enumerate(zip(*(result.losses[way] for way in ways), strict=True)):
        training.append(_columns(str(number + 1), [f"{loss:.6f}" for loss in losses]))
    most = max(result.difference(way) for way in ways)
    training.append(f"  largest relative difference of any loss: {most:.1e}, {_equal(result.succeeded)}")
    speed = [
        "Speed of training, relative to stock on padded batches in this run.",
        _columns("", ways),
        _columns("", _speeds(result.seconds)),
    ]
    heading = _heading("language model", SMOLLM2, result.parameters, result.threads)
    blocks = [[*heading, *setting], evaluation, training, speed, [language_model_verdict(result)]]
    return "\n\n".join("\n".join(block) for block in blocks)


def language_model_verdict(result: LanguageComparison) -> str:
    """One sentence: the same losses, and how much faster; or what went wrong."""
    if not result.succeeded:
        return f"FAILED: the losses of the ways differ by more than rounding. {_REPORT}"
    return f"Packed rows: {result.speedup:.1f} times the speed in training, the same perplexity and losses."


def _heading(what: str, weights: Weights, parameters: int, threads: int) -> list[str]:
    return [
        f"autopack {__version__} demo of {'a ' if what == 'language model' else ''}{what}: stock on padded batches, "
        "enabled, and each one alone",
        "",
        f"  model     {weights.model} ({weights.licence}) out of {weights.package}",
        f"            {parameters / 1e6:.1f} M parameters, sdpa, float32, {threads} CPU threads",
    ]


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _columns(name: str, values: Sequence[str]) -> str:
    return f"  {name:<20}" + "".join(f"{value:>14}" for value in values)


def _speeds(seconds: dict[str, float]) -> list[str]:
    return [f"{seconds['padded'] / each:.2f}x" for each in seconds.values()]


def _equal(equal: bool) -> str:
    return "equal within float32 rounding" if equal else "NOT equal within float32 rounding"
