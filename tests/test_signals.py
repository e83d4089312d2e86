"""A request to stop: obeyed after a step, ending the process where nothing is lost or at the second time."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from echelon.signals import SAME_REQUEST_S, Stopping, stop_on_signals

PATIENCE_S = 30.0


def test_before_anybody_trains_the_first_signal_ends_the_process():
    assert Stopping().hear(signal.SIGTERM, 0.0)


def test_while_all_train_the_first_asks_and_only_a_later_interrupt_ends():
    stopping = Stopping()
    assert not stopping.obey()
    assert not stopping.hear(signal.SIGTERM, 10.0)
    assert stopping.obey()
    assert not stopping.hear(signal.SIGINT, 10.0 + SAME_REQUEST_S / 2)  # torchrun hands it on
    assert not stopping.hear(signal.SIGTERM, 10.0 + 2 * SAME_REQUEST_S)  # who starts jobs will kill, if it must be
    assert stopping.hear(signal.SIGINT, 10.0 + 2 * SAME_REQUEST_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_heard_while_this_thread_is_in_code_that_never_returns_to_python(number):
    ended = threading.Event()
    held = threading.Lock()
    held.acquire()
    with stop_on_signals(Stopping(), ended.set):
        os.kill(os.getpid(), number)
        assert ended.wait(PATIENCE_S)


def test_the_signals_are_as_they_were_afterwards():
    def mine(*_):
        pass

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with stop_on_signals(Stopping(), lambda: None):
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.set_wakeup_fd(-1) == -1
        assert not any(thread.name == "echelon-signals" for thread in threading.enumerate())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_signals(Stopping(), lambda: None):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ending_a_process_that_a_data_loader_has_forked_does_not_stop_this_one():
    stopping = Stopping()
    stopping.obey()
    with stop_on_signals(stopping, lambda: None):
        child = os.fork()
        if child == 0:
            time.sleep(PATIENCE_S)
            os._exit(3)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
    assert not stopping.obey()


def test_another_thread_than_the_first_has_no_say_over_signals():
    found = []

    def elsewhere():
        with stop_on_signals(Stopping(), lambda: None):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(PATIENCE_S)
    assert found == [signal.getsignal(signal.SIGTERM)]
