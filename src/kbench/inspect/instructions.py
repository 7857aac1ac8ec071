"""The instructions of a kernel by class, counted in the text of its PTX.

A static count: how often an instruction stands in the code, not how often it runs. PTX is what the compiler's front
end made; the assembler still merges, splits and drops instructions on the way to machine code, so compare versions by
it rather than read it as a cost. Of functions that were not inlined only the calls count.
Opcodes, types and state spaces: the PTX ISA's chapters on instructions and types.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

# In the order in which they are shown. Accesses to memory carry their width behind the name: "global loads, 128 bits".
GROUPS = {
    "memory": (
        "global loads",
        "global stores",
        "shared loads",
        "shared stores",
        "generic loads",
        "generic stores",
        "local loads",
        "local stores",
        "constant loads",
        "parameter loads",
        "parameter stores",
        "matrix loads and stores",
        "async copies",
        "waits for async copies",
        "prefetches",
    ),
    "exchange": (
        "global atomics",
        "shared atomics",
        "generic atomics",
        "shuffles",
        "votes and warp reductions",
        "block barriers",
        "warp barriers",
        "memory barriers",
        "fences",
    ),
    "arithmetic": (
        "tensor core",
        "fp32 multiply-adds",
        "fp32 other",
        "fp16 and bf16 multiply-adds",
        "fp16 and bf16 other",
        "fp64",
        "special functions",
        "conversions",
        "integer",
        "integer divisions",
    ),
    "control": ("comparisons and selections", "branches", "convergence", "calls", "moves", "other"),
}

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_LABEL = re.compile(r"[\w$]+\s*:(?!:)")
_PREDICATE = re.compile(r"@!?%?\w+\s+")
# Directives that end with their line and not with a semicolon.
_LINE_DIRECTIVE = re.compile(r"^\s*\.(?:loc|file|section)\b[^\n]*$", re.MULTILINE)
_TYPE = re.compile(r"(?:[bsuf]|bf|tf|e\dm)(\d+)(x\d)?")

_SPECIAL = {"rcp", "rsqrt", "sqrt", "ex2", "lg2", "sin", "cos", "tanh"}
_COMPARE = {"setp", "set", "selp", "slct", "testp"}
_VOTES = {"vote", "match", "redux", "activemask", "elect"}
_BRANCHES = {"bra", "brx"}
_MOVES = {"mov", "cvta", "isspacep", "mapa", "getctarank"}
_OTHER = {"ret", "exit", "trap", "brkpt", "nanosleep", "pmevent", "griddepcontrol", "setmaxnreg", "createpolicy"}
_SPACES = {"global": "global", "shared": "shared", "local": "local", "const": "constant", "param": "parameter"}


def instruction_mix(ptx: str) -> dict[str, dict[str, int]]:
    """By the lowered name of each kernel in `ptx`: class to count, classes in the order of GROUPS."""
    text = _LINE_DIRECTIVE.sub("", _COMMENT.sub(" ", ptx))
    bodies = {match[1]: _body(text, match.end()) for match in _ENTRY.finditer(text)}
    return {name: in_order(Counter(_class(opcode) for opcode in _opcodes(body))) for name, body in bodies.items()}


def group_of(name: str) -> str:
    """The group of GROUPS that a class belongs to."""
    plain = name.partition(",")[0]
    return next(group for group, names in GROUPS.items() if plain in names)


def in_order(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts of classes in the order of GROUPS, wide accesses first."""
    order = [name for names in GROUPS.values() for name in names]

    def place(name: str) -> tuple[int, int]:
        plain, _, width = name.partition(", ")
        return order.index(plain), -int(width.split()[0]) if width else 0

    return {name: counts[name] for name in sorted(counts, key=place)}


def _body(text: str, start: int) -> str:
    """What stands between the braces of the kernel whose name ends at `start`."""
    opened = text.find("{", start)
    depth = 0
    for at in range(opened, len(text)) if opened >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[opened + 1 : at]
    return ""


def _opcodes(body: str) -> Iterator[str]:
    """The opcode with its modifiers, "ld.global.v4.f32", of each instruction."""
    for statement in body.split(";"):
        rest = statement.lstrip("{} \t\r\n")
        while match := _LABEL.match(rest):
            rest = rest[match.end() :].lstrip("{} \t\r\n")
        if match := _PREDICATE.match(rest):
            rest = rest[match.end() :].lstrip()
        if rest and not rest.startswith("."):
            yield rest.split(None, 1)[0]


def _class(opcode: str) -> str:
    name, *modifiers = opcode.split(".")
    plain = [modifier.partition("::")[0] for modifier in modifiers]
    return _of_memory(name, plain) or _of_threads(name, plain) or _of_control(name) or _of_arithmetic(name, plain)


def _of_memory(name: str, modifiers: list[str]) -> str:
    match name:
        case "ld" | "ldu":
            return f"{_space(modifiers)} loads, {_bits(modifiers)} bits"
        case "st":
            return f"{_space(modifiers)} stores, {_bits(modifiers)} bits"
        case "ldmatrix" | "stmatrix" | "movmatrix":
            return "matrix loads and stores"
        case "wmma" if modifiers[:1] != ["mma"]:
            return "matrix loads and stores"
        case "cp" if any(part in ("commit_group", "wait_group", "wait_all") for part in modifiers):
            return "waits for async copies"
        case "cp":
            return "async copies"
        case "prefetch" | "prefetchu" | "applypriority" | "discard":
            return "prefetches"
    return ""


def _of_threads(name: str, modifiers: list[str]) -> str:
    match name:
        case "atom" | "red":
            space = _space(modifiers)
            return f"{space} atomics"
        case "shfl":
            return "shuffles"
        case "bar" | "barrier":
            return "warp barriers" if modifiers[:1] == ["warp"] else "block barriers"
        case "mbarrier":
            return "memory barriers"
        case "membar" | "fence":
            return "fences"
    return "votes and warp reductions" if name in _VOTES else ""


def _of_control(name: str) -> str:
    if name in _COMPARE:
        return "comparisons and selections"
    if name in _BRANCHES:
        return "branches"
    if name in _MOVES:
        return "moves"
    if name in _OTHER:
        return "other"
    return "calls" if name == "call" else ""


def _of_arithmetic(name: str, modifiers: list[str]) -> str:
    if name in ("mma", "wmma") or (name in ("wgmma", "tcgen05") and modifiers[:1] in (["mma_async"], ["mma"])):
        return "tensor core"
    if name == "cvt":
        return "conversions"
    kind = modifiers[-1] if modifiers else ""
    if name in ("div", "rem"):
        return "special functions" if kind.startswith("f") else "integer divisions"
    if name in _SPECIAL:
        return "special functions"
    added = name in ("fma", "mad")
    if kind in ("f32", "f32x2"):
        return "fp32 multiply-adds" if added else "fp32 other"
    if kind in ("f16", "f16x2", "bf16", "bf16x2"):
        return "fp16 and bf16 multiply-adds" if added else "fp16 and bf16 other"
    if kind == "f64":
        return "fp64"
    if kind == "pred":  # and, or, not of what comparisons left
        return "comparisons and selections"
    return "integer" if _TYPE.fullmatch(kind) else "other"


def _space(modifiers: list[str]) -> str:
    return next((_SPACES[part] for part in modifiers if part in _SPACES), "generic")


def _bits(modifiers: list[str]) -> int:
    """The width of one thread's access."""
    vector = next((int(part[1:]) for part in modifiers if part in ("v2", "v4", "v8")), 1)
    match = _TYPE.fullmatch(modifiers[-1]) if modifiers else None
    if match is None:
        return 0
    return vector * int(match[1]) * (int(match[2][1:]) if match[2] else 1)
