"""A plugin of pytest by which transformers' own tests run with every model enabled;
`compat/upstream.py` runs it.

A model is enabled when it is first called, as under `autopack run` but in evaluation too, and a
call that is refused fails its test. What became of the models of a test is kept with its outcome.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from autopack.errors import AutopackError
from autopack.launch import first_call, session
from autopack.launch.settings import RunSettings
from compat.common import Outcomes


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("autopack")
    group.addoption(
        "--outcomes", type=Path, required=True, help="file that gets the outcome of every test"
    )
    group.addoption("--enabled", action="store_true", help="without it models stay stock")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--enabled"):
        _enable_models(config)
    if not hasattr(config, "workerinput"):  # the process that all reports reach
        config.pluginmanager.register(_Written(config.getoption("--outcomes")))


class _Written(Outcomes):
    """The outcomes of all tests, in a file."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.found, indent=1))


def _enable_models(config: pytest.Config) -> None:
    here = _Session(RunSettings.read({"AUTOPACK_UNPAD": "yes"}), started=False)
    session.current = here
    first_call.prepare(PreTrainedModel)
    first_call.FirstCall.in_evaluation = True
    config.pluginmanager.register(here)


class _Session(session.Session):
    """Notes what becomes of the models of the test that is running."""

    def __init__(self, settings: RunSettings, started: bool):
        super().__init__(settings, started, Path())
        self.models: dict[str, str] = {}

    def enabled(self, model: PreTrainedModel, enabled: Any, by: str = "") -> None:
        enabled.lenient = False
        self.models[type(model).__name__] = f"enabled{by}"

    def left(self, model: PreTrainedModel, reason: Exception) -> None:
        if not isinstance(reason, AutopackError):
            raise reason
        self.models[type(model).__name__] = " ".join(str(reason).split())[:300]

    def bypassed(self, model: PreTrainedModel) -> None:
        self.models[type(model).__name__] = "its forward is called directly"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.models = {}
        try:
            return (yield)
        finally:
            item.user_properties.append(("models", self.models))
