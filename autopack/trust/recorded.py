"""What the recorded runs of the leak test have covered: classes, their code, implementations and configurations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from autopack.inspection.configs import text_config
from autopack.inspection.releases import is_flash
from autopack.trust import configuration
from autopack.trust.content import Content
from autopack.trust.data import load, nearest, survey_of
from autopack.trust.own import Code, Own, class_name


def why_not_recorded(model: PreTrainedModel) -> str | None:
    """In one clause, why no recorded run has covered this model as it is configured; None where one has."""
    reasons = (_why_not(model, _record(release)) for release in nearest(transformers.__version__))
    first = next(reasons)
    return None if first is None or any(reason is None for reason in reasons) else first


def _why_not(model: PreTrainedModel, record: _Record) -> str | None:
    model_type = str(model.config.model_type)
    known = record.types.get(model_type)
    if known is None:
        return f"model type {model_type!r} has not been measured ({record.release})"
    own = Own(model)
    base, added = own.base(type(model))
    if class_name(base) not in known["classes"]:
        named = f"{base.__module__}.{base.__qualname__}"
        return f"{named} has not been measured as a {model_type!r} model ({record.release})"
    for part in _attending(model.config):
        asked = getattr(part, "_attn_implementation", None) or "eager"
        if _backend(asked) not in record.backends(model_type):
            return f"attn_implementation={asked!r} has not been measured for {model_type!r}"
    return added or own.why_other(record.content) or next(_unmeasured(model, record), None)


def fields_in(words: configuration.Words) -> dict[str, dict[str, list[str]]]:
    """Words as they are recorded: sorted, and without those that are usual."""
    return {
        model_type: {f: sorted(w) for f, w in sorted(fields.items()) if w != configuration.usual(f)}
        for model_type, fields in sorted(words.items())
    }


class _Record:
    """What was recorded of one release, ready to be asked."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.types: dict[str, Any] = load(survey_of(release))["types"]
        self._measured = load()

    @cached_property
    def content(self) -> Content:
        """The code that was run."""
        return Content.of(self.release)

    def backends(self, model_type: str) -> set[str]:
        """The implementations of attention that were measured for a type."""
        found = set(self.types[model_type]["implementations"])
        if self._measured["with"]["transformers"] == self.release:
            for types in self._measured["tasks"].values():
                found.update(types.get(model_type, {}).get("errors", ()))
        return found

    def words(self, model_type: str, field: str) -> frozenset[str]:
        """The words that a field had in variants that were exact."""
        known = self.types.get(model_type, {"fields": {}})["fields"]
        return frozenset(known[field]) if field in known else configuration.usual(field)


@cache
def _record(release: str) -> _Record:
    return _Record(release)


def _backend(implementation: str) -> str:
    """The name under which the recorded runs have an attention implementation."""
    if implementation.startswith("paged"):
        return implementation
    return "flash" if is_flash(implementation) else {"flex_attention": "flex"}.get(implementation, implementation)


def _attending(config: PretrainedConfig) -> list[Any]:
    """The configurations by which text attends: the whole, and what it has for its encoder and decoder."""
    parts = [config, text_config(config, decoder=True), text_config(config, encoder=True)]
    return list({id(part): part for part in parts}.values())


def _unmeasured(model: PreTrainedModel, record: _Record) -> Iterator[str]:
    """A clause for every field with a value that no measured variant had and that the model can read."""
    code = Code(model)
    for model_type, fields in configuration.describe(model.config).items():
        for field, words in fields.items():
            measured = record.words(model_type, field)
            missing = sorted(word for word in words if not configuration.is_met(word, measured))
            if missing and code.can_read(field):
                found = ", ".join(sorted(measured)) or "none of its values"
                yield f"{field} of {model_type!r} is {', '.join(missing)}, and {found} has been measured"
