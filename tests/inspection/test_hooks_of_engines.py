"""Hooks and functions of engines that compute nothing of their own: padded batches run without
their padding.

DeepSpeed is not installed here: a package of its name, with functions of the same kind in the same
files, stands in for it. The real one runs in `compat/engines` and `compat/programs`."""

import importlib
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

import autopack
from autopack import tiny
from autopack.launch import first_call
from autopack.launch import session as sessions
from autopack.launch.settings import RunSettings
from tests.engine import counted
from tests.subjects import layers_of, put_own_layer
from tests.support.padded import (
    FLOAT32,
    GRADIENT,
    PADDED,
    agree,
    batch,
    build,
    loss_error,
    mask_of,
    model_gradient_error,
    tally_of,
    twins,
)
from tests.support.padded import twins as twins_of
from tests.support.refusals import refused, refused_by_its_first_call

ENGINE = """
import functools, torch
def instrument(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs): return function(*args, **kwargs)
    return wrapped
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states): return states.detach()
    @staticmethod
    def backward(ctx, grads): return grads
def put_on(module):
    @instrument
    def _pre_forward_module_hook(module, args): module.gathered = True
    def _post_forward_module_hook(module, args, output): module.gathered = False
    def _post_backward_module_hook(module, args): return tuple(Gather.apply(each) for each in args)
    module.register_forward_pre_hook(_pre_forward_module_hook)
    module.register_forward_hook(_post_forward_module_hook)
    module.register_forward_pre_hook(_post_backward_module_hook)
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Makes a module of a package, `library("deepspeed.runtime.engine", text)`; it is gone after
    the test."""

    def made(name, text):
        file = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True)
        for folder in file.relative_to(tmp_path).parents:
            if folder.name:
                (tmp_path / folder / "__init__.py").write_text("")
        file.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(name)

    yield made
    for name in list(sys.modules):
        if name.partition(".")[0] in ("deepspeed", "wandb", "mine"):
            del sys.modules[name]


def projections(model):
    return [layer.self_attn.o_proj for layer in model.model.layers]


def compared(stock, model):
    agree(model, stock, batch("causal LM", mask_of(PADDED)))


@pytest.mark.parametrize(
    "name", ["deepspeed.runtime.zero.parameter_offload", "wandb.integration.torch.wandb_torch"]
)
def test_a_library_that_gathers_parameters_or_records(library, name):
    hooks = library(name, ENGINE)
    stock, model = twins(build("llama"))
    for which in (stock, model):
        for layer in projections(which):
            hooks.put_on(layer)
    with autopack.enable(model) as handle:
        assert not handle.enabled.is_checked_closely, "they compute nothing"
        compared(stock, model)
        assert (tally_of(model).batches, sum(tally_of(model).left.values())) == (1, 0)


def test_noise_of_neftune_that_is_none_and_then_some():
    stock, model = twins(build("llama"))
    with autopack.enable(model):
        compared(stock.train(), model.train())
        assert tally_of(model).batches == 1
        for which in (stock, model):
            which.zero_grad()
            embeddings = which.get_input_embeddings()
            embeddings.neftune_noise_alpha = 5.0
            embeddings.register_forward_hook(neftune_post_forward_hook)
        inputs, losses = batch("causal LM", mask_of(PADDED)), []
        for which in (stock, model):
            torch.manual_seed(0)
            losses.append(which(**inputs).loss)
        assert loss_error(losses[1], losses[0]) < FLOAT32
        assert (tally_of(model).batches, sum(tally_of(model).left.values())) == (1, 1)


@pytest.mark.parametrize(("of_engine", "packed"), [(True, 2), (False, 1)])
def test_under_autopack_run_they_do_not_put_the_first_call_off(
    library, monkeypatch, tmp_path, of_engine, packed
):
    """Another hook on the model, put on after autopack's, sees the first batch as it came."""
    hooks = library("deepspeed.runtime.engine" if of_engine else "mine.engine", ENGINE)
    monkeypatch.setattr(
        sessions, "current", sessions.Session(RunSettings.read({}), started=True, reports=tmp_path)
    )
    model = build("llama")
    first_call._wait(model)
    hooks.put_on(model)
    inputs = batch("causal LM", mask_of(PADDED))
    for _ in range(2):
        model(**inputs)
    assert tally_of(model).batches == packed
    autopack.disable(model)


LINEAR = """
import torch
class OfStage3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, bias=None):
        ctx.save_for_backward(states, weight)
        ctx.biased = bias is not None
        return states @ weight.T if bias is None else states @ weight.T + bias
    @staticmethod
    def backward(ctx, grads):
        states, weight = ctx.saved_tensors
        rows = grads.flatten(0, -2)
        return grads @ weight, rows.T @ states.flatten(0, -2), rows.sum(0) if ctx.biased else None
def zero3_linear_wrap(input, weight, bias=None):
    return OfStage3.apply(input, weight, bias)
"""


def test_the_linear_layer_of_an_engine_is_torchs(library, monkeypatch):
    made = library("deepspeed.runtime.zero.linear", LINEAR)
    monkeypatch.setattr(torch.nn.functional, "linear", made.zero3_linear_wrap)
    stock, model = twins(build("llama"))
    with autopack.enable(model) as handle:
        assert not handle.enabled.is_checked_closely
        compared(stock, model)
        assert tally_of(model).batches == 1


class Asks(type(build("llama"))):
    """Its code names what a program leaves on models elsewhere."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if hasattr(self, "model_info") and self.model_info is not None:
            output.logits = output.logits.cumsum(1)
        return output


@pytest.mark.parametrize("name", ["ds_id", "model_info"])
def test_what_programs_leave_on_models_keeps_none_from_having_a_twin(name):
    """But for one whose own code names it: its twin has no like of that, and the model itself is
    audited."""
    model = build("llama")
    put_own_layer(model)
    setattr(model, name, object())
    with autopack.enable(model) as handle:
        assert handle.enabled.proof.source in ("twin", "part")
    asking = Asks(tiny.config("llama"))
    asking.model_info = object()
    refused_by_its_first_call(asking)


# Hooks on parts of a model that look at rows and columns: padded batches keep their padding, and
# say why.

KINDS = ["llama", "gpt2", "mamba", "bloom", "bert", "qwen3_moe", "opt", "gemma2"]


def _twins(model_type):
    task = "masked LM" if model_type == "bert" else "causal LM"
    return twins_of(build(model_type, task, attn_implementation="eager")), batch(
        task, mask_of(PADDED)
    )


def _features(output):
    states = output[0] if isinstance(output, tuple) else output
    return states[:, -1].pow(2).mean()  # of the last column of every row


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("model_type", KINDS)
def test_a_loss_of_the_states_of_a_layer(model_type, when):
    (stock, model), inputs = _twins(model_type)
    found = {}
    for which in (stock, model):

        def look(module, args, output, which=which):
            found[which] = _features(output)

        if when == "after" and which is model:
            autopack.enable(model)
        layers_of(which)[0].register_forward_hook(look)
        if when == "before" and which is model:
            autopack.enable(model)
        loss = (
            which(**inputs, use_cache=False).loss if model_type != "bert" else which(**inputs).loss
        )
        (loss + 0.1 * found[which]).backward()
    assert loss_error(found[model], found[stock]) < FLOAT32
    assert model_gradient_error(model, stock) < GRADIENT
    (reason,) = tally_of(model).left
    assert "a hook on it is test_a_loss_of_the_states_of_a_layer" in reason
    autopack.disable(model)


def test_when_the_hook_is_gone_batches_run_without_their_padding_again():
    (_, model), inputs = _twins("llama")
    with autopack.enable(model):
        model(**inputs)
        hook = layers_of(model)[0].register_forward_hook(lambda *_: None)
        model(**inputs)
        hook.remove()
        model(**inputs)
        assert (tally_of(model).batches, sum(tally_of(model).left.values())) == (2, 1)


def test_a_hook_that_only_asks_for_gradients_looks_at_nothing():
    """Scripts with adapters put it on the embeddings, so that checkpointed layers have something to
    differentiate."""

    def make_inputs_require_grad(module, args, output):
        output.requires_grad_(True)

    (stock, model), inputs = _twins("llama")
    with autopack.enable(model):
        for which in (stock, model):
            which.get_input_embeddings().register_forward_hook(make_inputs_require_grad)
        agree(model, stock, inputs)
        assert tally_of(model).batches == 1


def test_without_being_looked_for_the_hook_sees_one_row():
    (_, model), inputs = _twins("llama")
    shapes = []
    with autopack.enable(model, verify=False):
        layers_of(model)[0].register_forward_hook(
            lambda _, args, output: shapes.append(args[0].shape[:2])
        )
        model(**inputs)
    assert shapes == [(1, sum(PADDED))]


def test_threads_wait_for_the_check_of_a_hook():
    (_, model), _ = _twins("llama")
    ids, where = torch.arange(9)[None], counted((4, 5))
    layers_of(model)[0].mlp.register_forward_hook(
        lambda module, args, output: torch.roll(output, 1, dims=1)
    )

    def run(_):
        with refused("leak-detected"):
            model(input_ids=ids, position_ids=where)

    with autopack.enable(model), ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))


def test_a_hook_on_one_of_several_ranks_is_never_proven_by_a_run_of_the_model(monkeypatch):
    """Ranks that gather parameters would wait for each other: the model is run at calls 1, 2, 4, 8
    and so on alone."""
    model = build("llama", "causal LM").train()
    autopack.enable(model)
    inputs = {
        "input_ids": torch.arange(3, 15)[None],
        "position_ids": torch.arange(6).repeat(2)[None],
    }
    monkeypatch.setattr("autopack.calls.hooks.in_a_group", lambda: True)
    monkeypatch.setattr("autopack.calls.hooks.gathering_groups", lambda root: (object(),))
    before = [model(**inputs).logits for _ in range(2)]
    runs = Counter()
    layers_of(model)[0].register_forward_hook(lambda module, args, output: runs.update(["layer"]))
    assert torch.equal(model(**inputs).logits, before[0])  # the third
    assert runs["layer"] == 1
