"""Pieces that are made and taken in a second thread."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from lightning_blocktrain.transport.overlap import BATCH_BYTES, SMALL_BYTES, ahead, take_all

WAIT_S = 10.0


async def arriving(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def test_ahead_makes_the_next_item_while_the_present_one_is_in_use() -> None:
    second_is_made, made_in = threading.Event(), []

    def items() -> Iterator[int]:
        for item in range(3):
            made_in.append(threading.current_thread())
            if item == 1:
                second_is_made.set()
            yield item

    async def use() -> list[int]:
        used = []
        async for item in ahead(items()):
            if item == 0:
                assert await asyncio.to_thread(second_is_made.wait, WAIT_S)
            used.append(item)
        return used

    assert asyncio.run(use()) == [0, 1, 2]
    assert threading.current_thread() not in made_in


def test_ahead_raises_what_making_an_item_raises() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise ZeroDivisionError

    async def use() -> None:
        async for _ in ahead(items()):
            pass

    with pytest.raises(ZeroDivisionError):
        asyncio.run(use())


@pytest.mark.parametrize("sizes", [[], [3], [SMALL_BYTES - 1], [SMALL_BYTES], [BATCH_BYTES // 4] * 9 + [5], [2**22, 1]])
def test_take_all_hands_over_every_piece_in_order(sizes: list[int]) -> None:
    pieces = [bytes([idx]) * size for idx, size in enumerate(sizes)]
    taken: list[bytes] = []
    threads: set[threading.Thread] = set()

    def take(batch: Sequence[bytes]) -> None:
        taken.extend(batch)
        threads.add(threading.current_thread())

    asyncio.run(take_all(arriving(pieces), take))
    assert taken == pieces
    assert (threading.current_thread() in threads) is (0 < sum(sizes) % BATCH_BYTES < SMALL_BYTES)


def test_take_all_receives_while_a_batch_is_taken() -> None:
    second_has_arrived = threading.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield bytes(BATCH_BYTES)
        second_has_arrived.set()
        yield bytes(BATCH_BYTES)

    def take(batch: Sequence[bytes]) -> None:
        assert second_has_arrived.wait(WAIT_S)

    asyncio.run(take_all(pieces(), take))


def test_take_all_raises_what_taking_raises_and_takes_no_more() -> None:
    batches = []

    def take(batch: Sequence[bytes]) -> None:
        batches.append(len(batch))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(take_all(arriving([bytes(BATCH_BYTES)] * 4), take))
    assert batches == [1]


def test_take_all_that_is_cancelled_ends_only_when_nobody_takes_any_more() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), []

    def take(batch: Sequence[bytes]) -> None:
        begun.set()
        go_on.wait(WAIT_S)
        ended.append(len(batch))

    async def cut() -> None:
        task = asyncio.create_task(take_all(arriving([bytes(BATCH_BYTES)] * 2), take))
        await asyncio.to_thread(begun.wait, WAIT_S)
        task.cancel()
        asyncio.get_running_loop().call_later(0, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [1]

    asyncio.run(cut())
