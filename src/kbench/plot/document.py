"""The frame of a page: a document that fetches nothing and runs nothing."""

from __future__ import annotations

import html
from collections.abc import Sequence

from kbench.plot.style import STYLE

# A browser then fetches nothing, whatever a file of results might have smuggled in.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, parts: Sequence[str], style: str = "") -> str:
    """The HTML of a page. title: plain text. parts: of its body, as HTML. style: rules beside the common ones."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}{style}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
