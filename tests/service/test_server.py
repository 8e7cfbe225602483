"""The composition root: its listener, its settings, its ways to say no."""

import asyncio
import socket

import pytest

from export.contract import UserError
from service.listeners import listen
from service.server import _unless, read_settings


def test_accepted_connections_never_wait_for_a_delayed_acknowledgement():
    with listen("http", "127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_busy_port_is_named_with_the_option_that_changes_it():
    with listen("http", "127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}.*--http-port"), listen("http", "127.0.0.1", port):
            pass


def test_settings_come_from_the_environment_unless_overridden(monkeypatch):
    monkeypatch.setenv("KJTSERVE_HTTP_PORT", "1234")
    monkeypatch.setenv("KJTSERVE_MAX_IDS", "5")
    settings = read_settings(http_port=4321, grpc_port=None)
    assert (settings.http_port, settings.grpc_port, settings.max_ids) == (4321, 8081, 5)


def test_a_bad_setting_is_named_with_its_value_and_rule(monkeypatch):
    monkeypatch.setenv("KJTSERVE_MAX_BATCH_IDS", "-3")
    with pytest.raises(UserError, match=r"KJTSERVE_MAX_BATCH_IDS='-3'.*greater than 0"):
        read_settings()


async def test_work_that_is_overtaken_by_the_stop_signal_is_cancelled():
    stop, cancelled = asyncio.Event(), []

    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    asyncio.get_running_loop().call_soon(stop.set)
    assert await _unless(stop, work()) is None
    assert cancelled == [True]


async def test_work_that_fails_before_the_stop_signal_says_why():
    async def work():
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        await _unless(asyncio.Event(), work())
