"""A fleet's coordinator as a process of its own, and how it ends with the process that has started it.

Owns the entry point. What it serves is ``serve``'s; who starts and watches it is the launcher.

It starts without the package's own ``__init__``, which imports Lightning and the models to register the strategies:
that is nine of twelve CPU seconds, whenever a run starts or a coordinator that has died comes back.
"""

import gc
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_blocktrain.transport.address import TOKEN

SERVE, PARENT = "BLOCKTRAIN_SERVE", "BLOCKTRAIN_PARENT"
POLL_S = 0.2
TERM_WAIT_S = 1.5
"""From a request to end to the signal that cannot be refused."""

CODE = f"""
import sys, types
package = types.ModuleType("lightning_blocktrain")
package.__path__ = [{str(Path(__file__).parents[1])!r}]
sys.modules["lightning_blocktrain"] = package
from lightning_blocktrain.coordinator.process import coordinator_main
coordinator_main()
"""
"""What ``python -c`` runs."""


def coordinator_main() -> None:
    """Be the coordinator that rank 0 has started; ends on a signal, or with rank 0.

    It does not end with the run: rank 0 may validate for any time before it comes for the rest, and who watches this
    process can take every end that it did not bring about for a fault.
    """
    from lightning_blocktrain.coordinator.serve import ServeSettings, serve

    told: dict[str, Any] = json.loads(os.environ.pop(SERVE))
    folder, parent_pid = Path(told["folder"]), int(os.environ.pop(PARENT))
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    end_with_parent(parent_pid, last=remove)
    settings = ServeSettings(
        run_id=told["run_id"],
        token=os.environ.pop(TOKEN),
        port=told["port"],
        state_dir=Path(told["state"]),
        linger_s=None,
        **told["settings"],
    )
    logging.basicConfig(level=logging.WARNING, format="coordinator: %(message)s")
    code = serve(settings, on_listening=_note_url(folder))
    if os.getppid() != parent_pid:  # else rank 0 removes it, or starts this coordinator again
        remove()
    gc.freeze()  # what torch leaves takes seconds to collect, and the process ends with it anyway
    sys.exit(code)


def _note_url(folder: Path) -> Callable[[str], None]:
    def note(url: str) -> None:
        temporary = folder / "url.tmp"
        temporary.write_text(url)
        temporary.replace(folder / "url")

    return note


def end_with_parent(parent_pid: int, last: Callable[[], object] | None = None) -> None:
    """End this process, from a thread, when the process ``parent_pid`` is no longer its parent.

    Args:
        parent_pid: Whom to watch.
        last: Called when this process has had its time to end by itself.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(TERM_WAIT_S)
        if last is not None:
            last()
        os._exit(1)

    threading.Thread(target=watch, name="blocktrain-parent", daemon=True).start()
