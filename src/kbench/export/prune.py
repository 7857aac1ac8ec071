"""Device code of one version: its source with the includes in place, and of that the declarations that it needs.

The text is cut into top-level declarations, each with the comment above it. Those stay whose names the kernels mention,
directly or through others. What cannot be told apart with certainty stays: too much compiles, too little does not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kbench.errors import UsageError
from kbench.source import Source

_QUOTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)".*$', re.MULTILINE)
_HEADER = re.compile(r'#[ \t]*include[ \t]*(<[^>]+>|"[^"]+")')
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n?", re.MULTILINE)
_GUARD = re.compile(r"\s*#\s*ifndef\s+(\w+)\s*\n\s*#\s*define\s+\1\b")
_COMMENT = r"//(?:\\\n|[^\n])*|/\*.*?\*/"
_LITERAL = r'R"(?P<d>[^()\\\s]{0,16})\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
# An apostrophe inside a number separates digits and begins no literal.
_TOKEN = re.compile(
    rf"(?P<comment>{_COMMENT})|(?P<literal>{_LITERAL})|(?P<directive>(?<![^\n])[ \t]*\#(?:\\\n|/\*.*?\*/|(?!//)[^\n])*)"
    r"|(?P<word>[A-Za-z_]\w*)|(?P<number>\.?\d(?:[\w.]|'\w)*)|(?P<space>\s+)|(?P<mark>.)",
    re.DOTALL,
)
_WORD = re.compile(r"[A-Za-z_]\w*")
_CONDITION = re.compile(r"[ \t]*#[ \t]*(if|ifdef|ifndef|endif)\b")

# Words in front of a name that take parentheses of their own and are not it.
_ATTRIBUTES = {
    "__launch_bounds__", "__align__", "alignas", "__attribute__", "__maxnreg__", "__cluster_dims__", "__block_size__",
    "decltype", "noexcept", "explicit",
}  # fmt: skip
_CLASSES = {"struct", "class", "union", "enum"}
# Words that declarations are made of, and that name nothing of a file's own.
_KEYWORDS = frozenset({
    "alignas", "auto", "bool", "char", "class", "const", "constexpr", "decltype", "double", "enum", "explicit",
    "extern", "final", "float", "friend", "inline", "int", "long", "mutable", "namespace", "private", "protected",
    "public", "register", "restrict", "short", "signed", "static", "struct", "template", "thread_local", "typedef",
    "typename", "union", "unsigned", "using", "virtual", "void", "volatile", "wchar_t", "__constant__", "__device__",
    "__forceinline__", "__global__", "__grid_constant__", "__host__", "__inline__", "__launch_bounds__",
    "__managed__", "__noinline__", "__restrict__", "__shared__", "size_t",
})  # fmt: skip
# What begins a declaration whose names are not looked for: it always stays.
_ALWAYS = {"namespace", "extern", "static_assert", "asm", "operator"}


@dataclass(frozen=True)
class Part:
    """A top-level declaration, directive or group of #if. text: with the comment above it. names: what it declares;
    None where that is not known. words: the identifiers in it. apart: an empty line stood above it."""

    text: str
    names: frozenset[str] | None
    words: frozenset[str]
    apart: bool


def device_code(source: Source, kernels: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """What `kernels` (name expressions) need of `source`: system headers in order, and the text.

    Raises UsageError where files include one another in a circle.
    """
    parts = _parts(expand(source))
    headers: dict[str, None] = {}
    rest: list[Part] = []
    for part in parts:
        header = _HEADER.fullmatch(_without_comments(part.text).strip())
        if header:
            headers.setdefault(header[1])
        else:
            rest.append(part)
    kept = needed(rest, kernels)
    lines = [("\n" if part.apart and i else "") + part.text.strip("\n") for i, part in enumerate(kept)]
    return tuple(headers), "\n".join(lines) + "\n"


def expand(source: Source) -> str:
    """The text with its quoted includes in place, each as often as a compiler would read it. An include that is not
    among the source's own is left alone: a header of CUDA."""
    texts = {name: text for name, _, text in source.includes}
    seen: set[str] = set()

    def body(name: str, text: str, inside: tuple[str, ...]) -> str:
        once = _ONCE.search(text) is not None or _GUARD.match(_without_comments(text)) is not None

        def replaced(match: re.Match[str]) -> str:
            included = match[1]
            if included not in texts:
                return match[0]
            if included in seen:
                return ""
            if included in inside:
                raise UsageError(f"{source.path} cannot be exported: {included} includes itself")
            return body(included, texts[included], (*inside, included))

        if once and name:
            seen.add(name)
        return _QUOTED.sub(replaced, _ONCE.sub("", text).rstrip() + "\n")

    return body("", source.text, ())


# --------------------------------------------------------------------------------------------- parts


@functools.lru_cache(maxsize=8)
def _parts(text: str) -> tuple[Part, ...]:
    return tuple(split(text))


def split(text: str) -> Iterator[Part]:
    """The parts of a C++ text, in order. A group from #if to #endif is one part, whatever it holds."""
    tokens = [(match.lastgroup or "", match[0]) for match in _TOKEN.finditer(text)]
    # The group inside a raw literal is no kind of token.
    tokens = [("literal" if kind == "d" else kind, piece) for kind, piece in tokens]
    start = 0
    while start < len(tokens):
        end = _end_of_part(tokens, start)
        if end is None:  # braces that close in another branch of an #if: all of the rest stays as it is
            rest = "".join(piece for _, piece in tokens[start:])
            yield Part(rest, None, frozenset(_WORD.findall(rest)), True)
            return
        end = _with_comment_behind(tokens, end)
        piece = tokens[start:end]
        # Comments of a section or a file that stand apart are not the next declaration's.
        lead = _own_comment(piece)
        above = "".join(text for kind, text in piece[: lead + 1] if kind == "space")
        yield from _part(piece[lead:], above.count("\n") > 1)
        start = end


def _with_comment_behind(tokens: list[tuple[str, str]], end: int) -> int:
    """A comment on the last line of a declaration is its own."""
    at = end
    if at < len(tokens) and tokens[at][0] == "space" and "\n" not in tokens[at][1]:
        at += 1
    return at + 1 if at < len(tokens) and tokens[at][0] == "comment" else end


def _end_of_part(tokens: list[tuple[str, str]], start: int) -> int | None:
    """Behind the part that begins at `start`; None where its braces do not match."""
    depth = conditions = 0
    head: list[str] = []  # up to the first brace
    begun = in_body = False
    for at in range(start, len(tokens)):
        kind, piece = tokens[at]
        if kind in ("comment", "space") or (kind == "directive" and begun):
            continue
        if kind == "directive":
            change = _CONDITION.match(piece)
            if change:
                conditions += -1 if change[1] == "endif" else 1
            if conditions <= 0:
                return at + 1
        if kind == "directive" or conditions:
            continue
        begun = True
        depth += (piece in ("(", "[", "{")) - (piece in (")", "]", "}"))
        if depth < 0:
            return None
        in_body = in_body or (piece == "{" and depth == 1)
        if not in_body:
            head.append(piece)
        if depth == 0 and kind == "mark":
            after = next((text for other, text in tokens[at + 1 :] if other not in ("comment", "space")), "")
            # A brace, or a comma, follows the initialiser of a member.
            if piece == "}" and after not in ("{", ",", ";") and _ends_with_brace(head):
                return at + 1
            if piece == ";":
                return at + 1
    return len(tokens) if depth == 0 else None


def _ends_with_brace(head: list[str]) -> bool:
    """Whether a declaration ends with the brace that closes its body: a function or a namespace, no class, no
    initialiser (which a semicolon follows)."""
    words = _without_attributes(_without_template(head))
    if "(" in words and "operator" not in words:
        return "=" not in words[: words.index("(")]
    return "operator" in words or words[:1] == ["namespace"] or words[:1] == ["extern"]


def _own_comment(piece: list[tuple[str, str]]) -> int:
    """Where the comment begins that belongs to a declaration: no empty line lies between them."""
    begin = next((i for i, (kind, _) in enumerate(piece) if kind not in ("comment", "space")), len(piece))
    own = begin
    for i in range(begin - 1, -1, -1):
        kind, text = piece[i]
        if kind == "space" and text.count("\n") > 1:
            break
        own = i
    return own if begin < len(piece) else len(piece)


def _part(piece: list[tuple[str, str]], apart: bool) -> Iterator[Part]:
    text = "".join(text for _, text in piece)
    if not text.strip():
        return
    words = {text for kind, text in piece if kind == "word"}
    for kind, text_of in piece:
        if kind == "directive":
            words |= set(_WORD.findall(text_of))
    names = None if any(kind == "directive" for kind, _ in piece[: _first_word(piece)]) else _names(piece)
    yield Part(text, names, frozenset(words), apart)


def _first_word(piece: list[tuple[str, str]]) -> int:
    return next((i for i, (kind, _) in enumerate(piece) if kind == "word"), len(piece))


def _names(piece: list[tuple[str, str]]) -> frozenset[str] | None:
    code = [text for kind, text in piece if kind not in ("comment", "space", "directive")]
    words = _without_template(code)
    if not words or (words[0] in _ALWAYS and "__shared__" not in words) or "operator" in words:
        return None
    if words[0] in ("using", "typedef"):
        return None if words[1:2] == ["namespace"] else _own(words)
    head = _head(words)
    if "(" in head:
        before = head[: head.index("(")]
        # Before parentheses that belong to a macro's use stands what is not known.
        return _own(_qualified(before)) if len(before) > 1 else None
    if any(word in _CLASSES for word in head):
        # Enumerators are names as well; members do no harm.
        return _own(words if "enum" in head else _outside_braces(words))
    return _own(head)


def _own(words: Iterable[str]) -> frozenset[str] | None:
    """The names among words; None without any."""
    return frozenset(word for word in words if _WORD.fullmatch(word)) - _KEYWORDS or None


def _qualified(before: list[str]) -> Iterator[str]:
    """`A` and `f` of `void A::f`, `f` of `void f<int>`."""
    words = [*before]
    if words and words[-1] == ">":
        depth = 0
        while words:
            last = words.pop()
            depth += {">": 1, "<": -1}.get(last, 0)
            if depth == 0:
                break
    while words and _WORD.fullmatch(words[-1]):
        yield words.pop()
        if words[-2:] != [":", ":"]:
            return
        del words[-2:]


def _head(words: list[str]) -> list[str]:
    """Up to the body, the initialiser or the parameters, without attributes."""
    head: list[str] = []
    for word in _without_attributes(words):
        if word in ("{", "=", ";", "["):
            break
        head.append(word)
        if word == "(":
            break
    return head


def _without_attributes(words: list[str]) -> list[str]:
    kept: list[str] = []
    at = 0
    while at < len(words):
        if words[at] in _ATTRIBUTES and words[at + 1 : at + 2] == ["("]:
            at = _closing(words, at + 1) + 1
        else:
            kept.append(words[at])
            at += 1
    return kept


def _outside_braces(words: list[str]) -> Iterator[str]:
    """Of a class its name, what it derives from, and the variables that it declares."""
    depth = 0
    for word in words:
        depth += {"{": 1, "}": -1}.get(word, 0)
        if depth == 0:
            yield word


def _closing(words: list[str], opening: int) -> int:
    depth = 0
    for at in range(opening, len(words)):
        depth += {"(": 1, ")": -1}.get(words[at], 0)
        if depth == 0:
            return at
    return len(words) - 1


def _without_template(words: list[str]) -> list[str]:
    """Without `template <...>` and attributes in front."""
    words = [*words]
    while words[:1] == ["template"] and words[1:2] == ["<"]:
        words = words[_closing_angle(words) + 1 :]
    while words and words[0] in _ATTRIBUTES and words[1:2] == ["("]:
        words = words[_closing(words, 1) + 1 :]
    return words


def _closing_angle(words: list[str]) -> int:
    """The end of the template parameters that begin at 1; what stands in parentheses may compare."""
    depth = parentheses = 0
    for at in range(1, len(words)):
        parentheses += {"(": 1, ")": -1}.get(words[at], 0)
        if not parentheses:
            depth += {"<": 1, ">": -1}.get(words[at], 0)
        if depth == 0:
            return at
    return len(words) - 1


def _without_comments(text: str) -> str:
    return re.sub(_COMMENT, " ", text, flags=re.DOTALL)


# --------------------------------------------------------------------------------------------- what stays


def needed(parts: list[Part], kernels: Iterable[str]) -> list[Part]:
    """Those of `parts` that the kernels need, in order, and those whose names are not known."""
    kept = {i for i, part in enumerate(parts) if part.names is None}
    wanted = {word for kernel in kernels for word in _WORD.findall(kernel)}
    for i in kept:
        wanted |= parts[i].words
    while True:
        more = {i for i, part in enumerate(parts) if i not in kept and part.names is not None and part.names & wanted}
        if not more:
            return [parts[i] for i in sorted(kept)]
        kept |= more
        for i in more:
            wanted |= parts[i].words
