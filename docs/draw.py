"""Draw the pictures of README and docs, light and dark: python -m docs.draw

`packing` shows four documents padded and packed, and the measured change of every token's
logits when another token is replaced, in a tiny random Llama, stock and enabled. `plan` shows
documents with lengths like instructions', in padded batches and in the rows of
`autopack.packing.plan`. `prefixes` shows rows that begin alike, the row that runs, and the
measured influence of its tokens. `museum` shows the influence of tokens in six mistaken
models, as they are and enabled. Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from transformers import set_seed

import autopack
from autopack import tiny
from compat.museum.exhibit import load

IMAGES = Path(__file__).parent / "images"
LENGTHS = (7, 12, 5, 9)
PROMPT, RESTS = 16, (5, 9, 3)
DOCUMENTS = ("#1f6f8b", "#d9822b", "#7fb3c8", "#8a6d9e")
"""Told apart by lightness too, so that nobody needs to see the hues."""
NOTHING, MOST = 1e-5, 10.0
"""Changes, in standard deviations of the logits, that are drawn lightest and darkest."""
THEMES = {
    "light": {
        "ink": "#22303c",
        "faint": "#5b6773",
        "padding": "#e3e6ea",
        "paper": "#ffffff",
        "empty": "#f4f6f8",
    },
    "dark": {
        "ink": "#e6edf3",
        "faint": "#9aa7b4",
        "padding": "#30363d",
        "paper": "#0d1117",
        "empty": "#161b22",
    },
}
MISTAKEN = {
    "positions_restart_alone": "positions restart,\nthe mask does not",
    "window_over_the_stream": "a window over\nthe whole stream",
    "images_that_see_each_other": "images see the images\nof other documents",
    "short_convolution": "LFM2: a convolution\nover boundaries",
    "state_of_a_linear_attention": "Qwen3.5: a state\nthat goes on",
    "experts_choose_among_the_row": "experts choose tokens\nby the row's mean",
}
"""Exhibits of models that are exact once they are enabled, with their captions. All are
called without a cache."""
Theme = dict[str, str]


def packing(theme: Theme) -> Figure:
    """Documents padded and packed, and who changes whom in the packed row."""
    figure = Figure(figsize=(13, 5.2), layout="constrained", facecolor=theme["paper"])
    padded, stock, enabled = figure.subplots(1, 3, width_ratios=(4, 4, 4))
    _rows(padded, theme)
    model = tiny.build("llama", attn_implementation="sdpa").eval()
    before = influence(model)
    with autopack.enable(model):
        after = influence(model)
    _map(stock, before, theme, "Packed, stock transformers")
    _map(enabled, after, theme, "Packed, autopack.enable(model)")
    return figure


@torch.no_grad()
def influence(model: Any, **options: Any) -> np.ndarray:
    """Return the change of token i's logits when token j is replaced, in deviations."""
    ids = torch.randint(5, 90, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, position_ids=positions, **options).logits[0]

    plain = logits(ids)
    found = []
    for column in range(ids.shape[1]):
        changed = ids.clone()
        changed[0, column] = (changed[0, column] + 40) % 90 + 5
        found.append((logits(changed) - plain).abs().amax(-1) / plain.std())
    return torch.stack(found, dim=1).numpy()


def _rows(axes: Axes, theme: Theme) -> None:
    """The documents as a padded batch, and below it as one row."""
    longest, total = max(LENGTHS), sum(LENGTHS)
    for row, length in enumerate(LENGTHS):
        _cells(axes, 0, row, longest, theme["padding"], theme)
        _cells(axes, 0, row, length, DOCUMENTS[row], theme)
    start, below = 0, len(LENGTHS) + 3.0
    scale = longest / total * 1.9
    for number, length in enumerate(LENGTHS):
        _cells(axes, start * scale, below, length, DOCUMENTS[number], theme, scale)
        start += length
    share = 1 - total / (longest * len(LENGTHS))
    said = f"{share:.0%} of what is computed is padding"
    axes.text(0, len(LENGTHS) + 0.15, said, color=theme["faint"], va="top", fontsize=12)
    axes.text(0, below - 0.55, "Packed: one row, no padding", color=theme["ink"], fontsize=14)
    positions = "position_ids  " + "  ".join(f"0 … {length - 1}" for length in LENGTHS)
    axes.text(0, below + 1.15, positions, color=theme["faint"], va="top", fontsize=12)
    axes.set(xlim=(-0.3, total * scale + 0.3), ylim=(below + 2.6, -0.8))
    axes.set_title(
        "Padded: one document per row", color=theme["ink"], loc="left", fontsize=14, pad=22
    )
    axes.set_facecolor(theme["paper"])
    axes.axis("off")


def _cells(
    axes: Axes,
    left: float,
    row: float,
    count: int,
    color: str,
    theme: Theme,
    width: float = 1.9,
) -> None:
    for number in range(count):
        corner = left + number * width, row
        axes.add_patch(
            Rectangle(
                corner, width, 0.82, facecolor=color, edgecolor=theme["paper"], linewidth=1.2
            )
        )


def _map(axes: Axes, found: np.ndarray, theme: Theme, title: str) -> None:
    """Who changes whom, and by how much at most across documents."""
    map_of(axes, found, theme)
    number = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    largest = float(np.nanmax(np.where(number[:, None] == number, np.nan, found)))
    below = (
        f"logits changed by other documents: up to {largest:.1f} σ"
        if largest
        else "logits changed by other documents: 0"
    )
    axes.text(-0.5, len(number) + 0.6, below, color=theme["faint"], fontsize=12, va="center")
    axes.set_title(title, color=theme["ink"], loc="left", fontsize=14, pad=22)
    axes.set_ylim(len(number) + 1.8, -2.8)


def map_of(axes: Axes, found: np.ndarray, theme: Theme) -> None:
    """Who changes whom: inside documents in their colours, across them in red."""
    number = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    same = number[:, None] == number[None, :]
    across = np.where(same, np.nan, np.maximum(found, NOTHING / 10))
    reds = LinearSegmentedColormap.from_list("leak", ["#f0b49b", "#d9482b", "#8c1c13"])
    size = len(number)
    axes.imshow(
        np.ones((size, size)),
        cmap=LinearSegmentedColormap.from_list("empty", [theme["empty"]] * 2),
    )
    axes.imshow(
        across,
        cmap=reds.with_extremes(under=(0, 0, 0, 0), bad=(0, 0, 0, 0)),
        norm=LogNorm(NOTHING, MOST),
    )
    start = 0
    for color, length in zip(DOCUMENTS, LENGTHS, strict=True):
        for i in range(length):
            axes.add_patch(
                Rectangle((start - 0.5, start + i - 0.5), i + 1, 1, facecolor=color)
            )
        axes.add_patch(
            Rectangle((start - 0.5, -2.6), length, 1.4, facecolor=color, clip_on=False)
        )
        axes.add_patch(
            Rectangle((-2.7, start - 0.5), 1.4, length, facecolor=color, clip_on=False)
        )
        start += length
    axes.set(xticks=[], yticks=[], xlim=(-2.8, size - 0.4), ylim=(size - 0.4, -2.8))
    axes.set_facecolor(theme["paper"])
    axes.spines[:].set_visible(False)


def plan(theme: Theme) -> Figure:
    """Draw documents in padded batches of eight, and in the rows of a plan."""
    lengths = np.clip(np.random.default_rng(4).lognormal(4.4, 0.8, 32).astype(int), 12, 512)
    max_length = 512
    made = autopack.packing.plan(lengths, max_length)
    batches = [lengths[first : first + 8] for first in range(0, len(lengths), 8)]
    figure = Figure(figsize=(13, 5.2), layout="constrained", facecolor=theme["paper"])
    padded, packed, sizes = figure.subplots(1, 3, width_ratios=(5, 5, 4))
    for row, length in enumerate(lengths):
        padded.barh(row, batches[row // 8].max(), height=0.85, color=theme["padding"])
        padded.barh(row, length, height=0.85, color=DOCUMENTS[row % len(DOCUMENTS)])
    computed = sum(len(batch) * batch.max() for batch in batches)
    _titled(padded, f"Padded batches of 8: {1 - lengths.sum() / computed:.0%} padding", theme)
    for row in range(len(made.bounds) - 1):
        packed.barh(row, max_length, height=0.85, color=theme["padding"])
        left = 0
        for document, length in zip(
            made.documents[made.pieces(row)], made.lengths[made.pieces(row)], strict=True
        ):
            color = DOCUMENTS[document % len(DOCUMENTS)]
            packed.barh(
                row,
                length,
                left=left,
                height=0.85,
                color=color,
                edgecolor=theme["paper"],
                linewidth=1,
            )
            left += int(length)
    _titled(
        packed,
        f"autopack.packing.plan, rows of {max_length}: {1 - made.fill:.1%} empty",
        theme,
    )
    for axes, rows in ((padded, len(lengths)), (packed, len(made.bounds) - 1)):
        axes.set(yticks=[], xlim=(0, max_length + 4), ylim=(rows - 0.4, -0.6))
        axes.set_xlabel("tokens", color=theme["faint"], fontsize=12)
    drawn = np.random.default_rng(5).lognormal(4.4, 0.8, 40000).astype(int)
    drawn = drawn[(drawn >= 12) & (drawn <= max_length)][:32000]
    longest = np.repeat(drawn.reshape(-1, 8).max(axis=1), 8)
    bins = np.arange(0, max_length + 1, 16)
    for values, color, said in (
        (longest, theme["padding"], "columns in a batch of 8"),
        (drawn, DOCUMENTS[0], "tokens"),
    ):
        sizes.hist(
            values,
            bins=bins,
            weights=values,
            color=color,
            label=f"{said}, {values.sum() / 1e6:.1f} million",
        )
    sizes.legend(frameon=False, labelcolor=theme["ink"], fontsize=11, loc="upper left")
    sizes.margins(y=0.22)
    _titled(sizes, "32,000 documents: where the work is", theme)
    sizes.set_xlabel(
        "length of a document, and of its row", color=theme["faint"], fontsize=12
    )
    sizes.set(yticks=[], xlim=(0, max_length + 4))
    return figure


def _titled(axes: Axes, title: str, theme: Theme) -> None:
    axes.set_title(title, color=theme["ink"], loc="left", fontsize=13)
    axes.set_facecolor(theme["paper"])
    axes.tick_params(colors=theme["faint"], labelsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme["faint"])


def prefixes(theme: Theme) -> Figure:
    """Rows that begin alike, the row that runs, and who changes whom in it."""
    figure = Figure(figsize=(13, 4.6), layout="constrained", facecolor=theme["paper"])
    rows, seen = figure.subplots(1, 2, width_ratios=(8, 4))
    colors = [DOCUMENTS[0], *DOCUMENTS[1:]]
    longest = PROMPT + max(RESTS)
    for row, rest in enumerate(RESTS):
        _cells(rows, 0, row, longest, theme["padding"], theme)
        _cells(rows, 0, row, PROMPT, colors[0], theme)
        _cells(rows, PROMPT * 1.9, row, rest, colors[row + 1], theme)
    computed, below, start = PROMPT + sum(RESTS), len(RESTS) + 3.0, 0
    scale = longest * 1.9 / computed
    for length, color in zip((PROMPT, *RESTS), colors, strict=True):
        _cells(rows, start * scale, below, length, color, theme, scale)
        start += length
    said = f"{len(RESTS) * longest} columns: padding, and the same prompt {len(RESTS)} times"
    rows.text(0, len(RESTS) + 0.15, said, color=theme["faint"], va="top", fontsize=12)
    rows.text(0, below - 0.55, "What an enabled model runs", color=theme["ink"], fontsize=14)
    sees = "each completion sees the prompt and itself, with positions that go on"
    said = f"{computed} columns; {sees}"
    rows.text(0, below + 1.15, said, color=theme["faint"], va="top", fontsize=12)
    rows.set(xlim=(-0.3, longest * 1.9 + 0.3), ylim=(below + 2.2, -0.8))
    rows.set_title(
        "Padded: completions of one prompt, one per row",
        color=theme["ink"],
        loc="left",
        fontsize=14,
        pad=22,
    )
    rows.set_facecolor(theme["paper"])
    rows.axis("off")
    found = influence_of_tree()
    size, number = len(found), np.repeat(np.arange(len(colors)), (PROMPT, *RESTS))
    for i, j in zip(*np.nonzero(found > 0), strict=True):
        seen.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=colors[number[j]]))
    for k in range(size):
        seen.add_patch(
            Rectangle((k - 0.5, -2.6), 1, 1.4, facecolor=colors[number[k]], clip_on=False)
        )
        seen.add_patch(
            Rectangle((-2.7, k - 0.5), 1.4, 1, facecolor=colors[number[k]], clip_on=False)
        )
    seen.set_title(
        "Tokens (rows) that another one changes",
        color=theme["ink"],
        loc="left",
        fontsize=14,
        pad=22,
    )
    seen.set(
        xticks=[], yticks=[], xlim=(-2.8, size - 0.4), ylim=(size - 0.4, -2.8), aspect="equal"
    )
    seen.set_facecolor(theme["empty"])
    seen.spines[:].set_visible(False)
    return figure


@torch.no_grad()
def influence_of_tree() -> np.ndarray:
    """Return the change of logits when a token is replaced: prompt, then completions."""
    model = tiny.build("llama", attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 90, (PROMPT + sum(RESTS),), generator=generator)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        prompt, *rests = tokens.split([PROMPT, *RESTS])
        rows = [torch.cat([prompt, rest]) for rest in rests]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
        found = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return torch.cat(
            [
                found[0, :PROMPT],
                *(of[PROMPT : PROMPT + n] for of, n in zip(found, RESTS, strict=True)),
            ]
        )

    with autopack.enable(model) as handle:
        plain, columns = logits(tokens), []
        for column in range(len(tokens)):
            changed = tokens.clone()
            changed[column] = (changed[column] + 40) % 90 + 5
            columns.append((logits(changed) - plain).abs().amax(-1) / plain.std())
        assert handle.tally.evaluation.shared > 0
    return torch.stack(columns, dim=1).numpy()


def museum(theme: Theme) -> Figure:
    """Who changes whom in mistaken models, and below in the same ones enabled."""
    figure = Figure(figsize=(13, 5.2), layout="constrained", facecolor=theme["paper"])
    above, below = figure.subplots(2, len(MISTAKEN))
    for (name, caption), stock, enabled in zip(MISTAKEN.items(), above, below, strict=True):
        set_seed(0)
        model = load(f"models.{name}").mistaken().eval()
        map_of(stock, influence(model, use_cache=False), theme)
        stock.set_title(caption, color=theme["ink"], loc="left", fontsize=11)
        with autopack.enable(model):
            map_of(enabled, influence(model, use_cache=False), theme)
    below[0].set_title("the same, enabled", color=theme["ink"], loc="left", fontsize=11)
    return figure


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for draw in (packing, plan, prefixes, museum):
        for theme, colors in THEMES.items():
            with matplotlib.rc_context({"font.family": "DejaVu Sans"}):
                path = IMAGES / f"{draw.__name__}-{theme}.png"
                draw(colors).savefig(path, dpi=110, metadata={"Software": None})
                print(path.relative_to(IMAGES.parent.parent))


if __name__ == "__main__":
    main()
