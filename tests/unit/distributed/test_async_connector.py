"""Communicators that are made while the nets are built."""

from __future__ import annotations

import threading
from unittest.mock import MagicMock

import pytest

from caffepy.distributed.connect import AsyncConnector
from caffepy.errors import AbortedError, PeerError


def test_it_is_made_once_in_a_thread_of_its_own() -> None:
    threads = []
    made = MagicMock()

    def connect() -> MagicMock:
        threads.append(threading.current_thread().name)
        return made

    ahead = AsyncConnector(connect, "GPU 1")
    ahead.begin()
    assert ahead() is made
    assert threads == ["connect GPU 1"]


def test_whoever_has_not_begun_makes_it_in_the_caller() -> None:
    assert AsyncConnector(threading.get_ident)() == threading.get_ident()  # type: ignore[arg-type]


def test_its_error_is_raised_by_the_wait() -> None:
    def connect() -> MagicMock:
        raise PeerError("NCCL's connection of the GPUs failed")

    ahead = AsyncConnector(connect)
    ahead.begin()
    with pytest.raises(PeerError, match="NCCL's connection of the GPUs failed"):
        ahead()


def test_the_wait_ends_when_a_peer_failed_and_what_comes_later_is_aborted() -> None:
    peer, aborted, made = threading.Event(), threading.Event(), MagicMock()
    made.abort.side_effect = aborted.set

    def connect() -> MagicMock:
        assert peer.wait(300)
        return made

    ahead = AsyncConnector(connect)
    ahead.begin()
    ahead.give_up()
    with pytest.raises(AbortedError, match="training was stopped"):
        ahead()
    peer.set()
    assert aborted.wait(300)


def test_what_was_made_and_is_given_up_is_aborted() -> None:
    made = MagicMock()
    ahead = AsyncConnector(lambda: made)
    ahead.begin()
    assert ahead() is made
    ahead.give_up()
    made.abort.assert_called_once_with()
