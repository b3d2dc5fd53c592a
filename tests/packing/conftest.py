"""The engines that write shards."""

import os

import pytest

from tests.packing.engines import blocks_of, dataset_of

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


@pytest.fixture(scope="session")
def ray():
    """Ray, with two workers."""
    found = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    options = {"log_to_driver": False, "logging_level": "warning", "object_store_memory": 200 << 20}
    found.init(num_cpus=2, include_dashboard=False, **options)
    found.data.DataContext.get_current().enable_progress_bars = False
    yield found
    found.shutdown()


@pytest.fixture(params=["datasets", pytest.param("ray", marks=pytest.mark.exhaustive)])
def engine(request):
    """Makes data of examples: of datasets, or of Ray with blocks that end at examples `cuts`."""
    if request.param == "datasets":
        return dataset_of
    return blocks_of(request.getfixturevalue("ray"))


@pytest.fixture
def blocks(ray):
    """Makes data of Ray of examples, with blocks that end at examples `cuts`."""
    return blocks_of(ray)
