"""A model that was loaded with flash-attn runs a package's kernels, which transformers keeps in its
own module."""

import functools
import importlib
import sys

import pytest

from autopack import tiny
from autopack.inspection.code import ModelCode
from compat.standins import set_implementation

flash = pytest.importorskip("transformers.modeling_flash_attention_utils")
KERNELS = ("_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn")
pytestmark = pytest.mark.skipif(
    not hasattr(flash, "_flash_varlen_fn"), reason="this release loads them at its import"
)


def put_in_place(monkeypatch, function):
    """What `attn_implementation="flash_attention_2"` does when a model is made, where the package
    is."""
    for name in KERNELS:
        monkeypatch.setattr(flash, name, function)


@pytest.fixture(params=["flash_attn", "flash_attn_interface"])
def package(request, tmp_path, monkeypatch):
    """A package, or a module (flash-attention 3), of that name; nothing in it is called when a
    model is enabled."""
    text = (
        "def flash_attn_varlen_func(q, k, v, **kwargs):\n    raise AssertionError('not to be "
        "called')\n"
    )
    if request.param == "flash_attn":
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn" / "__init__.py").write_text(text)
    else:
        (tmp_path / "flash_attn_interface.py").write_text(text)
    (tmp_path / "beside.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(request.param)
    for name in (request.param, "beside"):
        sys.modules.pop(name, None)


def foreign():
    """What no released record has measured."""
    model = tiny.build("llama")
    set_implementation(model, "flash_attention_2")
    return ModelCode(model, ("flash_attention_2",)).foreign


def test_kernels_as_their_package_has_them_are_covered(package, monkeypatch):
    put_in_place(monkeypatch, package.flash_attn_varlen_func)
    # transformers puts a partial of its own beside them.
    own = functools.partial(flash._process_flash_attention_kwargs, supports_mapping={})
    monkeypatch.setattr(flash, "_process_flash_kwargs_fn", own)
    assert foreign() == []


@pytest.mark.parametrize("whose", ["a script", "a file beside the package", "a partial"])
def test_others_in_their_place_are_not(package, monkeypatch, whose):
    def mine(q, k, v, **kwargs):
        raise AssertionError("not to be called")

    function = {
        "a script": mine,
        "a file beside the package": importlib.import_module("beside").flash_attn_varlen_func,
        "a partial": functools.partial(mine, window_size=(1, 1)),
    }[whose]
    put_in_place(monkeypatch, function)
    assert "the attention function 'flash_attention_2'" in foreign()[0]
