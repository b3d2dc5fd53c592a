"""Code that nobody has measured is checked in calls that go beyond those that were checked, without
being asked for.

Each model hands tokens something of those before them under a condition that no proof of a few
dozen tokens has met. The call that meets it raises before anything was learned from it;
`verify=False` shows that it leaks."""

import copy

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.utils import ModelOutput

import autopack
from autopack import tiny
from tests.support import training_calls as calls
from tests.support.conditional import EXACT, LEAK, Conditional, build, error, row
from tests.support.padded import batch as calls_of
from tests.support.padded import mask_of, packs_at_once
from tests.support.refusals import refused


def holds(token):
    return lambda self, input_ids=None, **_: (
        input_ids is not None and bool((input_ids == token).any())
    )


def with_token(batch, token):
    ids = batch["input_ids"].clone()
    ids[0, 2] = token
    return {**batch, "input_ids": ids}


def embedded(batch):
    with torch.no_grad():
        states = build(**CONFIG).get_input_embeddings()(batch["input_ids"])
    return {"inputs_embeds": states, "position_ids": batch["position_ids"]}


def documents_of(position_ids):
    return 1 if position_ids is None else int((position_ids[0] == 0).sum())


EOS = 2
CONFIG = {"eos_token_id": EOS, "vocab_size": 4000}
BEYOND = {
    "many tokens": (lambda self, states, **_: states.shape[1] in range(300, 400), row(150, 170)),
    "many documents": (
        lambda self, position_ids=None, **_: documents_of(position_ids) > 11,
        row(*[3] * 14),
    ),
    "many rows": (lambda self, states, **_: states.shape[0] > 4, row(5, 7, rows=6)),
    "a token that ends documents": (holds(EOS), with_token(row(5, 9), EOS)),
    "a token further back in the vocabulary": (
        lambda self, input_ids=None, **_: input_ids is not None and bool((input_ids >= 3990).any()),
        with_token(row(5, 9), 3995),
    ),
    "an argument": (
        lambda self, foo=None, **_: foo is not None,
        {**row(5, 9), "foo": torch.ones(1)},
    ),
    "embeddings in the place of tokens": (
        lambda self, input_ids=None, **_: input_ids is None,
        embedded(row(5, 9)),
    ),
    "autocast": (lambda self, **_: torch.is_autocast_enabled("cpu"), row(5, 9)),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_call_that_goes_beyond_is_checked_itself(name):
    mixes, batch = BEYOND[name]
    ours, stock = build(mixes, **CONFIG), build(**CONFIG)
    lowered = torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast")
    with autopack.enable(ours) as handle:
        for step in range(5):  # the fifth is none that is always checked
            assert error(ours, stock, row(5, 9, seed=step)) <= EXACT
        assert handle.checked.checks > 0
        with torch.no_grad(), lowered, refused("leak-detected", match="got other logits") as raised:
            ours(**batch)
        assert raised.value.report.error > LEAK
        with torch.no_grad(), lowered, refused("leak-detected"):  # as long as it leaks
            ours(**batch)
        assert "2 leaking" in repr(handle)
        assert error(ours, stock, row(5, 9, seed=9)) <= EXACT
    with autopack.enable(ours, verify=False) as handle, torch.no_grad(), lowered:
        leaking = ours(**batch).logits
        assert handle.checked is None
    with autopack.enable(stock), torch.no_grad(), lowered:
        assert float((leaking - stock(**batch).logits).abs().max()) > LEAK, (
            "the control shows no leak"
        )


def test_what_begins_after_some_calls_is_found_at_the_next_power_of_two():
    packed_calls = []

    def mixes(self, position_ids=None, **_):
        return len(packed_calls) >= 6

    ours, found = build(mixes), 0
    with autopack.enable(ours), torch.no_grad():
        for step in range(1, 17):
            packed_calls.append(step)
            try:
                ours(**row(5, 9))  # the same tokens: others would be checked for themselves
            except autopack.LeakDetected:
                found = step
                break
    # where what its closure holds was found to change, the powers of two begin anew
    assert found in (7, 8)


class Own(LlamaMLP):
    """A layer of the user's that is exact."""

    def forward(self, states):
        return super().forward(states)


class Long(LlamaMLP):
    """One that mixes tokens of long rows."""

    def forward(self, states):
        if states.shape[1] > 400:
            states = states + 0.5 * states.cumsum(1)
        return super().forward(states)


def with_own_layer(kind=Own):
    model = tiny.build("llama")
    mine = kind(model.config)
    mine.load_state_dict(model.model.layers[0].mlp.state_dict())
    model.model.layers[0].mlp = mine
    return model.train()


def trained(model, batches):
    calls.trained(model.train(), *({**batch, "labels": batch["input_ids"]} for batch in batches))


def batches(steps):
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(2, 7, (steps,), generator=generator).tolist()
    sizes = [torch.randint(2, 30, (count,), generator=generator).tolist() for count in counts]
    return [row(*each, seed=step) for step, each in enumerate(sizes)]


def test_checks_become_rare_and_a_covered_model_has_none():
    model = with_own_layer()
    with autopack.enable(model) as handle:
        trained(model, batches(100))
        # 7 powers of two; each of three sizes is exceeded some log(100) times.
        assert 7 <= handle.checked.checks <= 25
        assert handle.checked.calls == 100
        assert handle.checked.worst <= EXACT
    covered = tiny.build("llama")
    with autopack.enable(covered) as handle:
        trained(covered, [row(9, 5)] * 5)
        assert handle.checked.checks == 3


def padded(*lengths, seed=0):
    return calls_of("backbone", mask_of(lengths), seed)


class Sharing(LlamaForCausalLM):
    """A model that says of each row how much of it is no padding, which of a document alone is
    all."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        out = super().forward(input_ids, attention_mask=attention_mask, **kwargs)
        real = torch.ones(out.logits.shape[:2]) if attention_mask is None else attention_mask != 0
        return {**out, "share": real.float().mean(1, keepdim=True).expand(-1, 4)}


def test_padded_batches_are_compared_with_the_same_batch_and_not_with_documents_alone():
    model = Sharing(tiny.config("llama")).eval()
    twin = copy.deepcopy(model)
    with packs_at_once(model) as handle, torch.no_grad():
        for step, sizes in enumerate([(5, 9, 3), (4, 12), (30, 7, 2, 2)]):
            batch = padded(*sizes, seed=step)
            mask = batch["attention_mask"].bool()
            found, expected = model(**batch, use_cache=False), twin(**batch, use_cache=False)
            assert float((found["logits"] - expected["logits"])[mask].abs().max()) <= EXACT * float(
                expected["logits"].std()
            )
            assert torch.equal(found["share"], expected["share"])
        assert handle.tally.padding > 0
        # calls 1 and 2, and the third has a longer row and more of them
        assert handle.checked.checks == 3, handle
        assert handle.checked.leaks == 0


@pytest.mark.parametrize("kept", [6, torch.tensor([0, 4, 7])])
def test_where_some_logits_are_asked_for_those_at_padding_are_not_compared(kept):
    model = with_own_layer()
    with packs_at_once(model) as handle:
        model(**padded(5, 9, 3), logits_to_keep=kept, use_cache=False)
        assert handle.tally.padding > 0
        assert (handle.checked.checks, handle.checked.leaks) == (1, 0), handle


def test_padded_batches_that_a_layer_mixes_when_they_run_as_one_row():
    model = with_own_layer(Long)
    batch = calls_of("masked LM", mask_of((90, 100, 90, 80, 70)))
    with autopack.enable(model) as handle:
        for step in range(3):
            model(**calls_of("masked LM", mask_of((9, 4)), seed=step))
        assert handle.checked.checks == 2  # calls 1 and 2
        found = model(**batch).loss
        assert "was not exact without its padding" in repr(handle)
    stock = with_own_layer(Long)
    expected = stock(**batch).loss
    assert abs(float((found - expected).detach())) < 1e-5
    with autopack.enable(model, verify=False):
        assert abs(float(model(**batch).loss - expected)) > 1e-3, "the control shows no leak"


def test_padded_batches_that_a_function_for_checkpoints_mixes():
    """Only the live call runs it: twins and documents alone are without checkpoints. There is no
    loss to compare."""

    def build_mixing():
        model = tiny.build("llama").train()
        model.gradient_checkpointing_enable()
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = lambda run, *args: (
                run(*args) + 0.3 * run(*args).cumsum(1)
            )
        return model

    model, batch = build_mixing(), padded(5, 9, 3)
    with torch.no_grad():
        expected = build_mixing()(**batch, use_cache=False).logits
        with autopack.enable(model) as handle:
            found = model(**batch, use_cache=False).logits
            assert torch.equal(found, expected)
            assert handle.tally.batches == 0
            assert "was not exact without its padding" in repr(handle)
        with autopack.enable(model, verify=False):
            leaking = model(**batch, use_cache=False).logits
    assert float((leaking - expected)[batch["attention_mask"].bool()].abs().max()) > LEAK, (
        "the control shows no leak"
    )


# Modes of torch that are in force around a model: a check of a call runs in them.


class Mixing(TorchFunctionMode):
    """A mode that mixes tokens, in force around calls; in another thread it is not."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found + 0.3 * found.cumsum(1) if function is nn.functional.silu else found


class MixingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found + 0.3 * found.cumsum(1) if function is torch.ops.aten.silu.default else found


class Looking(TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Mixing, MixingBelow])
def test_a_mode_that_mixes_tokens_is_met_in_its_first_call(mode):
    """The second call is one of those that are checked."""
    model = tiny.build("llama")
    with autopack.enable(model), torch.no_grad():
        model(**row(5, 9))
        with mode(), refused("leak-detected"):
            model(**row(5, 9))


def test_a_mode_that_changes_nothing_is_served():
    model, stock = tiny.build("llama"), tiny.build("llama")
    with autopack.enable(model) as handle, Looking():
        assert error(model, stock, row(5, 9)) <= EXACT
        assert handle.checked.checks == 1
    with autopack.enable(model) as handle, torch.device("cpu"):
        assert error(model, stock, row(5, 9)) <= EXACT
        assert handle.checked.checks == 1


# Heads that make no logits are checked by what they return: a loss alone, or fields of shifted
# labels.


def loss_alone(output, labels):
    return CausalLMOutputWithPast(loss=output.loss)


def log_probs(output, labels):
    wanted = labels[:, 1:].clamp(min=0)[..., None]
    found = output.logits[:, :-1].log_softmax(-1).gather(-1, wanted).squeeze(-1)
    return ModelOutput(loss=output.loss, log_probs=found.masked_fill(labels[:, 1:] == -100, 0.0))


class Fused(Conditional):
    """A head that returns little."""

    form = None

    def forward(self, input_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        return output if labels is None else type(self).form(output, labels)


def fused(form):
    model = build()
    mixes = staticmethod(lambda self, states, **_: states.shape[1] in range(100, 200))
    kind = type(
        "Users", (Fused,), {"form": staticmethod(form), "mixes": mixes, "__module__": __name__}
    )
    other = kind._from_config(model.config)
    other.load_state_dict(model.state_dict())
    return other.train()


def labelled(*lengths):
    batch = row(*lengths)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)}


@pytest.mark.parametrize("items", [False, True])
@pytest.mark.parametrize("form", [loss_alone, log_probs])
def test_what_it_returns_is_compared(form, items, caplog):
    model = fused(form)
    batch = labelled(5, 9, 7)
    given = {"num_items_in_batch": int((batch["labels"] != -100).sum())} if items else {}
    with autopack.enable(model) as handle:
        loss = model(**batch, **given).loss
        assert handle.checked.checks == 1
        assert not handle.checked.skipped
        assert handle.checked.worst < 1e-5
        assert torch.equal(loss, model(**batch, **given).loss)
        assert "could not check" not in caplog.text
        with refused("leak-detected"):
            model(**labelled(60, 50))
