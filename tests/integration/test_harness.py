"""lm-eval's `HFLM` as it is: it pads without a mask, and where it does is noted by what it pads
with.

Rows of one batch may begin alike, as choices of one question do: those tokens are computed once.
"""

import copy
import inspect
import random

import pytest
import transformers

import autopack
from autopack import tiny
from tests.integration.sentences import WORDS, folder, sentences, words
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
huggingface = pytest.importorskip("lm_eval.models.huggingface")
from lm_eval.api.instance import Instance  # noqa: E402

NEAR = 1e-6


@pytest.fixture
def harness(tmp_path):
    def make(model_type="llama", kind="causal-lm", **options):
        where = folder(tmp_path, model_type, kind)
        auto = (
            transformers.AutoModelForSeq2SeqLM
            if kind == "seq2seq"
            else transformers.AutoModelForCausalLM
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(where)
        tokenizer.eos_token = "[SEP]"
        options = {"batch_size": 8, "device": "cpu", "max_length": 40, **options}
        model = options.pop("model", None) or auto.from_pretrained(where)
        return huggingface.HFLM(pretrained=model, tokenizer=tokenizer, **options)

    return make


def requests():
    pairs = enumerate(zip(sentences(20), sentences(20, seed=1), strict=True))
    return [Instance("loglikelihood", {}, (one, f" {other}"), n) for n, (one, other) in pairs]


def scored(model, asked=None):
    return model.loglikelihood(requests() if asked is None else asked, disable_tqdm=True)


def assert_same(found, expected):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], rel=NEAR)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("llama", "causal-lm"), ("gpt2", "causal-lm"), ("mamba", "causal-lm"), ("t5", "seq2seq")],
)
def test_likelihoods_are_those_that_were(harness, model_type, kind):
    model, stock = harness(model_type, kind), harness(model_type, kind)
    expected = scored(model)
    with autopack.enable(model) as handle:
        assert_same(scored(model), expected)
        assert handle.tally.padding > 0
        assert not handle.tally.left
        assert handle.tally.evaluation.fill == 1
        calls = handle.tally.evaluation.calls
        assert scored(stock) == expected, "a model that is not enabled is called as ever"
        assert handle.tally.evaluation.calls == calls
        copied = copy.deepcopy(model)
    with autopack.enable(copied) as handle:
        assert_same(scored(copied), expected)
        assert handle.tally.padding > 0


def test_a_model_whose_tokens_see_padding_keeps_it(harness):
    model = harness(model=tiny.build("bert", task="masked-lm"), backend="causal")
    expected = scored(model)
    with autopack.enable(model) as handle:
        assert scored(model) == expected
        assert (handle.tally.batches, handle.tally.evaluation.fill) == (0, 1)


def test_a_token_of_the_text_that_looks_like_padding_is_none(harness):
    """HFLM pads with 0, which is a token like any other in most vocabularies."""
    model = harness()
    asked = [(("", ""), [0, 0, 5], [7, 0, 0, 0]), (("", ""), [5], [0, 0])]
    expected = model._loglikelihood_tokens(asked)
    with autopack.enable(model) as handle:
        assert_same(model._loglikelihood_tokens(asked), expected)
        assert (handle.tally.tokens, handle.tally.padding) == (8, 4)


def test_what_it_pads_with_is_given_back(harness):
    original, model = huggingface.pad_and_concat, harness()
    before = inspect.getsource(original)
    with autopack.enable(model.model) as handle:
        assert huggingface.pad_and_concat is original
        assert autopack.enable(model).enabled is handle.enabled
        assert huggingface.pad_and_concat is not original
        with refused("which-model"):
            autopack.enable([harness(model=tiny.build("llama")), object()])
    assert huggingface.pad_and_concat is original
    assert inspect.getsource(huggingface.pad_and_concat) == before


def choices(least, most):
    """Eight questions after the same text, with four choices of so many words each."""
    draw, found = random.Random(0), []
    for number in range(8):
        question = words(draw, WORDS, 32, 48)
        answered = [f" {words(draw, WORDS, least, most)}" for _ in range(4)]
        found += [Instance("loglikelihood", {}, (question, answer), number) for answer in answered]
    return found


def counted(model, asked):
    """What the calls of an enabled model held, whose scores are those of stock."""
    expected = scored(model, asked)
    with autopack.enable(model) as handle:
        assert_same(scored(model, asked), expected)
        assert not handle.tally.left
        return handle.tally.evaluation


@pytest.mark.parametrize(
    ("model_type", "lengths", "least"),
    [("llama", (3, 3), 0.6), ("gpt2", (3, 3), 0.6), ("llama", (2, 9), 0.1)],
)
def test_what_choices_of_a_question_begin_with_is_computed_once(
    harness, model_type, lengths, least
):
    """lm-eval sorts by length: those of like lengths stand next to each other, others may lie in
    several batches."""
    ran = counted(harness(model_type, max_length=128), choices(*lengths))
    assert ran.shared > least * ran.tokens
