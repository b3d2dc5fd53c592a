"""The engines that write shards."""

import pytest

from tests.packing.engines import blocks_of, dataset_of, ray_started


@pytest.fixture(scope="session")
def ray():
    """Ray, with two workers."""
    pytest.importorskip("ray.data")
    found = ray_started()
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
