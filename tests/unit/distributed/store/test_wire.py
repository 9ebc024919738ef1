"""How a connection ends."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from caffepy.distributed.store.wire import end_in_order

COUNT = 4 << 20


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection; the second one has received nothing of `COUNT` bytes that the first has sent."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    line = socket.create_connection(listening.getsockname())
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * COUNT)
    other, _ = listening.accept()
    listening.close()
    return line, other


def test_what_was_sent_last_arrives_where_the_other_end_has_sent_more(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """A plain close resets the connection here, and most of the bytes are lost."""
    line, other = ends
    line.setblocking(False)
    sent = line.send(bytes(COUNT))
    other.sendall(b"a request that nobody reads")
    ending = threading.Thread(target=end_in_order, args=(line, 20.0))
    ending.start()
    time.sleep(0.05)
    received = 0
    while data := other.recv(1 << 20):
        received += len(data)
    ending.join(300)
    assert received == sent > 1 << 18
    other.close()


def test_an_end_that_takes_nothing_is_not_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    line, other = ends
    line.setblocking(False)
    line.send(bytes(COUNT))
    begin = time.monotonic()
    end_in_order(line, 0.1)
    assert 0.1 <= time.monotonic() - begin < 300.0 and line.fileno() == -1
    other.close()
