"""The ``blocktrain`` command: demo, fit, evaluate, generate, and what is around a run of several machines.

Owns arguments, exit codes and what a terminal shows. ``fit``, ``validate``, ``test`` and ``predict`` are Lightning's
own command line with this package's strategies, models and data already imported.

Exit codes: 0; 2 for input that is wrong, said in one line on standard error; 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_blocktrain.cli_options import at_least_0, at_least_1, command
from lightning_blocktrain.cli_runs import add_run_commands
from lightning_blocktrain.cli_serving import add_serving_commands, counted
from lightning_blocktrain.errors import BlockTrainError, CheckpointMismatchError, explain

LIGHTNING_COMMANDS = {
    "fit": "train a model (Lightning's command line; see 'blocktrain fit --help')",
    "validate": "run a model's validation (Lightning's command line)",
    "test": "run a model's test (Lightning's command line)",
    "predict": "run a model's predictions (Lightning's command line)",
}

EXAMPLES = """examples:
  blocktrain demo
  blocktrain demo --budget tiny --corpus 'notes/*.txt' --out demo_notes
  blocktrain fit --model ByteTransformer --data.corpus python-docs \\
      --trainer.strategy blocktrain --trainer.max_steps 100
  blocktrain fit --config run.yaml
  blocktrain evaluate demo_out/diffusion_blocks.ckpt
  blocktrain generate demo_out/byte_transformer.ckpt --prompt 'Return the ' --num-bytes 200
  blocktrain export demo_out/byte_transformer.ckpt small.ckpt --exit 1
  blocktrain serve demo_out/byte_transformer.ckpt --blocks 0
  blocktrain coordinator --state run1
  blocktrain status http://127.0.0.1:29410
"""

CONFIG_EXAMPLE = """a config file for --config, with options of the strategy:

  model: DiffusionBlocks
  data: {corpus: python-docs}
  trainer:
    max_steps: 1000
    strategy:
      class_path: lightning_blocktrain.BlockTrainStrategy
      init_args: {replicas: 2, network: mild}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: Arguments without the program's name; None: those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in LIGHTNING_COMMANDS:
            return run_lightning(arguments)
        options = build_parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except SystemExit as exc:  # a parser has said what was wrong, or has printed its help
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except KeyboardInterrupt:
        print("blocktrain: interrupted", file=sys.stderr)
        return 130
    except (BlockTrainError, MisconfigurationException, argparse.ArgumentError, ValueError) as exc:
        error = input_error(exc)
        if error is None:
            raise
        message = str(error).partition("Given value type:")[0]  # the parser repeats every argument after it
        print(f"blocktrain: error: {' '.join(message.split())}", file=sys.stderr)
        return 2


def input_error(exc: BaseException | None) -> BaseException | None:
    """Return what an error says about bad input, or None if it is a defect.

    The first of an error and its causes that is of our tree, a misconfiguration, a parser's, or a ``ValueError``
    raised by this package's own code or by the parser, which wraps or quotes what a constructor raises.
    """
    while exc is not None:
        if isinstance(exc, BlockTrainError | MisconfigurationException | argparse.ArgumentError):
            return exc
        if isinstance(exc, ValueError) and _raised_by(exc).partition(".")[0] in (
            "lightning_blocktrain",
            "jsonargparse",
        ):
            return exc
        exc = exc.__cause__ or exc.__context__
    return None


def _raised_by(exc: BaseException) -> str:
    """Return the name of the module whose code raised an error."""
    trace = exc.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")) if trace is not None else ""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the commands that are ours; Lightning's are listed in its help."""
    parser = argparse.ArgumentParser(
        prog="blocktrain",
        description="Block-local training of byte-level language models with PyTorch Lightning.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    for name, text in LIGHTNING_COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    _add_evaluate(commands)
    add_serving_commands(commands)
    add_run_commands(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = command(
        commands,
        "demo",
        "compare block training with end-to-end training, offline, in minutes",
        "Train two models block by block and two causal Transformers end to end on equal tokens; print the\n"
        "comparison and write report.json, metrics.csv, curves.png and the trained models.",
        "examples:\n  blocktrain demo\n  blocktrain demo --budget 0.5 --out demo_half\n"
        "  blocktrain demo --budget tiny --corpus 'notes/*.txt'\n",
    )
    demo.add_argument(
        "--budget", default="small", help="tiny, small, medium, or a number that scales small (default: small)"
    )
    _add_corpus(demo)
    demo.add_argument("--out", type=Path, default=Path("demo_out"), help="directory to write to (default: demo_out)")
    demo.add_argument("--seed", type=at_least_0, default=0, help="seed of every run (default: 0)")
    demo.set_defaults(run=run_demo_command)


def _add_evaluate(commands: Any) -> None:
    evaluate = command(
        commands,
        "evaluate",
        "bits per byte of a checkpoint at every exit, and all sweep quantities of DiffusionBlocks",
        "Evaluate a checkpoint of ByteTransformer or DiffusionBlocks on held-out text: the whole model, and the\n"
        "smaller ones that end after each block.",
        "example:\n  blocktrain evaluate demo_out/diffusion_blocks.ckpt --corpus python-docs --num-windows 128\n",
    )
    evaluate.add_argument("checkpoint", metavar="CKPT", type=Path, help="checkpoint file")
    _add_corpus(evaluate)
    evaluate.add_argument("--split", choices=["val", "test"], default="test", help="which split (default: test)")
    evaluate.add_argument(
        "--num-windows", type=at_least_1, default=64, help="windows, spread evenly over the split (default: 64)"
    )
    evaluate.add_argument("--batch-size", type=at_least_1, default=16, help="windows per batch (default: 16)")
    evaluate.add_argument(
        "--num-draws", type=at_least_1, help="K, draws of the starting noise, DiffusionBlocks only (default: 16)"
    )
    evaluate.add_argument("--seed", type=at_least_0, help="seed of the noise, DiffusionBlocks only (default: 0)")
    evaluate.set_defaults(run=run_evaluate)


def _add_corpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--corpus",
        default="python-docs",
        help="a named corpus, or a file, directory or quoted glob pattern (default: python-docs)",
    )


def run_demo_command(options: argparse.Namespace) -> int:
    """Run ``blocktrain demo``."""
    from lightning_blocktrain.demo import run_demo

    run_demo(options.budget, options.corpus, options.out, options.seed)
    return 0


def run_evaluate(options: argparse.Namespace) -> int:
    """Run ``blocktrain evaluate``: print bits per byte at every exit, and the sweep quantities of DiffusionBlocks."""
    from rich.console import Console

    from lightning_blocktrain.callbacks.sweep_eval import evaluate_sweep
    from lightning_blocktrain.data import ByteDataModule
    from lightning_blocktrain.demo.arms import mean_exit_nats, spaced_batches
    from lightning_blocktrain.demo.report import sweep_entries, sweep_table
    from lightning_blocktrain.models import DiffusionBlocks
    from lightning_blocktrain.models.loading import load_model

    model = load_model(options.checkpoint)
    _refuse_for_causal(model, {"--num-draws": options.num_draws, "--seed": options.seed})
    data = ByteDataModule(options.corpus, model.window_bytes, options.batch_size)
    data.setup("test" if options.split == "test" else "validate")
    loader = data.test_dataloader() if options.split == "test" else data.val_dataloader()
    batches = spaced_batches(loader.dataset, options.num_windows, options.batch_size)
    windows = [batches[idx] for idx in range(len(batches))]
    exits, num_bytes = mean_exit_nats(model, _tracked(windows))
    info, console = data.corpus_info, Console()
    corpus = f"{info.name}, {options.split} split"
    console.print(_facts(model, exits, num_bytes, corpus))
    if isinstance(model, DiffusionBlocks):
        sweep = evaluate_sweep(model, _tracked(windows), num_draws=options.num_draws or 16, seed=options.seed or 0)
        console.print("", sweep_table(sweep_entries(sweep), sweep.num_draws))
    console.print(f"sha256 of the corpus: {info.sha256}", soft_wrap=True)
    return 0


def _refuse_for_causal(model: object, options: dict[str, int | None]) -> None:
    """Refuse options that a causal model would ignore."""
    given = [name for name, value in options.items() if value is not None]
    if given and type(model).__name__ != "DiffusionBlocks":
        rule = f"{given[0]} is for DiffusionBlocks only"
        raise CheckpointMismatchError(explain(rule, f"a checkpoint of {type(model).__name__}", "leave it out"))


def _tracked(batches: Sequence[Any]) -> Iterable[Any]:
    """Return the batches under a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import track

    return track(batches, "evaluating", console=Console(stderr=True), transient=True)


def _facts(model: Any, exits: Sequence[float], num_bytes: int, corpus: str) -> Any:
    """Return the table of what holds for either model; nats per byte at every exit come in."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from lightning_blocktrain.metrics import bits_per_token

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("model")
    table.add_column(f"{type(model).__name__}, objective {model.objective}", overflow="fold")
    table.add_row("bits per byte", f"{bits_per_token(exits[-1], 1):.4f}")
    for exit_idx, nats in enumerate(exits[:-1]):
        depth = counted(model.block_slices[exit_idx].stop, "layer")
        table.add_row(f"  at exit {exit_idx + 1} ({depth})", f"{bits_per_token(nats, 1):.4f}")
    table.add_row("bytes evaluated", f"{num_bytes:,}")
    table.add_row("corpus", Text(corpus))
    return table


def run_lightning(arguments: Sequence[str]) -> int:
    """Run one of Lightning's subcommands with this package's classes known by their short names."""
    import lightning as L
    from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

    import lightning_blocktrain.callbacks
    import lightning_blocktrain.models  # noqa: F401
    from lightning_blocktrain.data import ByteDataModule

    class BlockTrainCLI(LightningCLI):
        """LightningCLI for byte-level models: checks the windows before a run and names the checkpoint after it."""

        def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
            """Parse ``args`` without Lightning's warning that the process has arguments too: they are the same."""
            assert isinstance(args, list)
            self.config = parser.parse_args(args)

        def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
            """Build the Trainer; what it refuses was configured by the user."""
            try:
                return super().instantiate_trainer(**kwargs)
            except ValueError as exc:
                raise MisconfigurationException(str(exc)) from exc

        def after_instantiate_classes(self) -> None:
            """Refuse windows that the model cannot see."""
            refuse_long_windows(self.model, self.datamodule)

        def after_fit(self) -> None:
            """Say where the weights are."""
            path = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
            if path and self.trainer.is_global_zero:
                print(f"checkpoint: {path}")

    BlockTrainCLI(
        L.LightningModule,
        ByteDataModule,
        subclass_mode_model=True,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        # Errors come back to main, which says them in one line; the parser would print all its options first.
        parser_kwargs={"prog": "blocktrain", "epilog": CONFIG_EXAMPLE, "exit_on_error": False},
        args=list(arguments),
    )
    return 0


def refuse_long_windows(model: object, datamodule: Any) -> None:
    """Refuse data with longer windows than the model has positions.

    Raises:
        MisconfigurationException: Naming both lengths.
    """
    longest = getattr(model, "window_bytes", None)
    if isinstance(longest, int) and datamodule.window_bytes > longest:
        got = f"data.window_bytes={datamodule.window_bytes}, model window_bytes={longest}"
        rule = "data.window_bytes must not exceed the model's window_bytes"
        raise MisconfigurationException(explain(rule, got, "set both to the same number"))


if __name__ == "__main__":
    sys.exit(main())
