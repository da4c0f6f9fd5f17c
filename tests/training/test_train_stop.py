"""The first signal asks for an end; the second does what it always does."""

import signal

import pytest

from gdn_jax.training.stop import StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.is_set
        signal.raise_signal(number)
        assert stop.is_set
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before


@pytest.fixture
def usual_interrupts():
    """A background job of a shell may ignore interrupts; a program in the foreground does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_interrupts")
def test_a_second_interrupt_is_not_held_back():
    with StopSignal():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
