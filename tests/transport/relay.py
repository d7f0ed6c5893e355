"""A cable between two TCP ends that can be cut without either being told."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress


class Relay:
    """Forwards connections to `port` on loopback. `cut` leaves those open and forwards nothing more."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._peers: dict[socket.socket, socket.socket] = {}
        self._dark: set[socket.socket] = set()
        self.hung_up = 0  # ends that were closed after they had gone dark
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Made since the start; two ends each."""
        return len(self._peers) // 2

    def cut(self) -> int:
        """Both ends of what is open fall silent; how many ends."""
        self._dark |= set(self._peers)
        return len(self._dark)

    def close(self) -> None:
        """Hang up everything."""
        self._stop.set()
        self._thread.join()
        for end in (self._door, *self._peers):
            end.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as instrumented:
            instrumented.register(self._door, selectors.EVENT_READ)
            while not self._stop.is_set():
                for key, _ in instrumented.select(0.02):
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    if end is self._door:
                        self._join(instrumented)
                    else:
                        self._forward(end, instrumented)

    def _join(self, instrumented: selectors.BaseSelector) -> None:
        near, _ = self._door.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        self._peers |= {near: far, far: near}
        for end in (near, far):
            instrumented.register(end, selectors.EVENT_READ)

    def _forward(self, end: socket.socket, instrumented: selectors.BaseSelector) -> None:
        data = b""
        with suppress(ConnectionError):
            data = end.recv(65536)
        if not data:
            instrumented.unregister(end)
            if end in self._dark:
                self.hung_up += 1
            else:
                with suppress(OSError):
                    self._peers[end].shutdown(socket.SHUT_WR)
        elif end not in self._dark:
            with suppress(OSError):
                self._peers[end].sendall(data)
