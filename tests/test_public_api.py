"""What users may rely on: the public names are listed, annotated and documented; a type checker can
read them."""

import inspect
from functools import cached_property
from importlib import import_module

import pytest

KINDS = property | cached_property | staticmethod | classmethod
NAMES = {
    "autopack": """
        AutopackError Handle InvalidPacking LeakDetected PackedBatchSampler PackingCollator UnsupportedModel
        __version__ audit disable enable estimate is_enabled micro_batches pack
    """,
    "autopack.packing": """
        CostModel HostBatch PackedBatchSampler PackedLayout PackingCollator Plan pack pack_shards
        plan shard_files shard_rows weighted_loss
    """,
    "autopack.registry": """
        Family families register
    """,
    "autopack.errors": """
        AutopackError InvalidPacking LeakDetected OutsideForward SiteDrift UnsupportedModel
        UnsupportedVersion
    """,
    "autopack.enabling.handle": """
        Handle
    """,
    "autopack.auditing.report": """
        LeakReport TrainerReport
    """,
    "autopack.testing": """
        assert_packing_exact assert_step_exact
    """,
}
"""Names for users, by module. A change of them is told in CHANGELOG.md."""
PUBLIC = {
    f"{module}.{name}": getattr(import_module(module), name)
    for module, names in NAMES.items()
    for name in names.split()
    if name != "__version__"
}


@pytest.mark.parametrize("module", NAMES)
def test_the_list_is_that_of_the_code(module):
    assert sorted(import_module(module).__all__) == sorted(NAMES[module].split())


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_and_results_are_annotated(name):
    found = PUBLIC[name]
    if isinstance(found, type) and issubclass(found, (BaseException, dict)):
        return  # made as their bases are
    for function in _functions(found):
        signature = inspect.signature(function)
        bare = [
            n
            for n, p in signature.parameters.items()
            if p.annotation is p.empty and n not in ("self", "cls")
        ]
        assert not bare, f"{function.__qualname__}: {bare} have no annotation"
        told = function.__name__ == "__init__" or signature.return_annotation is not signature.empty
        assert told, f"{function.__qualname__} does not say what it returns"


@pytest.mark.parametrize("name", PUBLIC)
def test_each_has_a_docstring(name):
    found = PUBLIC[name]
    undocumented = [
        function.__qualname__ for function in _functions(found, made=False) if not function.__doc__
    ]
    assert found.__doc__, name
    assert not undocumented


def _functions(found, made=True):
    if not inspect.isclass(found):
        return [found]
    members = [
        getattr(value, "fget", None)
        or getattr(value, "func", None)
        or getattr(value, "__func__", value)
        for base in reversed(found.__mro__)
        if base.__module__.startswith("autopack.")
        for name, value in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, KINDS))
    ]
    return [*members, *([found.__init__] if made and inspect.isfunction(found.__init__) else [])]
