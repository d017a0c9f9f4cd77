import copy
import csv
import mmap
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections import namedtuple
from pathlib import Path

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_blocktrain import callbacks
from lightning_blocktrain.callbacks import memory
from lightning_blocktrain.callbacks.memory import MIB, MemoryMonitor, TreeMemory, pause_s, tree_memory

needs_pss = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no smaps_rollup here")

# The interpreter allocates a little beside what a test asks for.
SLACK_MIB = 8

HOLD_SHARED = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    shared = mmap.mmap(file.fileno(), 0)
    total = sum(shared[offset] for offset in range(0, len(shared), 4096))
    print("ready", flush=True)
    sys.stdin.read()
"""


def monitor_threads():
    return [thread for thread in threading.enumerate() if thread.name == "memory-monitor"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert monitor_threads() == []


@needs_pss
def test_tree_memory_allocation_of_64_mib_shows_as_anonymous():
    before = tree_memory(os.getpid())
    block = bytearray(b"x" * (64 * MIB))
    after = tree_memory(os.getpid())
    grown = (after.total_bytes - before.total_bytes) / MIB
    assert 64 - SLACK_MIB < grown < 64 + SLACK_MIB
    assert abs((after.anon_bytes - before.anon_bytes) / MIB - grown) < SLACK_MIB
    assert len(block) == 64 * MIB


@needs_pss
def test_tree_memory_split_adds_up_to_the_total():
    newest = tree_memory(os.getpid())
    parts = newest.anon_bytes + newest.file_bytes + newest.shmem_bytes
    # Each of the four numbers is rounded down to a KiB, per process.
    assert abs(newest.total_bytes - parts) <= 4 * 1024 * newest.num_processes
    assert newest.measure == "pss"
    assert newest.num_unreadable == 0


@needs_pss
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory file system")
def test_tree_memory_page_shared_by_two_processes_counts_once():
    path = Path("/dev/shm", f"memory-test-{os.getpid()}")
    path.write_bytes(bytes(32 * MIB))
    try:
        before = tree_memory(os.getpid())
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
            shared[:] = b"x" * len(shared)
            command = [sys.executable, "-c", HOLD_SHARED, str(path)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout.readline() == "ready\n"
                both = tree_memory(os.getpid())
                rss = psutil.Process(child.pid).memory_info().rss
                child.communicate()
    finally:
        path.unlink()
    assert both.num_processes == before.num_processes + 1
    assert rss > 32 * MIB
    shared_mib = (both.shmem_bytes - before.shmem_bytes) / MIB
    assert 32 - 1 < shared_mib < 32 + 1


def test_tree_memory_unknown_process_raises_naming_it():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ProcessLookupError, match=f"pid must belong to a running process; got pid={child.pid}"):
        tree_memory(child.pid)


def test_tree_memory_process_that_vanishes_in_mid_sample_is_skipped(monkeypatch):
    own = psutil.Process()
    child = subprocess.Popen([sys.executable, "-c", ""])
    gone = psutil.Process(child.pid)
    child.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [gone, own])
    newest = tree_memory(os.getpid())
    assert (newest.num_processes, newest.num_unreadable) == (2, 0)


@needs_pss
def test_tree_memory_zombie_counts_nothing():
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    num_processes = tree_memory(os.getpid()).num_processes
    child.communicate()
    assert tree_memory(os.getpid()).num_processes == num_processes


def test_tree_memory_process_it_may_not_read_is_told(monkeypatch):
    def refuse(process, procfs):
        if process.pid != os.getpid():
            raise psutil.AccessDenied(process.pid)
        return memory._Share(MIB)

    monkeypatch.setitem(memory._READ, "pss", refuse)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [psutil.Process(1)])
    newest = tree_memory(os.getpid())
    assert (newest.total_bytes, newest.num_processes, newest.num_unreadable) == (MIB, 1, 1)


@needs_pss
def test_tree_memory_kernel_without_rollup_takes_pss_from_psutil(tmp_path):
    newest = tree_memory(os.getpid(), procfs=tmp_path)
    assert newest.measure == "pss"
    assert (newest.anon_bytes, newest.file_bytes, newest.shmem_bytes) == (None, None, None)
    assert newest.total_bytes == pytest.approx(tree_memory(os.getpid()).total_bytes, rel=0.1)


def without_pss(monkeypatch):
    uss_only = namedtuple("Info", "rss uss")
    monkeypatch.setattr(psutil.Process, "memory_full_info", lambda self: uss_only(5 * MIB, 3 * MIB))


def test_tree_memory_system_without_pss_sums_uss(tmp_path, monkeypatch):
    without_pss(monkeypatch)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [psutil.Process()])
    newest = tree_memory(os.getpid(), procfs=tmp_path)
    assert (newest.measure, newest.total_bytes, newest.num_processes) == ("uss", 6 * MIB, 2)


def test_tree_memory_system_without_pss_and_uss_sums_rss(tmp_path, monkeypatch):
    def refuse(self):
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    newest = tree_memory(os.getpid(), procfs=tmp_path)
    assert newest.measure == "rss"
    assert newest.total_bytes > MIB


@pytest.mark.parametrize("duty", [0.01, 0.05, 0.5, 1.0])
def test_pause_keeps_sampling_within_its_share(duty):
    for cost_s in (0.0, 0.01, 0.3, 4.0):
        pause = pause_s(cost_s, 0.05, duty)
        assert pause >= 0.05
        assert cost_s / (cost_s + pause) <= duty + 1e-12


def test_monitor_as_context_keeps_the_peak_until_the_next_start():
    with MemoryMonitor(sample_every_s=10.0) as monitor:
        start_mib = monitor.peak_mib
        block = bytearray(b"x" * (64 * MIB))
    assert monitor.peak_mib > start_mib + 64 - SLACK_MIB
    assert len(block) == 64 * MIB
    peak_mib = monitor.peak_mib
    del block
    assert monitor.peak_mib == peak_mib
    with monitor:
        assert monitor.peak_mib < peak_mib - 64 + SLACK_MIB


def test_monitor_thread_after_every_sample_waits_by_its_cost(monkeypatch):
    asked, enough = [], threading.Event()

    def record(cost_s, sample_every_s, max_duty):
        asked.append((cost_s, sample_every_s, max_duty))
        if len(asked) >= 5:
            enough.set()
        return 0.001

    monkeypatch.setattr(memory, "pause_s", record)
    with MemoryMonitor(sample_every_s=0.2, max_duty=0.03) as monitor:
        assert enough.wait(timeout=20)
    assert monitor.num_samples == len(asked) >= 5
    assert all(cost_s > 0 for cost_s, _, _ in asked)
    assert {(sample_every_s, max_duty) for _, sample_every_s, max_duty in asked} == {(0.2, 0.03)}


def test_monitor_started_or_stopped_twice_has_one_thread():
    monitor = MemoryMonitor()
    assert monitor.measure is None
    assert monitor.values() == {}
    monitor.start()
    monitor.start()
    assert len(monitor_threads()) == 1
    monitor.stop()
    monitor.stop()
    assert monitor_threads() == []


def test_monitor_of_a_process_that_ends_keeps_what_it_saw():
    command = [sys.executable, "-c", "import sys; print('ready', flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        monitor = MemoryMonitor(sample_every_s=0.01, max_duty=1.0, pid=child.pid)
        with monitor:
            child.communicate()
            deadline = time.monotonic() + 20
            while monitor_threads() and time.monotonic() < deadline:
                monitor_threads()[0].join(0.1)
    assert 0 < monitor.peak_mib < tree_memory(os.getpid()).total_bytes / MIB
    assert monitor.newest.num_processes == 1


def test_monitor_that_does_not_run_can_be_copied_and_pickled():
    monitor = MemoryMonitor(sample_every_s=0.5)
    with monitor:
        pass
    for twin in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert (twin.sample_every_s, twin.peak_mib) == (0.5, monitor.peak_mib)


def test_monitor_without_pss_warns_once_and_names_the_measure_in_its_keys(monkeypatch):
    newest = TreeMemory("uss", 3 * MIB, None, None, None, 1, 0)
    monkeypatch.setattr(memory, "tree_memory", lambda pid: newest)
    monitor = MemoryMonitor()
    with pytest.warns(UserWarning, match="measures USS and logs it under memory/peak_uss_mib") as caught:
        with monitor:
            pass
        with monitor:
            pass
    assert len(caught) == 1
    assert monitor.measure == "uss"
    assert monitor.values() == {"memory/peak_uss_mib": 3.0, "memory/uss_mib": 3.0}


class Tiny(L.LightningModule):
    def __init__(self, fails=False):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.fails = fails
        self.num_threads_seen = 0

    def training_step(self, batch, batch_idx):
        self.num_threads_seen = len(monitor_threads())
        if self.fails:
            raise RuntimeError("broken step")
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(tmp_path, monitor, module, **options):
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=4,
        logger=CSVLogger(tmp_path, name="", version="run"),
        callbacks=[monitor],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(module, DataLoader(torch.ones(8, 3), batch_size=2))
    return trainer


@needs_pss
def test_monitor_in_a_fit_logs_every_key_on_the_steps_of_self_log(tmp_path):
    module, monitor = Tiny(), MemoryMonitor()
    trainer = fit(tmp_path, monitor, module, log_every_n_steps=2)
    assert module.num_threads_seen == 1
    with Path(tmp_path, "run", "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    # Two rows by log_every_n_steps and one of the whole fit.
    assert [row["step"] for row in rows] == ["1", "3", "3"]
    assert {key for key in rows[0] if key.startswith("memory/")} == set(monitor.values())
    for key in monitor.values():
        assert f"``{key}``" in callbacks.__doc__
    assert float(rows[-1]["memory/peak_pss_mib"]) == pytest.approx(monitor.peak_mib)
    assert trainer.callback_metrics["memory/peak_pss_mib"] <= monitor.peak_mib * (1 + 1e-6)
    assert monitor.measure == "pss"


def test_monitor_fit_shorter_than_the_logging_interval_still_logs_its_peak(tmp_path):
    monitor = MemoryMonitor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tmp_path, monitor, Tiny(), log_every_n_steps=50)
    with Path(tmp_path, "run", "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["3"]


def test_monitor_fit_that_fails_leaves_no_thread(tmp_path):
    module = Tiny(fails=True)
    with pytest.raises(RuntimeError, match="broken step"):
        fit(tmp_path, MemoryMonitor(), module)
    assert module.num_threads_seen == 1
    assert monitor_threads() == []


def test_monitor_second_fit_runs_one_thread(tmp_path):
    monitor = MemoryMonitor()
    for name in ("a", "b"):
        module = Tiny()
        fit(tmp_path / name, monitor, module, log_every_n_steps=1)
        assert module.num_threads_seen == 1
        assert monitor_threads() == []


@pytest.mark.parametrize("sample_every_s", [0.0, -1.0, float("inf"), float("nan")])
def test_monitor_bad_interval_raises(sample_every_s):
    with pytest.raises(ValueError, match="sample_every_s must be finite and above 0"):
        MemoryMonitor(sample_every_s=sample_every_s)


@pytest.mark.parametrize("max_duty", [0.0, -0.1, 1.5, float("nan")])
def test_monitor_bad_duty_raises(max_duty):
    with pytest.raises(ValueError, match="max_duty must be above 0 and at most 1"):
        MemoryMonitor(max_duty=max_duty)
