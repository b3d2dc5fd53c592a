"""Documents of packed rows that begin alike get what each gets alone, where their beginning is
computed once."""

import pytest
import torch

import autopack
from tests.prefixes.forms import agree, packed
from tests.support.padded import build
from tests.support.prefixes import group, tree


class TestAgreement:
    @pytest.mark.parametrize("labels", [True, False], ids=["labels", "loss of logits"])
    def test_several_rows_with_padding(self, pair, labels):
        stock, model = pair
        batch = packed(tree(), max_length=100)
        assert batch["attention_mask"].shape[0] > 1
        with autopack.enable(model) as handle:
            agree(stock, model, batch, labels)
            assert handle.tally.training.shared > 40

    @pytest.mark.parametrize("how", ["cu_seq_lens", "seq_idx"])
    def test_documents_declared_in_other_ways(self, pair, how):
        stock, model = pair
        with autopack.enable(model) as handle:
            agree(stock, model, packed(tree(), declare=("attention_mask", how)))
            assert handle.tally.training.shared > 40


class TestWhen:
    @pytest.mark.parametrize(
        ("documents", "options"),
        [
            (group(12, (30, 22, 41)), {}),
            # Whoever compiles for one number of documents gets rows of that shape.
            (
                group(),
                {
                    "max_length": 256,
                    "rows": 1,
                    "max_documents": 8,
                    "declare": ("attention_mask", "cu_seq_lens"),
                },
            ),
        ],
        ids=["too few in common", "rows of fixed shape"],
    )
    def test_never(self, documents, options):
        model = build("llama").eval()
        with autopack.enable(model) as handle, torch.no_grad():
            model(**packed(documents, **options), use_cache=False)
            assert handle.tally.evaluation.shared == 0

    def test_equal_tokens_at_other_positions(self, pair):
        """A document of which a part was cut off goes on with its positions (`keep_positions`)."""
        stock, model = pair
        one, other = group(32, (6, 6))
        batch = packed([one, other])
        batch["position_ids"][0, 38:] += 3
        with autopack.enable(model) as handle, torch.no_grad():
            given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
            lengths = torch.tensor([0, 38, 76], dtype=torch.int32)
            found = model(
                **given, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, use_cache=False
            ).logits
            alone = stock(input_ids=other[None], position_ids=batch["position_ids"][:, 38:]).logits
            assert torch.allclose(found[0, 38:], alone[0], atol=1e-5)
            assert handle.tally.evaluation.shared == 0

    @pytest.mark.parametrize("rows", ["packed", "of one length"])
    def test_who_looks_into_layers_sees_every_document(self, rows):
        """A probe of activations by column: it would get those of a row of other columns."""
        model = build("llama").eval()
        batch = packed(group(32, (6, 6, 6)))
        if rows != "packed":
            batch = {"input_ids": batch["input_ids"].reshape(3, 38)}
        seen = []
        with autopack.enable(model) as handle, torch.no_grad():
            model(**batch, use_cache=False)
            assert handle.tally.evaluation.shared == 64
            hook = model.model.layers[0].register_forward_hook(
                lambda *given: seen.append(given[-1])
            )
            model(**batch, use_cache=False)
            hook.remove()
            assert handle.tally.evaluation.shared == 64
            states = seen[-1][0] if isinstance(seen[-1], tuple) else seen[-1]
            assert states.shape[:2] == batch["input_ids"].shape
            assert any("a hook looks into its layers" in reason for reason in handle.tally.apart)
