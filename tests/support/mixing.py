"""A leak that tests plant: boundaries that are off by one."""

from dataclasses import replace

from autopack.calls import rows


def shift_boundaries(monkeypatch):
    """Plant a leak: the second document begins one token late in every scope."""

    def shifted(model, layout, **others):
        bounds = layout.bounds.copy()
        bounds[1] += 1
        return scope(model, replace(layout, bounds=bounds, _derived={}), **others)

    scope = rows.Scope
    monkeypatch.setattr(rows, "Scope", shifted)
