"""Releases that nobody has seen: what is exact is served, and what leaks is refused.

Each release is made of the installed one (`tests.proving.fabricated`) and runs in a process of its own.
"""

import pytest

from tests.conftest import FLOAT32, LEAK
from tests.proving.fabricated import INSTALLED, Release

STATES = "        hidden_states = self.norm(hidden_states)\n"
MIXED = f"        hidden_states = hidden_states + hidden_states.mean(dim=1, keepdim=True)\n{STATES}"
LOGGER = "logger = logging.get_logger(__name__)\n\n\n"


def case(model_type, task="causal-lm", **more):
    return {"type": model_type, "task": task, **more}


def asked(release, **cases):
    """The answers of a release by the names of the cases."""
    return dict(zip(cases, release.ask(list(cases.values())), strict=True))


def is_exact(found):
    served = found.get("source") == "twin" and found["padded"] is None and found["labels"] is None
    return served and found["exact"] and found["worst"] < FLOAT32


def is_refused(found, kind, *words):
    return found.get("raised") == kind and found["unchanged"] and all(word in found["message"] for word in words)


UNTOUCHED = {"gpt2": case("gpt2"), "bert": case("bert", "masked-lm"), "t5": case("t5", "seq2seq")}
"""A type of each kind whose code no release here changes."""


ADDED = {
    "gemma": (
        "class GemmaDecoderLayer(GradientCheckpointingLayer):\n",
        "    def __call__(self, hidden_states, *args, **kwargs):\n"
        "        return super().__call__(hidden_states + hidden_states.mean(1, keepdim=True), *args, **kwargs)\n",
    ),
    "olmo": (
        "class OlmoForSequenceClassification(GenericForSequenceClassification, OlmoPreTrainedModel):\n",
        "    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):\n"
        "        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)\n"
        "        output.logits = output.logits + (input_ids.sum() if input_ids is not None else 0)\n"
        "        return output\n",
    ),
    "starcoder2": (
        "class Starcoder2Model(Starcoder2PreTrainedModel):\n",
        "    def save_for_later(self, path):\n        self.save_pretrained(path)\n",
    ),
}
"""Functions that a class has not had: by type, the head of the class and what follows on it."""


def _with_other_models(folder):
    """A release of which some modeling files are not the recorded ones, and that has a type more."""
    release = Release(folder)
    release.change(
        "models/mistral/modeling_mistral.py",
        ("class MistralMLP(nn.Module):\n", f'{LOGGER}class MistralMLP(nn.Module):\n    """Two layers, gated."""\n\n'),
        ("from torch import nn\n", "from torch import nn\n\nfrom ...utils import logging\n"),
        (STATES, f'        # Almost there.\n        logger.debug(f"{{hidden_states.shape}} are normed")\n{STATES}'),
        ("hidden_states: torch.Tensor", "hidden_states: 'torch.FloatTensor'"),
    )
    release.change("models/qwen2/modeling_qwen2.py", (STATES, f"        hidden_states = hidden_states + 0\n{STATES}"))
    release.change("models/llama/modeling_llama.py", (STATES, MIXED))
    release.change("models/qwen3/modeling_qwen3.py", ("rotate_half", "_turned_by_half"))
    release.change("models/phi/modeling_phi.py", ("eager_attention_forward", "_attend_eagerly"))
    for name, (head, function) in ADDED.items():
        release.change(f"models/{name}/modeling_{name}.py", (head, f"{head}{function}\n"))
    _add_type(release)
    return release


def _add_type(release, like="llama", name="lama2"):
    """Add a type as upstream does: a folder of its own, and a line in each mapping."""
    for path in sorted((INSTALLED / "models" / like).glob("*.py")):
        text = path.read_text().replace(like, name).replace(like.capitalize(), name.capitalize())
        release.write(f"models/{name}/{path.name.replace(like, name)}", text)
    for path in ("auto_mappings.py", "modeling_auto.py"):
        lines = []
        for line in (INSTALLED / "models" / "auto" / path).read_text().splitlines(keepends=True):
            lines.append(line)
            if line.strip().startswith(f'("{like}", "{like.capitalize()}'):
                lines.append(line.replace(like, name).replace(like.capitalize(), name.capitalize()))
        release.write(f"models/auto/{path}", "".join(lines))


class TestOtherModels:
    @pytest.fixture(scope="class")
    def found(self, tmp_path_factory):
        return asked(
            _with_other_models(tmp_path_factory.mktemp("changed")),
            **UNTOUCHED,
            remarks=case("mistral"),
            without_effect=case("qwen2"),
            mixing=case("llama"),
            mixing_unproven=case("llama", verify=False),
            renamed=case("qwen3"),
            renamed_seam=case("phi"),
            renamed_seam_eager=case("phi", attention="eager"),
            new=case("lama2"),
            called=case("gemma"),
            overridden=case("olmo", "sequence-classification"),
            saved=case("starcoder2"),
        )

    @pytest.mark.parametrize(
        "name",
        [*UNTOUCHED, "remarks", "saved", "without_effect", "renamed", "renamed_seam", "renamed_seam_eager", "new"],
    )
    def test_what_mixes_nothing_is_served(self, found, name):
        assert is_exact(found[name]), found[name]

    def test_what_mixes_tokens_is_refused(self, found):
        assert is_refused(found["mixing"], "UnsupportedModel", "is not exact"), found["mixing"]

    @pytest.mark.parametrize("name", ["called", "overridden"])
    def test_what_mixes_tokens_in_a_function_that_is_new_is_refused(self, found, name):
        assert is_refused(found[name], "UnsupportedModel", "is not exact"), found[name]

    def test_without_a_proof_it_leaks(self, found):
        """The control: enabled as it is, the same model gives documents something of each other."""
        leaking = found["mixing_unproven"]
        assert not leaking["exact"]
        assert leaking["worst"] > LEAK
