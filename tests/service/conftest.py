"""Both edges over a fake plane: one pair of servers for all tests of a file, the plane fresh for each."""

from pathlib import Path

import pytest
import pytest_asyncio

from service.settings import Settings
from tests.service.edge_servers import serve_edges, until
from tests.service.fakes import FakePlane

EDGE_TESTS = tuple(Path(__file__).parent / folder for folder in ("edges", "grpc", "rest"))


def pytest_collection_modifyitems(items):
    for item in items:
        over_edges = any(item.path.is_relative_to(folder) for folder in EDGE_TESTS)
        if over_edges and item.get_closest_marker("asyncio") is not None:
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served():
    plane = FakePlane()
    async with serve_edges(plane, Settings(max_request_bytes=1 << 20, probe_interval_s=0.02)) as edges:
        yield edges


@pytest_asyncio.fixture(loop_scope="module")
async def edges(served):
    await until(lambda: served.plane.admission.inflight_requests == 0)
    served.plane.reset()
    served.mark()
    return served


@pytest.fixture
def plane(edges):
    return edges.plane
