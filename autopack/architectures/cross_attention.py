"""Models whose text attends to images or proteins across, through layers of their own; text alone is served."""

from autopack.family import Family

_REASON = "its text attends to them across, so every document of a row would see those of all"

FAMILY = Family(
    name="cross_attention",
    model_types=frozenset("evolla mllama".split()),
    how="attention site, document by document; text alone",
    refused_arguments=dict.fromkeys(["cross_attention_states", "pixel_values", "protein_input_ids"], _REASON),
    refused_types=dict.fromkeys(["blip", "idefics"], "it takes no text without images, and " + _REASON),
)
