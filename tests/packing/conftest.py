"""The ways of packing, and the engines that write shards."""

import os

import pytest

import autopack
from tests.packing.batches import KINDS, of_kind
from tests.packing.engines import blocks_of, dataset_of, load


@pytest.fixture(scope="session")
def ray():
    """Ray, with two workers."""
    pytest.importorskip("ray.data")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    options = {"log_to_driver": False, "logging_level": "warning", "object_store_memory": 200 << 20}
    ray.init(num_cpus=2, include_dashboard=False, **options)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


@pytest.fixture(params=["datasets", pytest.param("ray", marks=pytest.mark.exhaustive)])
def engine(request):
    """Makes data of examples: of datasets, or of Ray with blocks that end at examples `cuts`."""
    if request.param == "datasets":
        return dataset_of
    return blocks_of(request.getfixturevalue("ray"))


@pytest.fixture(params=[*KINDS, "shards", pytest.param("Ray", marks=pytest.mark.exhaustive)])
def door(request, tmp_path):
    """Gives the packed rows of examples, packed in one of all ways."""

    def rows(made, *arguments, **options):
        if request.param in KINDS:
            return list(autopack.pack(of_kind(made, request.param), *arguments, **options))
        if request.param == "shards":
            data = dataset_of(made)
        else:
            data = blocks_of(request.getfixturevalue("ray"))(made, 1)
        made = autopack.packing.pack_shards(data, *arguments, path=tmp_path / "rows", **options)
        return list(load(made.files))

    return rows
