"""Shared code of all tests: tiny models, documents, the reference (each document alone), and the
state of patched functions."""

import gc
import os
import random
import sys
from itertools import accumulate, pairwise
from pathlib import Path

# Tiny models gain nothing from threads, and those of several processes spin against each other;
# before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import numpy
import pytest
import torch

from autopack import tiny

torch.set_num_threads(1)
# Machines that run tests are shared: an example that waits for a core is no failure.
hypothesis.settings.register_profile(
    "autopack", deadline=None, derandomize=os.environ.get("CI") == "true"
)
hypothesis.settings.load_profile("autopack")

SEED = 0
"""Seed of all generators at the beginning of every test and every fixture."""
LENGTHS = (7, 12, 5, 9)
"""One row of documents, as in the auditor."""
OTHER_LENGTHS = (3, 20, 10)
"""The same number of tokens, cut elsewhere."""
FLOAT64 = 1e-9
"""Largest error in float64: rounding leaves about 1e-14 of logits of order 1, and leaks start near
1e-2."""
FLOAT32 = 1e-4
"""Largest error in float32, as in the auditor: rounding leaves about 1e-6, and leaks start near
1e-2."""
LEAK = 1e-2
"""Least error that a negative control must show."""


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run the tests marked exhaustive too")
    parser.addoption(
        "--shuffle",
        metavar="SEED",
        help="run modules, and the tests of each, in an order by chance",
    )
    parser.addoption(
        "--part", metavar="K/N", default="1/1", help="of those marked exhaustive, every Nth one"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect `exhaustive` tests and most cases of `sampled` ones, unless they are asked for.

    Tests are asked for by name, by a part of it or by an option. Both kinds are marks, or lines of
    `tests/slow.tsv`.
    """
    slow = _slow()
    groups = {}
    for item in items:
        groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, group in groups.items():
        mark = group[0].get_closest_marker("sampled")
        wanted = min(slow.get(name, len(group)), len(group) if mark is None else mark.args[0])
        kept = {len(group) * place // wanted for place in range(wanted)}
        for place, item in enumerate(group):
            if place not in kept:
                item.add_marker(pytest.mark.exhaustive)
    exhaustive = [item for item in items if item.get_closest_marker("exhaustive") is not None]
    asked = config.option.all or config.option.markexpr or config.option.keyword
    if asked or any("::" in argument for argument in config.args):
        part, parts = map(int, config.option.part.split("/"))
        left_out = [item for place, item in enumerate(exhaustive) if place % parts != part - 1]
    else:
        left_out = exhaustive
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = {*left_out}
        items[:] = [item for item in items if item not in gone]
    if config.option.shuffle is not None:
        # By names alone, so that all processes of xdist draw the same order.
        draw = random.Random(config.option.shuffle)
        modules = {item.nodeid.partition("::")[0]: None for item in items}
        place = {module: draw.random() for module in modules}
        items.sort(key=lambda item: (place[item.nodeid.partition("::")[0]], draw.random()))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup():
    """Seed all generators, so that a fixture's draws do not depend on the first test with it."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call():
    """Seed all generators, so that a test's draws do not depend on the tests before it."""
    _seed()


def _seed():
    """Seed Python's, numpy's and torch's generators with `SEED`."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def _slow():
    """Return how many cases of a test the usual run takes, by its name, from `tests/slow.tsv`."""
    lines = (Path(__file__).parent / "slow.tsv").read_text().splitlines()
    return {
        name: int(count)
        for count, name in (line.split("\t") for line in lines if not line.startswith("#"))
    }


def llama(attn_implementation="sdpa", dtype=torch.float64, **overrides):
    """Return a tiny Llama; two with the same arguments have the same parameters."""
    return tiny.build("llama", attn_implementation=attn_implementation, dtype=dtype, **overrides)


def token_ids(rows=1, columns: int = sum(LENGTHS), seed=0):
    """Return random ordinary tokens, (rows, columns)."""
    return tiny.tokens(None, rows, columns, seed=seed)


def positions(*rows, start=0):
    """Return positions (rows, columns) that restart at each document; `rows` are their lengths."""
    return torch.stack(
        [torch.cat([torch.arange(start, start + n) for n in lengths]) for lengths in rows]
    )


def spans(lengths):
    """Return the first and the end column of each document of a row."""
    return list(pairwise(accumulate(lengths, initial=0)))


def alone(model, ids, *rows):
    """Return the logits of packed rows' documents run alone, put together as in the packed rows."""
    return torch.cat([
        torch.cat([model(input_ids=row[None, a:b], use_cache=False).logits for a, b in spans(lengths)], dim=1)
        for row, lengths in zip(ids, rows, strict=True)
    ])  # fmt: skip


def alone_loss(model, ids, *rows):
    """Return the mean loss over all predicted tokens of all documents, each run alone."""
    parts = [
        row[None, a:b]
        for row, lengths in zip(ids, rows, strict=True)
        for a, b in spans(lengths)
        if b - a > 1
    ]
    losses = [model(input_ids=part, labels=part, use_cache=False).loss for part in parts]
    counts = [part.shape[1] - 1 for part in parts]
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def gradients(model):
    """Return the gradients of all parameters in order, and clear them in the model."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def weights_like(tensor):
    """Return fixed random weights that make a scalar of logits, in which every logit counts."""
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3), dtype=tensor.dtype)


def error(found, expected):
    """Return the largest difference, relative to the standard deviation of `expected`."""
    return float(((found - expected).abs().max() / expected.std()).detach())


def gradient_error(found, expected):
    """Return the largest difference, relative to the largest entry of a parameter's gradient."""
    return max(
        float((f - e).abs().max() / e.abs().max()) for f, e in zip(found, expected, strict=True)
    )


def collected():
    """Collect garbage and release the sites of enabled models that were dropped.

    That includes models that were collected during a compilation.
    """
    from autopack import patching

    gc.collect()
    patching.uninstall([])


def installed_functions():
    """Return all functions of transformers that autopack may replace, by name."""
    from transformers import masking_utils, modeling_utils
    from transformers.models.llama import modeling_llama

    collected()
    return {
        **{
            f"attention {k}": f
            for k, f in modeling_utils.AttentionInterface._global_mapping.items()
        },
        **{f"mask {k}": f for k, f in masking_utils.AttentionMaskInterface._global_mapping.items()},
        "eager": modeling_llama.eager_attention_forward,
        "preprocess": masking_utils._preprocess_mask_arguments,
    }


def attributes(model):
    """Return all attributes and hooks of a model's modules, and all fields of configs, by name."""
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key.startswith("_") and isinstance(value, dict):
                found.update({f"{name}.{key}[{k}]": v for k, v in value.items()})
            else:
                found[f"{name}.{key}"] = value
        if hasattr(module, "config"):
            found.update(
                {f"{name}.config.{key}": value for key, value in vars(module.config).items()}
            )
    return found


def same(found, expected):
    """Return True if two dictionaries hold the same objects, by identity."""
    return found.keys() == expected.keys() and all(found[key] is expected[key] for key in found)


@pytest.fixture(autouse=True)
def _proofs_of_other_code_are_forgotten(request):
    """Forget proofs of twins before and after a test that replaces code of autopack."""
    replaces = "monkeypatch" in request.fixturenames

    def forget():
        if replaces and (kept := sys.modules.get("autopack.proving.kept")) is not None:
            kept.forget()

    forget()
    yield
    forget()


@pytest.fixture(scope="module", autouse=True)
def _only_new_garbage():
    """Freeze all living objects before each module, so that collections search new ones alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_left_behind():
    """Require that a test leaves transformers as it was, and no scope open."""
    from autopack import patching
    from autopack.runtime.scope import current

    before, sites = installed_functions(), set(patching._installed)
    yield
    assert current() is None
    collected()
    assert set(patching._installed) == sites
    assert same(installed_functions(), before)


@pytest.fixture
def pair(request):
    """Yield a stock and an enabled model of the same parameters, made by `padded.build`."""
    import autopack
    from tests.support.padded import build, twins

    stock, model = twins(build(*request.param))
    with autopack.enable(model):
        yield stock, model
