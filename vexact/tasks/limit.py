"""A time limit for code that the project did not write.

In the main thread an interval timer interrupts the call (SIGALRM), also where it sleeps or waits; whatever timer and
handler were there before are put back. Code that sets an alarm of its own takes this one's place. In any other thread,
where Python gets no signals, the call runs in a thread beside it and is given up: it goes on by itself until it ends,
and does not keep the program from ending.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
AGAIN = 0.1  # seconds until code that swallowed the interruption is interrupted once more


class TimeUp(Exception):
    """A call took longer than it may."""


class _Alarm(BaseException):
    """Not an Exception, so that `except Exception` in the called code does not swallow it."""


def limited(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns. Raises TimeUp after that many seconds, or what the call raises."""
    if threading.current_thread() is threading.main_thread():
        return _interrupted(seconds, call)
    return _abandoned(seconds, call)


def _interrupted(seconds: float, call: Callable[[], T]) -> T:
    def ring(number: int, frame: FrameType | None) -> None:
        raise _Alarm

    begin = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, max(seconds, AGAIN))
    try:
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _Alarm:
        raise TimeUp(f"took longer than {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begin), 1e-6), interval)


def _abandoned(seconds: float, call: Callable[[], T]) -> T:
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    worker = threading.Thread(target=run, name="limited", daemon=True)
    worker.start()
    worker.join(seconds)
    if worker.is_alive():
        raise TimeUp(f"took longer than {seconds:g} s")
    if raised:
        raise raised[0]
    return returned[0]
