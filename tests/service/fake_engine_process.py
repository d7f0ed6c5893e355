"""A process that reports like a rank until it is killed: `python fake_engine_process.py ENDPOINT`."""

from __future__ import annotations

import os
import sys
import threading
import time

from canary_obs.transport.links import ZmqLink
from tests.service.fakes import FakeEngine, identity

if __name__ == "__main__":
    FakeEngine(ZmqLink(sys.argv[1]), identity(started_ns=time.time_ns(), pid=os.getpid()))
    threading.Event().wait()
