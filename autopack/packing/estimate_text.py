"""An estimate as text for a terminal."""

from __future__ import annotations

from autopack.packing.arms import Arms


def text(found: Arms) -> str:
    """The estimate as tables, and how its figures come about."""
    baseline, counts, cost = found.baseline, found.counts, found.cost
    spread = ", ".join(f"{name} {value:,.0f}" for name, value in found.as_dict()["lengths"].items())
    over = [
        f"{getattr(counts, name):,} {name}" + (f" ({getattr(counts, more):,} tokens)" if more else "")
        for name, more in (("truncated", "truncated_tokens"), ("split", None), ("dropped", "dropped_tokens"))
        if getattr(counts, name)
    ]
    longer = f"\nlonger than {found.capacity:,} tokens: {', '.join(over)}" if over else ""
    share = {(arm.batch_size, arm.order): arm.padding for arm in found.padded}
    paddings = [
        f"{size:<22}{share[size, 'random']:>10.1%}{share[size, 'grouped']:>20.1%}"
        for size in dict.fromkeys(arm.batch_size for arm in found.padded)
    ]
    grouped = next(a for a in found.padded if a.batch_size == baseline.batch_size and a.order == "grouped")
    named = [(f"{a.name} of {a.batch_size}" if a.batch_size else a.name, a) for a in found.packed]
    gains = [
        f"{name:<22}{arm.rows:>12,}{arm.padding:>10.2%}{found.tokens_saved(arm):>14.1%}"
        f"{found.attention_saved(arm):>17.1%}{arm.speedup:>8.2f} x"
        for name, arm in [("padded, grouped", grouped), *named]
    ]
    column, pair = f"{cost.linear:g}", f"1 / {1 / cost.quadratic:,.0f}" if cost.quadratic else "nothing"
    newline = "\n"  # an expression in an f-string may hold no backslash before Python 3.12
    return f"""\
{counts.documents:,} documents, {counts.tokens:,} tokens: {spread}{longer}

padded batches: share of padding
{"documents per batch":<22}{"random":>10}{"grouped by length":>20}
{newline.join(paddings)}

packed rows, against padded batches of {baseline.batch_size} in random order
{"":<22}{"rows":>12}{"padding":>10}{"tokens saved":>14}{"attention saved":>17}{"speed-up":>10}
{newline.join(gains)}

Rows of plans hold at most {found.capacity:,} tokens and count as padded to that; attention stays inside documents,
which fixed_length cuts. Speed-up: cost of the padded batches over cost of the rows, where a column costs {column} and
a pair of columns {pair}. Nothing was timed."""
