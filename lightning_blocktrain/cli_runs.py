"""The commands around a run of several machines: ``coordinator``, ``status`` and ``doctor``.

Owns their arguments, what they print and their exit codes. The token comes from the environment, never from an
argument, which other users of a machine can read.

===========  ====================================  ==============================  ========================
command      0                                     1                               2
===========  ====================================  ==============================  ========================
coordinator  the run is over, or a signal came     the run was given up            wrong input, port in use
status       the run goes on, or ended well        the run was given up            no answer, wrong token
doctor       a worker here can take part           it cannot                       wrong input
===========  ====================================  ==============================  ========================
"""

import argparse
import gc
import json
import logging
import os
import secrets
import shlex
import socket
import ssl
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from lightning_blocktrain.cli_options import at_least_1, block_numbers, command, seconds
from lightning_blocktrain.errors import PortInUseError, TransportError, UnauthorisedError, explain
from lightning_blocktrain.transport.address import (
    CAFILE,
    DEFAULT_RUN_ID,
    RUN_ID,
    TOKEN,
    URL,
    check_sendable,
    given_cafile,
    is_name,
    split_urls,
)

DEFAULT_LISTEN = "127.0.0.1:29410"
"""Beside the ports 29400 and 29500, where torchrun's processes meet."""
LIVE_EVERY_S = 2.0
ENDED = ("finished", "stopped", "failed")


def add_run_commands(commands: Any) -> None:
    """Add the commands to a parser's subcommands."""
    _add_coordinator(commands)
    _add_status(commands)
    _add_doctor(commands)


def _add_coordinator(commands: Any) -> None:
    parser = command(
        commands,
        "coordinator",
        "serve a run that workers join by its URL",
        "Coordinate one run until it ends or a signal comes. The first worker that joins brings model and terms. The\n"
        f"token is taken from {TOKEN}; without it a random one is made and printed here, once. Started again with the\n"
        "same --state it continues the run where it was.",
        "examples:\n  blocktrain coordinator --state run1\n"
        "  blocktrain coordinator --state run1 --listen 0.0.0.0:29410 --certfile chain.pem --keyfile key.pem \\\n"
        "      --num-workers 4 --max-rounds 100\n",
    )
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="folder that keeps the run")
    parser.add_argument(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help=f"address (default: {DEFAULT_LISTEN}, this machine only; port 0: any free one)",
    )
    parser.add_argument(
        "--run-id", default=os.environ.get(RUN_ID, DEFAULT_RUN_ID), help=f"name of the run (default: {DEFAULT_RUN_ID})"
    )
    parser.add_argument("--certfile", type=Path, metavar="PEM", help="certificate chain; with it it speaks HTTPS")
    parser.add_argument("--keyfile", type=Path, metavar="PEM", help="key of the certificate (default: in --certfile)")
    parser.add_argument(
        "--num-workers", type=at_least_1, metavar="N", help="workers to wait for (default: as the first worker says)"
    )
    parser.add_argument(
        "--max-rounds", type=at_least_1, metavar="N", help="rounds of every block (default: as the first worker says)"
    )
    parser.add_argument(
        "--blocks",
        type=block_numbers,
        metavar="N,N",
        help="serve these blocks only, beside other coordinators of the run (default: all, and the interface)",
    )
    parser.add_argument(
        "--interface",
        action="store_true",
        help="of the coordinators of a run be the one that merges what is outside the blocks, and gives out ids",
    )
    parser.set_defaults(run=run_coordinator)


def _add_status(commands: Any) -> None:
    parser = command(
        commands,
        "status",
        "show a run: blocks, versions, workers, bytes, time left",
        f"Ask a coordinator how its run stands; the token is taken from {TOKEN}. In a terminal the answer is kept up\n"
        "to date until the run is over. Exit code 1: the run was given up; 2: no answer, or the token is not taken.",
        "examples:\n  blocktrain status http://127.0.0.1:29410\n  blocktrain status URL --watch 10\n"
        "  blocktrain status URL --json | jq .phase\n",
    )
    _add_url(parser)
    parser.add_argument(
        "--watch",
        type=seconds,
        metavar="SECONDS",
        help=f"ask again so often (default: {LIVE_EVERY_S:g} in a terminal; else ask once)",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON, one line each, once by default")
    _add_timeout(parser, "longest wait for an answer")
    parser.set_defaults(run=run_status)


def _add_doctor(commands: Any) -> None:
    parser = command(
        commands,
        "doctor",
        "check from a worker's machine whether it can take part in a run",
        "Check name, connection, TLS, token, run, version, clock, round trip, throughput and address; one line each.\n"
        f"Token and run id are taken from {TOKEN} and {RUN_ID}, as a worker does. Exit code 1: something fails.",
        "example:\n  blocktrain doctor https://host.example:29410\n",
    )
    _add_url(parser)
    _add_timeout(parser, "longest time of one check")
    parser.set_defaults(run=run_doctor)


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default=os.environ.get(URL),
        help=f"of the coordinator; of several, with commas (default: {URL})",
    )
    parser.add_argument(
        "--cafile",
        metavar="PEM",
        help=f"authority of the coordinator's certificate (default: {CAFILE}, else the system's)",
    )


def _add_timeout(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--timeout-s", type=seconds, default=10.0, metavar="SECONDS", help=f"{what} (default: 10)")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings as one line each, without the line of code that gave them."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        print(f"blocktrain: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


# coordinator


def run_coordinator(options: argparse.Namespace) -> int:
    """Run ``blocktrain coordinator``."""
    from lightning_blocktrain.coordinator.serve import ServeSettings, serve
    from lightning_blocktrain.coordinator.storage import MANIFEST

    host, port = parse_listen(options.listen)
    given = os.environ.get(TOKEN, "")
    token = given or secrets.token_urlsafe(32)
    for name, value in (("--run-id", options.run_id), (TOKEN, token)):
        check_sendable(name, value, "choose another")
    goes_on = (options.state / MANIFEST).exists()
    settings = ServeSettings(
        run_id=options.run_id,
        token=token,
        host=host,
        port=port,
        state_dir=options.state,
        certfile=options.certfile,
        keyfile=options.keyfile,
        num_workers=options.num_workers,
        max_rounds=options.max_rounds,
        blocks=options.blocks,
        interface=options.interface,
    )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("lightning_blocktrain").setLevel(logging.INFO)
    urls: list[str] = []

    def listening(url: str) -> None:
        urls.append(reachable(url))
        fresh = "" if given else token
        lines = instructions(urls[0], options.run_id, fresh, options.state, goes_on)
        if settings.serves is not None:
            lines.append(
                f"This one serves {', '.join(settings.serves)}: name all coordinators of the run, with commas."
            )
        print("\n".join(lines), flush=True)

    with plain_warnings():
        try:
            return serve(settings, on_listening=listening)
        except PortInUseError:
            raise
        except OSError as exc:
            if urls:
                raise
            got = f"listen={options.listen}, state={options.state} ({exc})"
            rule = "listen and state must be an address and a folder of this machine that you may use"
            raise ValueError(explain(rule, got, "choose another")) from exc
        finally:
            gc.freeze()  # at its end the interpreter would look through all of torch once more: seconds after Ctrl-C


def parse_listen(text: str, default: str = DEFAULT_LISTEN) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, ``[IPV6]:PORT`` or ``:PORT`` (this machine only).

    Raises:
        ValueError: If it is none.
    """
    host, colon, port = text.rpartition(":")
    is_bare_v6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    fits = colon and not is_bare_v6 and is_name(host.strip("[]")) and port.isascii() and port.isdecimal()
    if not fits or int(port) > 65535:
        rule = "listen must be HOST:PORT with a port of 0 to 65535"
        raise ValueError(explain(rule, f"listen={text!r:.100}", f"the default is {default}"))
    return host.strip("[]") or "127.0.0.1", int(port)


def reachable(url: str) -> str:
    """Return the URL with this machine's name where it listens on all addresses."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    return f"{parts.scheme}://{socket.gethostname()}:{parts.port}"


def instructions(url: str, run_id: str, fresh_token: str, state: Path, goes_on: bool) -> list[str]:
    """Return the lines that tell people how to join and watch.

    Args:
        url: Of the coordinator.
        run_id: Of the run.
        fresh_token: The token if it was made just now, and so is known to nobody; else empty.
        state: Folder of the run.
        goes_on: Whether the folder held a run before.
    """
    what = "goes on" if goes_on else "waits for its first worker"
    lines = [f"Run {run_id} {what} at {url}, state in {state}.", "In every worker's terminal:"]
    lines.append(f"  export {URL}={url}")
    lines.append(f"  export {TOKEN}={fresh_token}" if fresh_token else f"  and {TOKEN} as it is in this one")
    if run_id != DEFAULT_RUN_ID:
        lines.append(f"  export {RUN_ID}={shlex.quote(run_id)}")
    lines += ["To watch it, with the same token:", f"  blocktrain status {url}"]
    lines.append(f"  {url}/#token={fresh_token}" if fresh_token else f"  {url}/")
    if fresh_token and goes_on:
        lines.append(f"The token is new: workers that hold the old one must be started again. Set {TOKEN} to keep it.")
    return lines


# status and doctor


def run_status(options: argparse.Namespace) -> int:
    """Run ``blocktrain status``."""
    from rich.console import Console

    from lightning_blocktrain.transport.http import HttpTransport
    from lightning_blocktrain.transport.shared import line_to

    urls, token = _target(options)
    console, every_s = Console(), options.watch
    if every_s is None and console.is_terminal and not options.json:
        every_s = LIVE_EVERY_S
    patience_s = options.timeout_s / 2  # the last try may begin when the first half is over

    def open_one(url: str) -> HttpTransport:
        # Whoever gives no run id watches whatever run there is.
        return HttpTransport(
            url,
            os.environ.get(RUN_ID) or None,
            token,
            cafile=_cafile(options),
            reconnect_timeout_s=patience_s,
            stall_timeout_s=patience_s,
        )

    with plain_warnings():
        line = line_to(urls, open_one)
    with line, _shown(console, options.json) as show:
        try:
            return watch(line.status, show, every_s)
        except UnauthorisedError as exc:
            raise UnauthorisedError(explain(f"{TOKEN} must be the run's", f"url={urls}", str(exc))) from exc


def watch(
    ask: Callable[[], Mapping[str, Any]],
    show: Callable[[Mapping[str, Any]], None],
    every_s: float | None,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Show a run until it is over, and return the exit code.

    Args:
        ask: Returns its status.
        show: Takes every status.
        every_s: Seconds between two; None: only one is shown.
        pause: Waits for so many seconds.
    """
    while True:
        status = ask()
        if not {"phase", "run_id"} <= status.keys():
            raise TransportError("What answers here is no BlockTrain coordinator.")
        show(status)
        if every_s is None or status["phase"] in ENDED:
            return int(status["phase"] == "failed")
        pause(every_s)


@contextmanager
def _shown(console: Any, as_json: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    from rich.live import Live

    from lightning_blocktrain.cli_status import status_view

    if as_json:
        yield lambda status: print(json.dumps(status), flush=True)
    elif not console.is_terminal:
        yield lambda status: console.print(status_view(status))
    else:
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
            yield lambda status: live.update(status_view(status), refresh=True)


def run_doctor(options: argparse.Namespace) -> int:
    """Run ``blocktrain doctor``."""
    from rich.console import Console
    from rich.text import Text

    from lightning_blocktrain.cli_status import plain
    from lightning_blocktrain.transport.doctor import Finding, Target, run_checks

    token, run_id, cafile = os.environ.get(TOKEN, ""), os.environ.get(RUN_ID, DEFAULT_RUN_ID), _cafile(options)
    urls = split_urls(_url(options))
    targets = [Target(url, token, run_id, cafile, options.timeout_s) for url in urls]
    console, styles = Console(), {"ok": "green", "warn": "yellow", "fail": "red"}

    def say(finding: Finding) -> None:
        line = Text.assemble((f"{finding.level:<5}", styles[finding.level]), f"{finding.name:<13}", plain(finding.text))
        console.print(line, soft_wrap=True)

    is_well = True
    for target in targets:
        if len(targets) > 1:
            console.print(plain(target.url), markup=False, highlight=False, soft_wrap=True)
        is_well = run_checks(target, say) and is_well
    return int(not is_well)


def _target(options: argparse.Namespace) -> tuple[str, str]:
    url, token = _url(options), os.environ.get(TOKEN)
    if not token:
        rule = f"the token of the run must be in the environment variable {TOKEN}"
        raise ValueError(explain(rule, "none", "export the one that the coordinator printed"))
    return url, token


def _url(options: argparse.Namespace) -> str:
    if not options.url:
        raise ValueError(explain("URL must name a coordinator", "none", f"give it, or export {URL}"))
    return str(options.url)


def _cafile(options: argparse.Namespace) -> str | None:
    given = given_cafile(options.cafile)
    try:
        ssl.create_default_context(cafile=given)
    except OSError as exc:
        got = f"cafile={given} ({exc})"
        raise ValueError(explain("cafile must be a PEM file of certificates", got, "correct it")) from exc
    return given
