"""An estimate as a picture: lengths, padding by batch size, and expected speed-ups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from autopack.errors import AutopackError
from autopack.packing.arms import Arms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PADDED, GROUPED, PACKED = "#b8bec7", "#8fc1cf", "#1f6f8b"


def draw(found: Arms) -> Figure:
    """The picture; raises `AutopackError` where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AutopackError("pictures need matplotlib: pip install 'autopack[plot]'") from error
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    lengths, padding, speed = figure.subplots(1, 3, width_ratios=(5, 4, 5))
    edges = np.linspace(0, max(1, found.lengths.max()), 61)
    lengths.hist(found.lengths, edges, color=PACKED)
    mean, median = found.lengths.mean(), np.median(found.lengths)
    lengths.axvline(mean, color="#22303c", lw=1, ls="--", label="mean")
    lengths.legend(frameon=False, fontsize=8)
    lengths.set(xlabel="tokens", ylabel="documents", xlim=(0, edges[-1]))
    lengths.set_title(f"{len(found.lengths):,} documents: mean {mean:,.0f}, median {median:,.0f} tokens", fontsize=10)

    sizes = list(dict.fromkeys(arm.batch_size for arm in found.padded))
    for order, color, shift in (("random", PADDED, -0.2), ("grouped", GROUPED, 0.2)):
        shares = [arm.padding * 100 for arm in found.padded if arm.order == order]
        label = "random order" if order == "random" else "grouped by length"
        padding.bar(np.arange(len(sizes)) + shift, shares, 0.4, color=color, label=label)
    padding.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    padding.set(xlabel="documents per padded batch", ylabel="padding, % of all columns", ylim=(0, 100))
    padding.legend(frameon=False, fontsize=8)
    padding.set_title("padding of padded batches", fontsize=10)

    arms = [arm for arm in found.padded if arm.batch_size == found.baseline.batch_size] + list(found.packed)
    names = [f"padded, {arm.order}" if arm.name == "padded" else arm.name.replace("_", "-") for arm in arms]
    colors = {"random": PADDED, "grouped": GROUPED, None: PACKED}
    bars = speed.barh(names, [arm.speedup for arm in arms], color=[colors[arm.order] for arm in arms])
    speed.bar_label(bars, [f"{arm.speedup:.2f} x" for arm in arms], padding=3, fontsize=8)
    speed.invert_yaxis()
    speed.set(xlabel="expected speed", xlim=(0, 1.15 * max(arm.speedup for arm in arms)))
    speed.set_title(f"against padded batches of {found.baseline.batch_size}; rows of {found.capacity:,}", fontsize=10)
    for axes in (lengths, padding, speed):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
