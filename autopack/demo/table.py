"""The results of the demos as plain text."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from autopack.demo.arms import Comparison
from autopack.demo.language_model import LOSS_TOLERANCE, STOCK_ROW, LanguageComparison
from autopack.demo.sentences import SentenceComparison
from autopack.demo.training import LlamaComparison
from autopack.demo.weights import MINILM, SMOLLM2, Weights
from autopack.version import __version__

_PYTHON = ".".join(platform.python_version_tuple()[:2])


def write_table(result: LlamaComparison) -> str:
    """The result of a small Llama: what was trained, cost, losses, and what documents in one row do to each other."""
    settings, lengths = result.settings, result.lengths
    half, most = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    setting = [
        f"autopack {__version__} demo: the same training with padded batches and with packed rows",
        "",
        f"  text      {result.texts:,} documents from the documentation of Python {_PYTHON}, {sum(lengths):,} tokens",
        f"            lengths: median {half}, one in ten above {most}, longest {lengths[-1]}",
        f"  model     Llama, {_size(result)}",
        f"  training  {settings.steps} steps of {settings.batch_size} documents, both ways in the same order and from "
        f"seed {settings.seed}",
    ]
    leak = [
        "Leak: how far the logits of a document move when a neighbour in its row is replaced, and how far they are",
        "from those of the document alone (largest values, in standard deviations of the logits).",
        f"  {'model(input_ids, position_ids)':<34}{'replaced neighbour':>20}{'packed and alone':>20}",
    ]
    for name, found in (("stock transformers", result.stock_leak), ("autopack.enable(model)", result.leak)):
        state = "none within float32 rounding" if found.exact else "LEAKS"
        leak.append(f"  {name:<34}{found.influence_of_others:>20.1e}{found.against_alone:>20.1e}   {state}")
    rates = [f"{result.real_tokens / seconds:,.0f}" for seconds in result.seconds["training"].values()]
    speed = [*_speed(result), _columns("real tokens per second", rates)]
    return _text(setting, speed, _losses(result), leak, [verdict(result)])


def verdict(result: LlamaComparison) -> str:
    """One sentence: faster, with the same losses and without a leak, or what went wrong."""
    if not result.losses_equal:
        return _failed("the losses of padded and packed training differ by more than rounding")
    if not result.leak.exact:
        return _failed("documents in a row of the enabled model change each other")
    return f"Packed rows: {result.speedup('packed'):.1f} times the tokens per second, the same losses, no leak."


def sentences_table(result: SentenceComparison) -> str:
    """The result of the demo of sentences: embeddings, losses, retrieval and speed."""
    settings = result.settings
    setting = [
        *_heading("sentences", MINILM, result),
        f"  text      {2 * settings.held_out} sentences and passages out of the documentation of Python {_PYTHON}",
        f"            ({result.pairs:,} docstrings: the first paragraph, and what stands below it)",
        f"  batches   {settings.batch_size} as they come, cut after {settings.longest} tokens",
        f"  training  {settings.steps} steps of {settings.batch_size} other pairs, AdamW, in-batch negatives, no "
        f"dropout, seed {settings.seed}",
    ]
    encoding = [
        "Embeddings of the same weights: the largest difference in any coordinate (vectors have length one).",
        *(f"  {f'{way} and {other}':<28}{value:>14.1e}" for (way, other), value in result.differences.items()),
    ]
    retrieval = [
        f"Retrieval: {settings.held_out} queries, each with one passage among {settings.held_out} (held out).",
        _columns("", result.losses),
    ]
    for name, found in (("before", result.before), ("after", result.after)):
        retrieval.append(_columns(f"accuracy@1 {name}", [f"{each.accuracy_at_1:.4f}" for each in found.values()]))
        retrieval.append(_columns(f"MRR {name}", [f"{each.mrr:.6f}" for each in found.values()]))
    retrieval.append(f"  {'identical' if result.retrieval_equal else 'NOT identical'} in all ways")
    return _text(setting, encoding, _losses(result), retrieval, _speed(result), [_sentences_verdict(result)])


def _sentences_verdict(result: SentenceComparison) -> str:
    if not result.embeddings_equal:
        return _failed("embeddings differ by more than rounding")
    if not result.losses_equal:
        return _failed("losses differ by more than rounding")
    if not result.retrieval_equal:
        return _failed("the ways do not find the same passages")
    encoding, training = (result.speedup("enabled", timed) for timed in ("encoding", "training"))
    return (
        f"Enabled: {encoding:.1f} times the speed in encoding and {training:.1f} in training, the same embeddings, "
        "losses and retrieval."
    )


def language_model_table(result: LanguageComparison) -> str:
    """The result of the demo of a language model: perplexity, losses and speed."""
    settings, ways = result.settings, [*result.losses, STOCK_ROW]
    setting = [
        *_heading("a language model", SMOLLM2, result),
        f"  text      documents out of the documentation of Python {_PYTHON}, cut after {settings.longest} tokens",
        f"  held out  {settings.held_out} documents, {sum(result.targets):,} tokens to predict, in batches of "
        f"{settings.batch_size}",
        f"  training  {settings.steps} steps of {settings.batch_size} other documents, clipped gradient descent, seed "
        f"{settings.seed}",
    ]
    evaluation = ["Perplexity of the held-out documents.", _columns("", ways)]
    for name, losses in (("before", result.before), ("after", result.after)):
        evaluation.append(_columns(name, [f"{result.perplexity(losses[way]):.6f}" for way in ways if way in losses]))
    most = max(result.evaluation_difference(way) for way in result.after)
    evaluation.append(f"  largest relative difference of a loss: {most:.1e}, {_equal(most <= LOSS_TOLERANCE)}")
    leak = result.evaluation_difference(STOCK_ROW)
    said = "it LEAKS" if leak > LOSS_TOLERANCE else "it does not leak in this release"
    evaluation.append(f"  {STOCK_ROW}: the packed rows in the stock model, whose losses are off by {leak:.1e}: {said}")
    outcome = (
        f"Packed rows: {result.speedup('packed'):.1f} times the speed in training, the same perplexity and losses."
    )
    if not result.succeeded:
        outcome = _failed("the losses of the ways differ by more than rounding")
    return _text(setting, evaluation, _losses(result), _speed(result), [outcome])


def _heading(what: str, weights: Weights, result: Comparison) -> list[str]:
    return [
        f"autopack {__version__} demo of {what}: stock on padded batches, enabled, and each one alone",
        "",
        f"  model     {weights.model} ({weights.licence}) out of {weights.package}",
        f"            {_size(result)}",
    ]


def _size(result: Comparison) -> str:
    return f"{result.parameters / 1e6:.1f} M parameters, sdpa, float32, {result.threads} CPU threads"


def _losses(result: Comparison) -> list[str]:
    """The losses of some steps, of all if there are few, and how far any are apart."""
    last = len(result.loss_differences) - 1
    shown = range(last + 1) if last < 8 else sorted({0, 1, *(last * part // 4 for part in range(1, 5))})
    lines = [
        "Loss: every optimizer step sees the same documents, so the losses must be the same.",
        _columns("step", [*result.losses, "difference"]),
    ]
    for step in shown:
        values = [f"{losses[step]:.6f}" for losses in result.losses.values()]
        lines.append(_columns(str(step + 1), [*values, f"{result.loss_differences[step]:.1e}"]))
    most = max(result.loss_differences)
    lines.append(f"  largest relative difference in {last + 1} steps: {most:.1e}, {_equal(result.losses_equal)}")
    return lines


def _speed(result: Comparison) -> list[str]:
    """What was computed and how long it took; the tokens are those of the first that was timed."""
    tokens = [result.padded_tokens if way == "padded" else result.real_tokens for way in result.losses]
    lines = [
        "Speed: padding costs time and teaches nothing; packed rows have none.",
        _columns("", result.losses),
        _columns("tokens computed", [f"{count:,}" for count in tokens]),
        _columns("of these padding", [f"{1 - result.real_tokens / count:.1%}" for count in tokens]),
    ]
    for timed, seconds in result.seconds.items():
        lines.append(_columns(f"seconds of {timed}", [f"{each:.1f}" for each in seconds.values()]))
        lines.append(_columns("  relative speed", [f"{result.speedup(way, timed):.2f}x" for way in seconds]))
    return lines


def _columns(name: str, values: Iterable[str]) -> str:
    return f"  {name:<24}" + "".join(f"{value:>14}" for value in values)


def _equal(equal: bool) -> str:
    return "equal within float32 rounding" if equal else "NOT equal within float32 rounding"


def _failed(wrong: str) -> str:
    return f"FAILED: {wrong}. Please report this with the output of `autopack doctor`."


def _text(*blocks: Iterable[str]) -> str:
    return "\n\n".join(map("\n".join, blocks))
