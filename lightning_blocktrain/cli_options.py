"""What the parsers of all commands share."""

import argparse
import math
from typing import Any


def command(commands: Any, name: str, summary: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Add a command to a parser's subcommands and return its own parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def at_least_0(text: str) -> int:
    """Return a whole number of at least 0."""
    return _whole_number(text, 0)


def at_least_1(text: str) -> int:
    """Return a whole number of at least 1."""
    return _whole_number(text, 1)


def block_numbers(text: str) -> tuple[int, ...]:
    """Return different numbers of blocks that commas separate; no text: none."""
    blocks = tuple(at_least_0(part) for part in text.split(",")) if text else ()
    if len(set(blocks)) < len(blocks):
        raise argparse.ArgumentTypeError(f"{text!r} names a block twice")
    return blocks


def _whole_number(text: str, minimum: int) -> int:
    if not text.isascii() or not text.isdecimal() or not minimum <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number in {minimum} .. 2**63 - 1")
    return int(text)


def seconds(text: str) -> float:
    """Return a finite number of seconds above 0."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def above_0(text: str) -> float:
    """Return a finite number above 0."""
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def speed(text: str) -> float:
    """Return a speed between a thousandth of its unit and a million times it."""
    value = number(text)
    if not 1e-3 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number in 0.001 .. 1000000")
    return value


def from_0(text: str) -> float:
    """Return a finite number of at least 0."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def number(text: str) -> float:
    """Return a number, NaN where the text is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
