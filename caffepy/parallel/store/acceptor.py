"""The thread that accepts connections and hands on those that prove themselves; nobody else can hold anything up."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from caffepy.parallel.store.handshake import Hello, ServerHandshake

logger = logging.getLogger(__name__)

PROOF_SECONDS = 5.0
"""From the accept to the proof, however slowly bytes come."""
UNPROVEN_LIMIT = 32
"""Connections without a proof at a time; further ones wait in the kernel, where they take no descriptor."""
_CROWDED_SECONDS = 0.5
"""How long a connection without a proof is kept where others wait for its slot: a rank needs milliseconds."""
_PAUSE_SECONDS = 0.1
"""Between attempts to accept where descriptors have run out."""
_TURN_SECONDS = 0.1
_IDLE_SECONDS = 1.0
_JOIN_SECONDS = 2.0


class Acceptor:
    """Accepts until it is closed.

    Args:
        listening: closed by the acceptor.
        secret: the job's.
        admit: takes over a connection that has proved itself; called in the acceptor's thread, must not wait.
        on_error: called with what ends the thread before `close`; strangers cannot cause it.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: str,
        admit: Callable[[ServerHandshake, Hello], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._secret = secret
        self._admit = admit
        self._on_error = on_error
        self._selector = selectors.DefaultSelector()
        self._unproven: list[ServerHandshake] = []
        """The oldest first."""
        self._accepting = False
        self._paused_until = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="control server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop connections without a proof."""
        self._closing = True
        with suppress(OSError):  # the thread has ended by an error
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            self._on_error(error)
        finally:
            for unproven in self._unproven:
                unproven.line.close()
            self._selector.close()
            self._listening.close()

    def _turn(self) -> None:
        now = time.monotonic()
        crowded = len(self._unproven) >= UNPROVEN_LIMIT
        while self._unproven and now - self._unproven[0].since > (_CROWDED_SECONDS if crowded else PROOF_SECONDS):
            self._drop(self._unproven[0], "it has not proved itself in time")
            crowded = False
        self._accept_if(not crowded and now >= self._paused_until)
        for key, _ in self._selector.select(_TURN_SECONDS if self._unproven or not self._accepting else _IDLE_SECONDS):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)

    def _accept_if(self, wanted: bool) -> None:
        """Look at the listening socket, or leave who comes in the kernel's queue."""
        if wanted and not self._accepting:
            self._selector.register(self._listening, selectors.EVENT_READ)
        elif self._accepting and not wanted:
            self._selector.unregister(self._listening)
        self._accepting = wanted

    def _accept(self) -> None:
        try:
            line, _ = self._listening.accept()
        except OSError as error:
            if not self._closing:
                logger.debug("the control server cannot accept a connection: %s", error)
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            return
        try:
            unproven = ServerHandshake(line, self._secret, time.monotonic())
            self._selector.register(line, selectors.EVENT_READ, unproven)
        except OSError:
            line.close()
            return
        self._unproven.append(unproven)

    def _read(self, unproven: ServerHandshake) -> None:
        try:
            hello = unproven.read()
        except OSError as error:
            self._drop(unproven, error)
            return
        if hello is not None:
            self._forget(unproven)
            self._admit(unproven, hello)

    def _drop(self, unproven: ServerHandshake, why: object) -> None:
        logger.debug("the control server drops a connection: %s", why)
        self._forget(unproven)
        unproven.line.close()

    def _forget(self, unproven: ServerHandshake) -> None:
        self._selector.unregister(unproven.line)
        self._unproven.remove(unproven)
