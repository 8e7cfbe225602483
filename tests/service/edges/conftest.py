"""Both edges over a fake plane."""

import pytest

from service.settings import Settings
from tests.service.edge_servers import serve_edges
from tests.service.fakes import FakePlane


@pytest.fixture
def settings():
    return Settings(max_request_bytes=1 << 20, probe_interval_s=0.02)


@pytest.fixture
def plane():
    return FakePlane()


@pytest.fixture
async def edges(plane, settings):
    async with serve_edges(plane, settings) as served:
        yield served
