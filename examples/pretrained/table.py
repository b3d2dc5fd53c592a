"""The results on pretrained models as plain text."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from autopack.demo import LOSS_TOLERANCE
from autopack.version import __version__

from .arms import Comparison
from .language_model import STOCK_ROW, LanguageComparison
from .sentences import SentenceComparison
from .weights import MINILM, SMOLLM2, Weights

PYTHON = ".".join(platform.python_version_tuple()[:2])


def sentences_table(result: SentenceComparison) -> str:
    """The result of the demo of sentences: embeddings, losses, retrieval and speed."""
    settings = result.settings
    setting = [
        *_heading("sentences", MINILM, result),
        (
            f"  text      {2 * settings.held_out} sentences and passages out of the documentation "
            f"of Python {PYTHON}"
        ),
        f"            ({result.pairs:,} docstrings: the first paragraph, and what stands below it)",
        f"  batches   {settings.batch_size} as they come, cut after {settings.longest} tokens",
        f"  training  {settings.steps} steps of {settings.batch_size} other pairs, AdamW, in-batch "
        f"negatives, no dropout, seed {settings.seed}",
    ]
    encoding = [
        (
            "Embeddings of the same weights: the largest difference in any coordinate (vectors "
            "have length one)."
        ),
        *(
            f"  {f'{way} and {other}':<28}{value:>14.1e}"
            for (way, other), value in result.differences.items()
        ),
    ]
    retrieval = [
        (
            f"Retrieval: {settings.held_out} queries, each with one passage among "
            f"{settings.held_out} (held out)."
        ),
        columns("", result.losses),
    ]
    for name, found in (("before", result.before), ("after", result.after)):
        retrieval.append(
            columns(f"accuracy@1 {name}", [f"{each.accuracy_at_1:.4f}" for each in found.values()])
        )
        retrieval.append(columns(f"MRR {name}", [f"{each.mrr:.6f}" for each in found.values()]))
    retrieval.append(f"  {'identical' if result.retrieval_equal else 'NOT identical'} in all ways")
    return text(
        setting, encoding, losses(result), retrieval, speed(result), [_sentences_verdict(result)]
    )


def _sentences_verdict(result: SentenceComparison) -> str:
    if not result.embeddings_equal:
        return failed("embeddings differ by more than rounding")
    if not result.losses_equal:
        return failed("losses differ by more than rounding")
    if not result.retrieval_equal:
        return failed("the ways do not find the same passages")
    encoding, training = (result.speedup("enabled", timed) for timed in ("encoding", "training"))
    return (
        f"Enabled: {encoding:.1f} times the speed in encoding and {training:.1f} in training, the "
        "same embeddings, losses and retrieval."
    )


def language_model_table(result: LanguageComparison) -> str:
    """The result of the demo of a language model: perplexity, losses and speed."""
    settings, ways = result.settings, [*result.losses, STOCK_ROW]
    setting = [
        *_heading("a language model", SMOLLM2, result),
        (
            f"  text      documents out of the documentation of Python {PYTHON}, cut after "
            f"{settings.longest} tokens"
        ),
        f"  held out  {settings.held_out} documents, {sum(result.targets):,} tokens to predict, in "
        f"batches of {settings.batch_size}",
        f"  training  {settings.steps} steps of {settings.batch_size} other documents, clipped "
        f"gradient descent, seed {settings.seed}",
    ]
    evaluation = ["Perplexity of the held-out documents.", columns("", ways)]
    for name, found in (("before", result.before), ("after", result.after)):
        evaluation.append(
            columns(name, [f"{result.perplexity(found[way]):.6f}" for way in ways if way in found])
        )
    most = max(result.evaluation_difference(way) for way in result.after)
    evaluation.append(
        f"  largest relative difference of a loss: {most:.1e}, {equal(most <= LOSS_TOLERANCE)}"
    )
    leak = result.evaluation_difference(STOCK_ROW)
    said = "it LEAKS" if leak > LOSS_TOLERANCE else "it does not leak in this release"
    evaluation.append(
        f"  {STOCK_ROW}: the packed rows in the stock model, whose losses are off by {leak:.1e}: "
        f"{said}"
    )
    outcome = (
        f"Packed rows: {result.speedup('packed'):.1f} times the speed in training, the same "
        "perplexity and losses."
    )
    if not result.succeeded:
        outcome = failed("the losses of the ways differ by more than rounding")
    return text(setting, evaluation, losses(result), speed(result), [outcome])


def _heading(what: str, weights: Weights, result: Comparison) -> list[str]:
    return [
        f"autopack {__version__}, {what}: stock on padded batches, enabled, and each one alone",
        "",
        f"  model     {weights.model} ({weights.licence}) out of {weights.package}",
        f"            {size(result)}",
    ]


def size(result: Comparison) -> str:
    return (
        f"{result.parameters / 1e6:.1f} M parameters, sdpa, float32, {result.threads} CPU threads"
    )


def losses(result: Comparison) -> list[str]:
    """The losses of some steps, of all if there are few, and how far any are apart."""
    last = len(result.loss_differences) - 1
    shown = (
        range(last + 1) if last < 8 else sorted({0, 1, *(last * part // 4 for part in range(1, 5))})
    )
    lines = [
        "Loss: every optimizer step sees the same documents, so the losses must be the same.",
        columns("step", [*result.losses, "difference"]),
    ]
    for step in shown:
        values = [f"{losses[step]:.6f}" for losses in result.losses.values()]
        lines.append(columns(str(step + 1), [*values, f"{result.loss_differences[step]:.1e}"]))
    most = max(result.loss_differences)
    lines.append(
        f"  largest relative difference in {last + 1} steps: {most:.1e}, "
        f"{equal(result.losses_equal)}"
    )
    return lines


def speed(result: Comparison) -> list[str]:
    """What was computed and how long it took; the tokens are those of the first that was timed."""
    tokens = [
        result.padded_tokens if way == "padded" else result.real_tokens for way in result.losses
    ]
    lines = [
        "Speed: padding costs time and teaches nothing; packed rows have none.",
        columns("", result.losses),
        columns("tokens computed", [f"{count:,}" for count in tokens]),
        columns("of these padding", [f"{1 - result.real_tokens / count:.1%}" for count in tokens]),
    ]
    for timed, seconds in result.seconds.items():
        lines.append(columns(f"seconds of {timed}", [f"{each:.1f}" for each in seconds.values()]))
        lines.append(
            columns("  relative speed", [f"{result.speedup(way, timed):.2f}x" for way in seconds])
        )
    return lines


def columns(name: str, values: Iterable[str]) -> str:
    return f"  {name:<24}" + "".join(f"{value:>14}" for value in values)


def equal(equal: bool) -> str:
    return "equal within float32 rounding" if equal else "NOT equal within float32 rounding"


def failed(wrong: str) -> str:
    return f"FAILED: {wrong}. Please report this with the output of `autopack doctor`."


def text(*blocks: Iterable[str]) -> str:
    return "\n\n".join(map("\n".join, blocks))
