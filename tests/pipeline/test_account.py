import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_blocktrain.pipeline import account
from lightning_blocktrain.pipeline.account import StageClock, TimeAccount, decompose


class Clocks:
    """Time that moves when a test says so."""

    def __init__(self, monkeypatch):
        self.wall_s = self.cpu_s = 100.0
        monkeypatch.setattr(account.time, "perf_counter", lambda: self.wall_s)
        monkeypatch.setattr(account.time, "thread_time", lambda: self.cpu_s)

    def pass_by(self, wall_s, cpu_s=0.0):
        self.wall_s += wall_s
        self.cpu_s += cpu_s


@pytest.fixture
def clocks(monkeypatch):
    return Clocks(monkeypatch)


def test_clock_puts_each_section_in_its_own_part(clocks):
    clock = StageClock()
    for wall_s, name in enumerate(("busy", "wait_in", "wait_out", "copy", "optimizer"), start=1):
        with clock.section(name):
            clocks.pass_by(float(wall_s), 0.5)
    clocks.pass_by(5.0)
    read = clock.read()
    # What lies outside every section is waiting for an order.
    assert (read.busy_s, read.wait_in_s, read.wait_out_s, read.copy_s, read.optimizer_s) == (1, 2 + 5, 3, 4, 5)
    assert read.wall_s == 20
    assert read.closure_error == 0
    assert read.work_cpu_s == 1.5  # busy, copy, optimizer


def test_clock_inner_section_interrupts_the_outer_one(clocks):
    clock = StageClock()
    with clock.section("busy"):
        clocks.pass_by(1.0, 1.0)
        with clock.section("wait_out"):
            clocks.pass_by(2.0, 0.25)
        clocks.pass_by(4.0, 4.0)
        inside = clock.read()
    assert (inside.busy_s, inside.wait_out_s, inside.work_cpu_s) == (5, 2, 5)
    assert clock.read() == inside


def test_clock_reads_without_a_part_lost_or_counted_twice(clocks):
    clock = StageClock()
    with clock.section("optimizer"):
        for _ in range(3):
            clocks.pass_by(1.0, 0.5)
            clock.read()
    assert clock.read().optimizer_s == clock.read().wall_s == 3


def test_clock_keeps_the_time_of_a_section_that_raises(clocks):
    clock = StageClock()
    with pytest.raises(LookupError), clock.section("busy"):
        clocks.pass_by(2.0)
        raise LookupError
    assert clock.read().busy_s == 2


def test_clock_counts_batches_and_steps():
    clock = StageClock()
    clock.count(batches=2)
    clock.count(batches=1, steps=1)
    assert (clock.read().num_batches, clock.read().num_steps) == (3, 1)


def test_account_difference_is_what_happened_between():
    earlier, later = TimeAccount(1.0, 2.0, wall_s=4.0, num_steps=2), TimeAccount(3.0, 5.0, wall_s=10.0, num_steps=6)
    assert later - earlier == TimeAccount(2.0, 3.0, wall_s=6.0, num_steps=4)


def test_closure_error_is_the_share_that_no_part_holds():
    assert TimeAccount().closure_error == 0
    assert TimeAccount(1.0, 1.0, 1.0, wall_s=4.0).closure_error == 0.25
    assert TimeAccount(1.0, 2.0, 1.0, 1.0, 1.0, wall_s=4.0).closure_error == -0.5


def test_work_is_cpu_time_for_one_thread_and_clock_time_for_more():
    spent = TimeAccount(busy_s=3.0, copy_s=1.0, optimizer_s=2.0, wait_in_s=9.0, work_cpu_s=4.0, num_steps=2)
    assert spent.work_s(1) == 2
    assert spent.work_s(2) == 3


positive = st.floats(1e-6, 1e6)


@given(positive, positive, st.lists(positive, min_size=1, max_size=8))
def test_decomposition_multiplies_to_the_ratio_of_step_times(bp_step_s, async_step_s, work_s):
    parts = decompose(bp_step_s, async_step_s, work_s)
    product = parts.work * parts.parallelism * parts.orchestration
    assert product == pytest.approx(bp_step_s / async_step_s, rel=1e-12)
    assert 1 - 1e-12 <= parts.parallelism <= len(work_s) * (1 + 1e-12)


def test_decomposition_of_known_times():
    parts = decompose(12.0, 5.0, [4.0, 2.0, 4.0])
    assert (parts.work, parts.parallelism, parts.orchestration) == (1.2, 2.5, 0.8)
