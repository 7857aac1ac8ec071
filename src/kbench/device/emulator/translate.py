"""From a `.cu` to C++ that an ordinary compiler takes: what a header cannot do alone.

Dynamic shared memory, `extern __shared__ T name[];`, becomes a pointer. Quoted includes are written out beside the
main file, translated as well. `#line` keeps the user's file names and lines, in messages and in debug information.
The kernels that a plan names are exported by a trailer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kbench.source import Source

# Where errors of the trailer are located: a kernel name that does not instantiate.
TRAILER = "kernels named by the plan"

_DYNAMIC_SHARED = re.compile(
    r"""\bextern\s+(?:volatile\s+)?
        (?:(?:__align__|alignas)\s*\((?:[^()]|\([^()]*\))*\)\s*)?  # its alignment is that of the emulator's memory
        __shared__\s+(?:volatile\s+)?
        (?:(?:__align__|alignas)\s*\((?:[^()]|\([^()]*\))*\)\s*)?
        (?P<type>[\w:]+(?:\s*<[^;<>]*>)?(?:\s+[\w:]+)*?)\s+
        (?:(?:__align__|alignas)\s*\((?:[^()]|\([^()]*\))*\)\s*)?
        (?P<name>\w+)\s*\[\s*\]\s*;""",
    re.VERBOSE,
)
_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)
_INCLUDE = re.compile(r'^(?P<before>[ \t]*#[ \t]*include[ \t]*)"(?P<name>[^"]+)"', re.MULTILINE)


def write_translation(source: Source, kernels: Sequence[str], folder: Path) -> Path:
    """Write the translated source into `folder`; returns the file to compile."""
    names = {name: f"kbench_include_{number}.h" for number, (name, _, _) in enumerate(source.includes)}
    for name, path, text in source.includes:
        (folder / names[name]).write_text(_translate(text, path, names), encoding="utf-8", errors="surrogateescape")
    exports = "\n".join(f"EMU_KERNEL({number}, {kernel})" for number, kernel in enumerate(kernels))
    main = folder / "kernels.cpp"
    text = _translate(source.text, source.path, names)
    main.write_text(f'{text}\n#line 1 "{TRAILER}"\n{exports}\n', encoding="utf-8", errors="surrogateescape")
    return main


def _translate(text: str, path: Path, includes: dict[str, str]) -> str:
    text = _DYNAMIC_SHARED.sub(_declaration, text)
    text = _INCLUDE.sub(lambda match: f'{match["before"]}"{includes.get(match["name"], match["name"])}"', text)
    return f'#line 1 "{_quoted(path)}"\n{text}'


def _declaration(match: re.Match[str]) -> str:
    element, name = match["type"], match["name"]
    if "volatile" in match[0] and "volatile" not in element:
        element = f"volatile {element}"
    lines = "\n" * match[0].count("\n")  # a declaration over two lines must not move what follows
    if _inside_function(match.string[: match.start()]):
        return f"{element}* {name} = ({element}*)EMU_DYNAMIC_SHARED;{lines}"
    # Outside there is no block yet whose memory it could point to: it becomes another name of the runtime's pointer.
    visible = '__attribute__((visibility("default")))'
    return f'extern {visible} EMU_THREAD_LOCAL {element}* {name} asm("emu_dynamic_shared");{lines}'


def _inside_function(before: str) -> bool:
    """Whether a brace other than a namespace's is open at the end of `before`."""
    code = _NO_CODE.sub(_keep_linkage, before)
    open_braces: list[bool] = []
    for token in re.findall(r'(?:\bnamespace\b[\s\w:]*|\bextern\s*"C"\s*)\{|[{}]', code):
        if token == "}":
            del open_braces[-1:]
        else:
            open_braces.append(token == "{")
    return any(open_braces)


def _keep_linkage(match: re.Match[str]) -> str:
    return match[0] if match[0] == '"C"' else " "


def _quoted(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')
