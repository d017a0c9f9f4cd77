"""How many wrong tokens an address may send: a sliding window with bounded memory.

Pure: the clock is an argument. A request without a token is no guess and does not count. Behind one proxy all workers
have one address: there the proxy has to keep guessers out.
"""

from collections import OrderedDict, deque

MAX_ADDRESSES = 4096


class FailedTokens:
    """Wrong tokens by address.

    Args:
        at_most: So many in one window are answered; further requests of that address wait until it has moved on.
        window_s: Length of the window.
    """

    def __init__(self, at_most: int = 10, window_s: float = 60.0) -> None:
        self.at_most = at_most
        self.window_s = window_s
        self._failed_at: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str, now: float) -> float:
        """Return how long this address has to wait, 0.0 if it may ask."""
        times = self._failed_at.get(address)
        if times is None:
            return 0.0
        while times and times[0] <= now - self.window_s:
            times.popleft()
        return 0.0 if len(times) < self.at_most else times[0] + self.window_s - now

    def note(self, address: str, now: float) -> None:
        """Count a wrong token; the address that failed longest ago is forgotten when there are too many."""
        times = self._failed_at.setdefault(address, deque(maxlen=self.at_most))
        times.append(now)
        self._failed_at.move_to_end(address)
        if len(self._failed_at) > MAX_ADDRESSES:
            self._failed_at.popitem(last=False)
