"""Faults in a fit: it ends at once, names the first cause, and leaves no thread, process or shared memory behind."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_blocktrain import BoundedHorizonStrategy
from lightning_blocktrain.errors import StageError
from tests.conftest import living_children
from tests.strategies.conftest import BACKENDS, UserModule, fit, seeded

STARTS_PROCESSES = True

END_S = 5.0
"""The promise: seconds from a fault to the end of the fit."""

ROOT = Path(__file__).parents[2]

SCRIPT = """
import multiprocessing
import os
import sys

import lightning as L
import torch

from lightning_blocktrain import BoundedHorizonStrategy
from tests.strategies.conftest import UserModule, loader

torch.set_num_threads(1)


class Tell(L.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3:
            print("training", flush=True)


if __name__ == "__main__":
    multiprocessing.current_process()._config["semprefix"] = f"/mp{os.getpid()}"
    strategy = BoundedHorizonStrategy(num_stages=2, backend=sys.argv[1])
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Tell()], default_root_dir=sys.argv[2],
    )
    trainer.fit(UserModule(), loader(400))
"""


class Breaking(nn.Module):
    """A layer that breaks in its ``calls``-th pass; every alias counts its own."""

    def __init__(self, fault: str, calls: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.fault, self.calls = fault, calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls -= 1
        if self.calls > 0:
            return x + self.linear(x)
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "raise":
            raise ArithmeticError("the layer is broken")
        if self.fault == "gradient":
            return x + self.linear(x) + (self.linear.weight * 0).sum().sqrt()  # finite, with an infinite slope
        return x * float("nan")


class Watch(L.Callback):
    """Knows when the driver was last seen at work."""

    seen_s = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen_s = time.monotonic()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen_s = time.monotonic()


def name_semaphores_after(process_id: int) -> dict[str, Any]:
    """Return the settings that tell a process's names in shared memory from those of other tests at the same time."""
    return {**multiprocessing.current_process()._config, "semprefix": f"/mp{process_id}"}


def shared_memory(process_id: int) -> list[str]:
    """Return the names in shared memory that a process made."""
    gc.collect()  # a semaphore's name goes with the object
    own = (f"sem.mp{process_id}-", f"torch_{process_id}_")
    return [path.name for path in Path("/dev/shm").glob("*") if path.name.startswith(own)]


def stage_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("stage-", "group"))}


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No stage outlives its fit, not even as a process of the fork server."""
    interrupt = signal.getsignal(signal.SIGINT)
    children = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr(multiprocessing.current_process(), "_config", name_semaphores_after(os.getpid()))
    yield
    signal.signal(signal.SIGINT, interrupt)  # Lightning ignores it after the first
    assert stage_threads() == set()
    assert {child for child in psutil.Process().children(recursive=True) if child.is_running()} - children <= trackers()
    assert shared_memory(os.getpid()) == []


def trackers() -> set[psutil.Process]:
    """Return the resource trackers: they end with the interpreter."""
    return set(psutil.Process().children()) - living_children()


class TestStages:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("raise", "stage 1 failed at step 2: .*ArithmeticError: the layer is broken"),
            ("loss", "stage 1 failed at step 2: NonFiniteError: the loss must be finite; got loss=nan"),
            ("gradient", "stage 1 failed at step 2: NonFiniteError: the gradient must be finite"),
        ],
    )
    def test_a_stage_that_fails_ends_the_fit_and_is_named_with_its_step(self, make_trainer, backend, fault, message):
        module, watch = seeded(UserModule), Watch()
        module.layers[3] = Breaking(fault, 3)
        strategy = BoundedHorizonStrategy(num_stages=2, backend=backend, ring_slots=8, threads_per_stage=1)
        with pytest.raises(StageError, match=message):
            fit(module, make_trainer(strategy, callbacks=[watch]))
        assert time.monotonic() - watch.seen_s < END_S
        assert all(bool(p.isfinite().all()) and not p.is_shared() for p in module.parameters())

    @pytest.mark.parametrize("alias", ["rgc_serial", "live", "bp_groups"])
    def test_a_failure_in_turns_or_groups_is_named_with_its_step(self, make_trainer, alias):
        module = seeded(UserModule)
        module.layers[3] = Breaking("raise", 3)
        stage = 0 if alias == "bp_groups" else 3
        with pytest.raises(StageError, match=rf"stage {stage} failed at step 2: ArithmeticError: the layer") as caught:
            fit(module, make_trainer(alias))
        assert isinstance(caught.value.__cause__, ArithmeticError)

    def test_the_same_module_trains_after_a_failure(self, make_trainer):
        module = seeded(UserModule)
        broken, whole = Breaking("raise", 4), module.layers[3]
        module.layers[3] = broken
        trainer = make_trainer("rgc", max_steps=8)
        with pytest.raises(StageError):
            fit(module, trainer)
        module.layers[3] = whole
        again = make_trainer("rgc", max_steps=8)
        fit(module, again)
        assert again.global_step == 8

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_failure_that_a_callback_meets_again_leaves_no_stage(self, make_trainer, tmp_path, backend):
        """Lightning skips the teardown when ``on_exception`` of a callback raises."""
        module = seeded(UserModule)
        module.layers[3] = Breaking("raise", 3)
        strategy = BoundedHorizonStrategy(num_stages=2, backend=backend, threads_per_stage=1)
        trainer = make_trainer(strategy, callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True)
        with pytest.raises(StageError, match=r"stage 1 failed at step 2: ArithmeticError"):
            fit(module, trainer)
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("stage-")] == []
        assert [child.name for child in multiprocessing.active_children() if child.name.startswith("stage-")] == []
        strategy.teardown()

    @pytest.mark.slow
    def test_a_stage_process_that_ends_is_named_with_its_exit_code(self, make_trainer):
        module, watch = seeded(UserModule), Watch()
        module.layers[3] = Breaking("exit", 3)
        strategy = BoundedHorizonStrategy(num_stages=2, backend="processes", threads_per_stage=1)
        with pytest.raises(
            StageError, match=r"stage 1 failed at step \d: RuntimeError: its process \d+ ended with exit"
        ):
            fit(module, make_trainer(strategy, callbacks=[watch]))
        assert time.monotonic() - watch.seen_s < END_S


class TestDriver:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
    def test_an_error_in_a_callback_ends_the_stages(self, make_trainer, backend, error):
        class Raise(Watch):
            def on_train_batch_end(self, trainer, *args):
                self.seen_s = time.monotonic()
                if trainer.global_step == 5:
                    raise error

        module, watch = seeded(UserModule), Raise()
        strategy = BoundedHorizonStrategy(num_stages=2, backend=backend, ring_slots=8, threads_per_stage=1)
        with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
            fit(module, make_trainer(strategy, callbacks=[watch]))
        assert time.monotonic() - watch.seen_s < END_S
        assert strategy.accounts == ()
        assert not any(p.is_shared() for p in module.parameters())

    def test_an_error_between_two_batches_leaves_weights_that_validate(self, make_trainer):
        class Raise(L.Callback):
            def on_train_batch_end(self, trainer, *args):
                if trainer.global_step == 5:
                    raise ZeroDivisionError

        module = seeded(UserModule)
        with pytest.raises(ZeroDivisionError):
            fit(module, make_trainer("rgc", callbacks=[Raise()]))
        with torch.no_grad():
            assert bool(module.readout(module.embed.weight).isfinite().all())

    @pytest.mark.slow  # fresh interpreters
    @pytest.mark.parametrize("backend", ["threads", "processes"])
    def test_ctrl_c_in_a_terminal_ends_the_script_and_everything_it_started(self, tmp_path, backend):
        """A terminal interrupts the whole group of processes, the stages too."""
        script = tmp_path / "script.py"
        script.write_text(SCRIPT, encoding="ascii")
        process = subprocess.Popen(
            [sys.executable, str(script), backend, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        try:
            assert process.stdout is not None and process.stdout.readline() == "training\n"
            started = psutil.Process(process.pid).children(recursive=True)
            assert len(started) >= (3 if backend == "processes" else 0)  # the fork server and two stages
            assert bool(shared_memory(process.pid)) == (backend == "processes")
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=2 * END_S)  # the interpreter's own end included
            _, alive = psutil.wait_procs(started, timeout=END_S)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 1, err
        assert "Detected KeyboardInterrupt" in err and "Traceback" not in err
        assert alive == []
        assert shared_memory(process.pid) == []


@pytest.mark.slow  # a fresh interpreter, a fork server, and a stage that begins the script once more
def test_script_without_a_main_guard_is_told_what_it_needs(tmp_path):
    guarded = SCRIPT.replace('if __name__ == "__main__":', "if True:")
    path = tmp_path / "script.py"
    path.write_text(guarded)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), "processes", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "a script needs if __name__ == '__main__':" in done.stderr.splitlines()[-1]
