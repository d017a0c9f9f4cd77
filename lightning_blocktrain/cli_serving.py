"""The commands around serving: export a checkpoint block by block, serve blocks, and generate, here or from hosts."""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_blocktrain.cli_options import above_0, at_least_0, at_least_1, block_numbers, command, from_0, speed
from lightning_blocktrain.cli_runs import parse_listen, plain_warnings
from lightning_blocktrain.errors import explain
from lightning_blocktrain.transport.address import TOKEN, check_sendable

DEFAULT_LISTEN = "127.0.0.1:29500"
DEFAULT_COMPLETIONS = "127.0.0.1:8000"
THREADS_PER_CORE = 4


def add_serving_commands(commands: Any) -> None:
    """Add the commands to a parser's subcommands."""
    _add_generate(commands)
    _add_export(commands)
    _add_serve(commands)
    _add_completions(commands)
    _add_plan(commands)


def _add_generate(commands: Any) -> None:
    generate = command(
        commands,
        "generate",
        "continue a text with a checkpoint, or with blocks that hosts serve",
        "Print a prompt and its continuation; what is not printable text shows as a replacement character. The model\n"
        f"is a checkpoint, or served by the hosts of --route, which take the token in {TOKEN}.",
        "examples:\n  blocktrain generate demo_out/diffusion_blocks.ckpt --prompt 'Return the ' --num-bytes 64 \\\n"
        "      --chunk-bytes 4 --sweeps 2\n"
        "  blocktrain generate --route 127.0.0.1:29500,127.0.0.1:29501 --prompt 'Return the '\n",
    )
    generate.add_argument("checkpoint", metavar="CKPT", type=Path, nargs="?", help="checkpoint file")
    generate.add_argument(
        "--route",
        metavar="HOST:PORT,...",
        help="hosts that serve the blocks instead, in any order, with replicas (tls://HOST:PORT: through TLS)",
    )
    generate.add_argument("--prompt", required=True, help="text to continue; empty counts as a line break")
    generate.add_argument("--num-bytes", type=at_least_1, default=200, help="bytes to add (default: 200)")
    add_exit(generate, "blocks before the exit that decides (default: all)")
    generate.add_argument(
        "--chunk-bytes",
        type=at_least_1,
        default=1,
        help="bytes decided per sweep; above 1 for models trained with p_span above 0 (default: 1)",
    )
    generate.add_argument("--sweeps", type=at_least_1, default=1, help="sweeps per chunk (default: 1)")
    generate.add_argument(
        "--num-draws", type=at_least_1, default=1, help="draws of the noise to average, DiffusionBlocks (default: 1)"
    )
    generate.add_argument("--temperature", type=from_0, default=1.0, help="0 is greedy (default: 1)")
    generate.add_argument("--seed", type=at_least_0, default=0, help="the same seed gives the same bytes (default: 0)")
    generate.add_argument(
        "--wire", choices=["fp32", "bf16"], help="how states travel between hosts (default: fp32; with --route)"
    )
    generate.add_argument(
        "--step-by-step",
        action="store_true",
        help="send every state here and on to the next host, where hosts do not reach one another (with --route)",
    )
    generate.set_defaults(run=run_generate)


def _add_export(commands: Any) -> None:
    export = command(
        commands,
        "export",
        "write a checkpoint as one file per block, or the smaller model that ends at an exit",
        "Write a folder with one safetensors file per block and a manifest, for 'blocktrain serve'. With --exit write\n"
        "a checkpoint of the first blocks instead: a model of its own, that decides what the larger one does there.",
        "examples:\n  blocktrain export demo_out/byte_transformer.ckpt blocks\n"
        "  blocktrain export demo_out/byte_transformer.ckpt small.ckpt --exit 1\n",
    )
    export.add_argument("checkpoint", metavar="CKPT", type=Path, help="checkpoint file")
    export.add_argument("out", metavar="OUT", type=Path, help="folder to make; with --exit: file to write or replace")
    add_exit(export, "write the model that ends after so many blocks")
    export.add_argument("--dtype", choices=["fp32", "bf16"], help="of the weights in the folder (default: as they are)")
    export.set_defaults(run=run_export)


def _add_serve(commands: Any) -> None:
    serve = command(
        commands,
        "serve",
        "serve blocks of a model, which several hosts together run",
        "Serve some blocks of a checkpoint, or of a folder that 'blocktrain export' wrote, until a signal comes. All\n"
        f"hosts and clients of a model need the same token in {TOKEN}. Every host must reach the next one.",
        "examples:\n  blocktrain serve demo_out/byte_transformer.ckpt --blocks 0 --listen 127.0.0.1:29500\n"
        "  blocktrain serve blocks --blocks 1,2 --dtype bf16 --listen 0.0.0.0:29500 --certfile chain.pem\n",
    )
    serve.add_argument("model", metavar="CKPT", type=Path, help="checkpoint file, or folder of exported blocks")
    serve.add_argument("--blocks", type=block_numbers, metavar="N,N", help="blocks to serve (default: all)")
    serve.add_argument(
        "--listen",
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help=f"address (default: {DEFAULT_LISTEN}, this machine only; port 0: any free one)",
    )
    serve.add_argument(
        "--dtype", choices=["fp32", "bf16"], default="fp32", help="of weights and computation (default: fp32)"
    )
    serve.add_argument("--certfile", type=Path, metavar="PEM", help="certificate chain; with it the host speaks TLS")
    serve.add_argument("--keyfile", type=Path, metavar="PEM", help="key of the certificate (default: in --certfile)")
    serve.add_argument("--max-sessions", type=at_least_1, default=256, help="most texts at once (default: 256)")
    serve.add_argument(
        "--batch",
        type=at_least_1,
        default=16,
        help="walks of different texts to run at once; 1: the last bits never depend on other texts (default: 16)",
    )
    serve.add_argument(
        "--threads",
        type=at_least_1,
        help="threads that compute; 1 where several hosts share a machine (default: one per core)",
    )
    serve.set_defaults(run=run_serve)


def _add_completions(commands: Any) -> None:
    completions = command(
        commands,
        "completions",
        "answer POST /v1/completions from hosts that serve blocks",
        "Serve HTTP in the shape that client libraries of language models expect (a token is a byte), from hosts that\n"
        f"serve blocks. They take the token in {TOKEN}; HTTP clients send it as their API key.",
        "example:\n  blocktrain completions --route 127.0.0.1:29500,127.0.0.1:29501 --listen 127.0.0.1:8000\n",
    )
    completions.add_argument("--route", metavar="HOST:PORT,...", required=True, help="hosts that serve the blocks")
    completions.add_argument(
        "--listen",
        default=DEFAULT_COMPLETIONS,
        metavar="HOST:PORT",
        help=f"address (default: {DEFAULT_COMPLETIONS}, this machine only; port 0: any free one)",
    )
    completions.add_argument(
        "--model", default="blocktrain", help="name of the model in requests (default: blocktrain)"
    )
    completions.add_argument("--certfile", type=Path, metavar="PEM", help="certificate chain; with it it speaks HTTPS")
    completions.add_argument(
        "--keyfile", type=Path, metavar="PEM", help="key of the certificate (default: in --certfile)"
    )
    completions.set_defaults(run=run_completions)


def _add_plan(commands: Any) -> None:
    plan = command(
        commands,
        "plan",
        "predict memory, bytes and time of serving a shape on several hosts",
        "Predict what a shape needs on one host per block, and how long an output takes in one sweep or byte by byte.\n"
        "The speed of a host is that of this machine, measured in some seconds, unless it is given.",
        "examples:\n  blocktrain plan --width 512 --num-layers 12 --num-blocks 3 --rtt-ms 50 --output-bytes 128\n"
        "  blocktrain plan --width 10240 --num-layers 60 --num-blocks 3 --dtype fp16 \\\n"
        "      --tflops 100 --memory-gb-s 1500 --rtt-ms 50 --mbit-s 1000\n",
    )
    plan.add_argument("--width", type=at_least_1, required=True, help="channels of a hidden state, an even number")
    plan.add_argument("--num-layers", type=at_least_1, required=True, help="layers of the whole model")
    plan.add_argument(
        "--num-blocks", type=at_least_1, default=3, help="blocks of equal size, one host each (default: 3)"
    )
    plan.add_argument("--window-bytes", type=at_least_1, default=256, help="longest window (default: 256)")
    plan.add_argument("--output-bytes", type=at_least_1, default=128, help="length of the output (default: 128)")
    plan.add_argument("--prompt-bytes", type=at_least_1, default=32, help="length of the prompt (default: 32)")
    plan.add_argument("--sessions", type=at_least_1, default=1, help="texts at once, for the memory (default: 1)")
    plan.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of weights (default: fp32)")
    plan.add_argument("--wire", choices=["fp32", "bf16"], default="fp32", help="of states (default: fp32)")
    plan.add_argument("--rtt-ms", type=from_0, default=0.0, help="round trip of every link, ms (default: 0)")
    plan.add_argument("--mbit-s", type=above_0, help="bandwidth of every link, Mbit/s (default: no limit)")
    plan.add_argument("--tflops", type=speed, help="TFLOP/s of a host, instead of this machine's")
    plan.add_argument(
        "--memory-gb-s", type=speed, help="GB/s at which a host reads its weights, instead of this machine's"
    )
    plan.set_defaults(run=run_plan)


def add_exit(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option that names an exit."""
    parser.add_argument("--exit", type=at_least_1, metavar="BLOCKS", help=text)


def run_generate(options: argparse.Namespace) -> int:
    """Run ``blocktrain generate``: print the prompt and what follows it."""
    from rich.console import Console

    from lightning_blocktrain.demo import printable

    if (options.checkpoint is None) == (options.route is None):
        rule = "generate needs a checkpoint or --route, one of them"
        got = f"CKPT={options.checkpoint}, --route={options.route}"
        raise ValueError(explain(rule, got, "name a checkpoint, or the hosts that serve its blocks"))
    if options.route is None and (options.wire or options.step_by_step):
        rule = "--wire and --step-by-step say how hosts are used"
        raise ValueError(explain(rule, f"CKPT={options.checkpoint}", "leave them out, or name hosts with --route"))
    prompt = options.prompt.encode("utf-8", errors="surrogateescape")
    names = ("chunk_bytes", "sweeps", "num_draws", "temperature", "seed")
    choices = {name: getattr(options, name) for name in names} | {"num_blocks": options.exit}
    with Console(stderr=True).status("generating"):
        new = b"".join(_generated(options, prompt, choices))
    print(printable(prompt + new))
    return 0


def _generated(options: argparse.Namespace, prompt: bytes, choices: dict[str, Any]) -> Iterator[bytes]:
    """Yield what continues the prompt."""
    if options.route is None:
        from lightning_blocktrain.models.loading import load_model

        yield load_model(options.checkpoint).generate(prompt, options.num_bytes, **choices)
        return
    from lightning_blocktrain.serving.client import SweepClient

    wire = options.wire or "fp32"
    with SweepClient(options.route, token_of_environment(), wire, not options.step_by_step) as client:
        yield client.generate(prompt, options.num_bytes, **choices)


def run_export(options: argparse.Namespace) -> int:
    """Run ``blocktrain export``: write a folder of blocks, or the model that ends at an exit."""
    from lightning_blocktrain.models.block_files import write_blocks
    from lightning_blocktrain.models.loading import load_model, save_model

    model = load_model(options.checkpoint)
    if options.exit is None:
        manifest = write_blocks(model, options.out, options.dtype)
        print(f"{options.out}: {counted(manifest.num_blocks, 'block')}, version {manifest.version}")
        return 0
    if options.dtype is not None:
        rule = "--dtype is for a folder of blocks"
        raise ValueError(explain(rule, f"--exit {options.exit}, --dtype {options.dtype}", "leave one of them out"))
    smaller = model.at_exit(options.exit)
    save_model(smaller, options.out)
    num_parameters = sum(parameter.numel() for parameter in smaller.parameters())
    blocks, layers = counted(options.exit, "block"), counted(len(smaller.layers), "layer")
    print(f"{options.out}: {blocks}, {layers}, {num_parameters:,} parameters")
    return 0


def run_serve(options: argparse.Namespace) -> int:
    """Run ``blocktrain serve``."""
    import torch

    from lightning_blocktrain.serving.block_server import BlockServer, HostLimits
    from lightning_blocktrain.serving.process import HostSettings, serve_blocks

    if options.threads is not None:
        most = THREADS_PER_CORE * (os.cpu_count() or 1)
        if options.threads > most:
            rule = f"--threads must be at most {most}, {THREADS_PER_CORE} for each core"
            raise ValueError(explain(rule, f"--threads {options.threads}", "use one per core or fewer"))
        torch.set_num_threads(options.threads)

    def announce(server: BlockServer) -> None:
        facts = server.facts
        blocks = ("Block " if len(facts.blocks) == 1 else "Blocks ") + ", ".join(map(str, facts.blocks))
        print(f"{blocks} of {facts.num_blocks}, version {facts.version}, {facts.dtype}: {server.address}")
        print("Ctrl-C ends it.", flush=True)

    with plain_warnings():
        serve_blocks(
            HostSettings(
                options.model,
                options.blocks,
                token_of_environment(),
                parse_listen(options.listen, DEFAULT_LISTEN),
                options.dtype,
                options.certfile,
                options.keyfile,
                options.max_sessions,
                HostLimits(batch=options.batch),
            ),
            announce,
        )
    print("blocktrain serve: ended", file=sys.stderr)
    return 0


def run_completions(options: argparse.Namespace) -> int:
    """Run ``blocktrain completions``."""
    import asyncio

    from lightning_blocktrain.serving.client import SweepClient
    from lightning_blocktrain.serving.completions import CompletionServer
    from lightning_blocktrain.serving.process import until_signalled
    from lightning_blocktrain.transport.site import server_tls

    token, listen = token_of_environment(), parse_listen(options.listen, DEFAULT_COMPLETIONS)

    def announce(server: CompletionServer) -> None:
        print(f"{server.url}/v1/completions, model {server.model}")
        print("Ctrl-C ends it.", flush=True)

    with plain_warnings():
        tls = server_tls(listen[0], options.certfile, options.keyfile)
        with SweepClient(options.route, token) as client:
            server = CompletionServer(client, token, listen, tls, model=options.model)
            asyncio.run(until_signalled(server, announce))
    print("blocktrain completions: ended", file=sys.stderr)
    return 0


def run_plan(options: argparse.Namespace) -> int:
    """Run ``blocktrain plan``."""
    from rich.console import Console

    from lightning_blocktrain.serving.machine import measured_machine
    from lightning_blocktrain.serving.plan import GIVEN_HOP_S, GIVEN_LAYER_S, Machine, Network, ServedShape, plan

    names = ("width", "num_layers", "num_blocks", "window_bytes", "dtype", "wire")
    shape = ServedShape(**{name: getattr(options, name) for name in names})
    if (options.tflops is None) != (options.memory_gb_s is None):
        rule = "--tflops and --memory-gb-s describe a host together"
        got = f"--tflops {options.tflops}, --memory-gb-s {options.memory_gb_s}"
        raise ValueError(explain(rule, got, "give both, or neither to measure this machine"))
    if options.tflops is not None:
        machine = Machine(options.tflops * 1e12, options.memory_gb_s * 1e9, GIVEN_LAYER_S, GIVEN_HOP_S)
        source = f"as given; {GIVEN_LAYER_S * 1e3:g} ms a layer and {GIVEN_HOP_S * 1e3:g} ms a link assumed beside"
    elif options.dtype == "fp16":
        rule = "the speed of fp16 is not measured on a CPU"
        raise ValueError(explain(rule, "--dtype fp16", "give --tflops and --memory-gb-s"))
    else:
        machine, source = measured_machine(min(options.width, 2048), dtype=options.dtype), "measured on this machine"
    network = Network(options.rtt_ms / 1e3, options.mbit_s * 1e6 / 8 if options.mbit_s else float("inf"))
    found = plan(shape, machine, network, options.output_bytes, options.prompt_bytes, options.sessions)
    rows = {
        "shape (logical: nothing is trained)": f"{shape.num_parameters:,} parameters, {options.dtype}",
        "speed of a host": f"{machine.flops_per_s / 1e12:.3g} TFLOP/s, {machine.bytes_per_s / 1e9:.3g} GB/s, {source}",
        "weights, keys and values of a host": f"{found.host_bytes / 2**20:,.1f} MiB",
        "one sweep, predicted": f"{found.sweep_s:.3g} s, {options.output_bytes / found.sweep_s:.3g} bytes/s",
        "  moved": f"{found.sweep_bytes:,} bytes",
        "byte by byte, predicted": f"{found.plain_s:.3g} s, {options.output_bytes / found.plain_s:.3g} bytes/s",
        "  moved ": f"{found.plain_bytes:,} bytes",
        "ratio": f"{found.plain_s / found.sweep_s:.3g}",
    }
    console = Console()
    for name, value in rows.items():
        console.print(f"{name:<36}{value}", soft_wrap=True, highlight=False)
    return 0


def token_of_environment() -> str:
    """Return the token that hosts and clients of a model share.

    Raises:
        ValueError: If the environment has none.
    """
    token = os.environ.get(TOKEN, "")
    if not token:
        rule = f"the token that all hosts and clients share must be in the environment variable {TOKEN}"
        raise ValueError(explain(rule, "none", f"export {TOKEN}=... with the same long random text everywhere"))
    check_sendable(TOKEN, token, "choose another")
    return token


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"
