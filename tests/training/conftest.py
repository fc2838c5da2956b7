"""Tiny models: one thread is faster than two that wait for each other, and threads change no bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vexact.verification.checks import thread_count


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with thread_count(1):
        yield
