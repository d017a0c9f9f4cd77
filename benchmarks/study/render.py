"""A report as Markdown and as one HTML page that needs nothing else: no script, no request, any width."""

import base64
import html
from collections.abc import Sequence

from benchmarks.study.report import Block, Folded, Heading, Items, Picture, Table, Text

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { line-height: 1.2; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { border-bottom: 1px solid #8886; padding: .3rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; margin: 1rem 0; }
figure { margin: 1.5rem 0; }
figure img { max-width: min(100%, 46rem); height: auto; background: #fff; }
figcaption { font-size: .9rem; opacity: .8; }
pre { overflow-x: auto; font-size: .8rem; }
strong { color: #b3261e; }
@media (prefers-color-scheme: dark) { strong { color: #ff8a80; } }
"""


def markdown(blocks: Sequence[Block]) -> str:
    """Return the report as Markdown; its figures lie in ``figures/``."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Text(text, is_strong):
            return f"**{text}**" if is_strong else text
        case Items(items):
            return "\n".join(f"* {item}" for item in items)
        case Table(columns, rows):
            lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
            return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        case Picture(name, caption, _):
            return f"![{caption}](figures/{name}.svg)"
        case Folded(title, text):
            return f"<details><summary>{title}</summary>\n\n```\n{text}\n```\n\n</details>"


def page(title: str, blocks: Sequence[Block]) -> str:
    """Return the report as HTML with its figures inside."""
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
    )
    return head + "\n".join(map(_html, blocks)) + "\n</main>\n</body>\n</html>\n"


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Text(text, is_strong):
            inside = html.escape(text)
            return f"<p><strong>{inside}</strong></p>" if is_strong else f"<p>{inside}</p>"
        case Items(items):
            return "<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>"
        case Table(columns, rows):
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in columns)
            body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>" for cells in rows)
            table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            return f'<div class="wide" tabindex="0">{table}</div>'
        case Picture(_, caption, svg):
            # An image, not inline: what one picture names cannot meet the names of another.
            source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
            shown = html.escape(caption)
            return f'<figure><img src="{source}" alt="{shown}"><figcaption>{shown}</figcaption></figure>'
        case Folded(title, text):
            return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"
