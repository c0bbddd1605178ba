"""An event loop on which waiting takes no time."""

import asyncio
import gc
import selectors

PATIENCE_S = 30.0
"""Real seconds until a loop that nothing can wake any more is an error."""
LONGEST_S = 10 * 24 * 3600.0
"""Virtual seconds until then: a wait without an end is a timer, too."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while there is something to do, or a thread of `run_in_executor` is at work. Otherwise it
    jumps to the next timer. It cannot know of an answer that a socket's other end is still working on, so that
    connecting one is an error: a deadline would pass before the answer does, now and then."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor, func, *args):
        self._clock.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._ended)
        return future

    async def sock_connect(self, sock, address):
        raise AssertionError(f"a connection to {address} in virtual time: use support.in_memory, or asyncio.run")

    def _ended(self, future: object) -> None:
        self._clock.threads -= 1


class _JumpingSelector(selectors.DefaultSelector):
    latest = 1000.0
    """Where the clock of the loop before stopped. The next one goes on from there: no clock goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self._began = self.latest
        self.threads = 0

    def close(self) -> None:
        _JumpingSelector.latest = self.now
        super().close()

    def select(self, timeout=None):
        if timeout is None or (timeout and self.threads):
            events = super().select(PATIENCE_S)
            assert events, f"no timer and no event in {PATIENCE_S:g} s: the test waits in vain"
            return events
        events = super().select(0)
        if not events:
            self.now += timeout
            assert self.now - self._began < LONGEST_S, "what this loop waits for has no end: the test waits in vain"
        return events


def run(coroutine):
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


def play(scene):
    """Run a test's coroutine in virtual time. A complaint of the loop is an error."""
    complaints = []

    async def whole():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        await scene
        gc.collect()
        await asyncio.sleep(0)

    gc.freeze()  # so that the collection in the end looks at what the scene has made, not at all modules
    try:
        run(whole())
    finally:
        gc.unfreeze()
    assert complaints == []
