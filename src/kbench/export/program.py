"""The text of an exported program: kernels first, then the plan, what checks and times it, and the data last."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from kbench import __version__
from kbench.catalog import kernel_folder
from kbench.export.inputs import Packed
from kbench.export.outputs import Answer
from kbench.export.plan import ELEMENT_TYPES, PlanCode, plan_code
from kbench.export.problem import Data, Subject
from kbench.export.prune import device_code
from kbench.family import Tensor, kernels_of
from kbench.source import load_source

# What every exported program begins with: such a file may be replaced by the next export.
MARK = "// Exported by kbench"
_WIDTH = 118  # columns of comments, as of the kernels
_DIGITS = 112  # of data, on one line: whole words of every size

_HOST_HEADERS = (
    "algorithm", "cmath", "cstdint", "cstdio", "cstdlib", "cstring", "limits", "string", "type_traits", "vector",
)  # fmt: skip
_RULE = "// " + "=" * (_WIDTH - 3)


def program(subject: Subject, data: Data, name: str, command: str) -> str:
    """The program's text. name: of the file, without .cu. command: that exports it again."""
    code = plan_code(subject.plan, subject.tensors)
    headers, kernels = _kernels(subject)
    parts = [
        _head(subject, data, code, name, command),
        _includes(headers, code),
        _section("The kernels.", kernels) if kernels else "",
        _section("How kernels are launched.", _text("launching.cu")),
        _text("filling.cu") if code.fills else "",
        _text("multiplying.cu") if code.gemms else "",
        _section("Tensors on the GPU, and the plan.", _plan(subject, code)),
        _section("What checks the results.", _text("judging.cu")),
        _section("What times the plan.", _text("timing.cu")),
        _main(subject),
        _section("Inputs and expected results.", _data(subject.tensors, data, code)),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)


def _kernels(subject: Subject) -> tuple[tuple[str, ...], str]:
    kernels = kernels_of(subject.plan)
    if not kernels:
        return (), ""
    source = load_source(Path(subject.family.sources[subject.version.number]), (kernel_folder(),))
    return device_code(source, kernels)


def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _section(title: str, text: str) -> str:
    return f"{_RULE}\n// {title}\n{_RULE}\n\n{text}"


# --------------------------------------------------------------------------------------------- what it says of itself


def build_command(subject: Subject, name: str) -> str:
    """How the program is built."""
    library = " -lcublasLt" if any(type(step).__name__ == "Gemm" for step in subject.plan) else ""
    file = shlex.quote(f"{name}.cu")
    return f"nvcc -O3 -std=c++17 -arch={subject.arch} {file} -o {shlex.quote(name)}{library}"


def _head(subject: Subject, data: Data, code: PlanCode, name: str, command: str) -> str:
    card = subject.architecture
    inputs = (
        "Large inputs consist of few different rows in random order, so that they fit in here."
        if data.repeating
        else "The inputs are those that `kbench run` draws from this seed."
    )
    sampled = [name for name, answer in data.outputs.items() if answer.places]
    compared = f" Of {', '.join(sampled)} some elements are compared, not all." if sampled else ""
    lines = [
        *_comment(f"{MARK.removeprefix('// ')} {__version__}: {subject.name}, {subject.version.idea}"),
        "//",
        *_comment(f"problem  {subject.problem}, {subject.problem.dtype}, block size {subject.place}", "         "),
        *_comment(f"plan     as for {card.card} with {card.multiprocessors} multiprocessors", "         "),
        *_comment(f"build    {build_command(subject, name)}", "         "),
        *_comment(f"run      ./{shlex.quote(name)} [--check-only] [--hot] [--samples N]", "         "),
        *_comment("status   0 right, 1 wrong, 2 CUDA error or wrong use", "         "),
        *_comment(f"again    {command}", "         "),
        "//",
        *_comment(inputs + compared),
    ]
    return "\n".join(lines)


def _comment(text: str, indent: str = "") -> list[str]:
    # A line that ends in a backslash would take the next one along.
    lines = textwrap.wrap(
        " ".join(text.replace("\\", "/").split(" ")), _WIDTH - 3, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [f"// {line}" for line in lines]


def _includes(headers: Sequence[str], code: PlanCode) -> str:
    libraries = ["<cublasLt.h>"] if code.gemms else []
    lines = [
        f"#include {header}" for header in dict.fromkeys(["<cuda_runtime.h>", *_types(code), *headers, *libraries])
    ]
    return "\n".join([*lines, "", *(f"#include <{header}>" for header in _HOST_HEADERS)])


def _types(code: PlanCode) -> list[str]:
    """Headers of the 16-bit types: pointers have them even where no kernel does."""
    return ["<cuda_bf16.h>", "<cuda_fp16.h>"]


# --------------------------------------------------------------------------------------------- plan


def _plan(subject: Subject, code: PlanCode) -> str:
    pointers = [
        f"static {ELEMENT_TYPES[tensor.dtype]}* {code.pointers[tensor.name]} = nullptr;  // {_described(tensor)}"
        for tensor in subject.tensors
    ]
    prepare = _function("static void prepare_plan()", code.prepare, "Once, before the first run.")
    run = _function("static void run_plan([[maybe_unused]] cudaStream_t stream)", code.run, "")
    return "\n".join([*pointers, *code.globals, "", prepare, "", run])


def _described(tensor: Tensor) -> str:
    role = {"in": "input", "out": "output", "inout": "output with start values", "scratch": "scratch"}[tensor.role]
    shape = " x ".join(map(str, tensor.shape)) or "1"
    return f"{role}, {shape}" + (f" ({', '.join(tensor.axes)})" if tensor.axes else "")


def _function(head: str, body: Sequence[str], comment: str) -> str:
    lines = [wrapped for line in body for wrapped in _statement(line)]
    return "\n".join([*([f"// {comment}"] if comment else []), f"{head} {{", *lines, "}"])


def _statement(text: str) -> list[str]:
    """A statement inside a function, on as many lines as it takes."""
    if "\n" in text:
        return [f"    {line}" for line in text.split("\n")]
    return textwrap.wrap(
        text, _WIDTH, initial_indent="    ", subsequent_indent="    " + " " * (1 + text.find("(")),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _main(subject: Subject) -> str:
    call = f"return exported::run_program(count, words, prepare_plan, run_plan, {len(subject.plan)});"
    return f"int main(int count, char** words) {{\n    {call}\n}}"


# --------------------------------------------------------------------------------------------- data


def _data(tensors: Sequence[Tensor], data: Data, code: PlanCode) -> str:
    strings: list[str] = []
    inputs, outputs, scratches = [], [], []
    for tensor in tensors:
        pointer = code.pointers[tensor.name]
        place = f"reinterpret_cast<void**>(&{pointer})"
        if tensor.name in data.inputs:
            inputs.append(_input(tensor, data.inputs[tensor.name], pointer, place, strings))
        if tensor.name in data.outputs:
            outputs.append(_output(tensor, data.outputs[tensor.name], pointer, place, strings))
        if tensor.role == "scratch":
            scratches.append(f"{{{max(tensor.nbytes, 1)}, {place}}}")
    return "\n".join(
        [
            "namespace exported {",
            "",
            *strings,
            _table("std::vector<Input> inputs", inputs),
            _table("std::vector<Output> outputs", outputs),
            _table("std::vector<Scratch> scratches", scratches),
            "",
            "}  // namespace exported",
        ]
    )


def _table(name: str, entries: Iterable[str]) -> str:
    rows = [f"    {entry}," for entry in entries]
    return "\n".join([f"const {name} = {{", *rows, "};"]) if rows else f"const {name} = {{}};"


def _input(tensor: Tensor, packed: Packed, pointer: str, place: str, strings: list[str]) -> str:
    words = _strings(f"{pointer[2:]}_words", packed.words, strings)
    rows = _strings(f"{pointer[2:]}_rows", packed.rows, strings)
    pieces = _strings(f"{pointer[2:]}_pieces", packed.pieces, strings)
    changes = "true" if tensor.role == "inout" else "false"
    return (
        f"{{{_quoted(tensor.name)}, {tensor.dtype}, {tensor.count}, {place}, {changes}, {words}, {packed.row}, "
        f"{packed.piece}, {rows}, {pieces}}}"
    )


def _output(tensor: Tensor, answer: Answer, pointer: str, place: str, strings: list[str]) -> str:
    bounds = _strings(f"{pointer[2:]}_bounds", answer.bounds, strings)
    places = _strings(f"{pointer[2:]}_places", answer.places, strings)
    shape = ", ".join(map(str, tensor.shape or (1,)))
    flags = f"{'true' if answer.exact else 'false'}, {'true' if answer.whole else 'false'}"
    return (
        f"{{{_quoted(tensor.name)}, {tensor.dtype}, {tensor.count}, {place}, {flags}, {{{shape}}}, {bounds}, {places}}}"
    )


def _strings(name: str, text: str, strings: list[str]) -> str:
    """Add the digits as an array of lines, and return its name; "nullptr" for none."""
    if not text:
        return "nullptr"
    lines = [f'    "{text[at : at + _DIGITS]}",' for at in range(0, len(text), _DIGITS)]
    strings.append("\n".join([f"static const char* const {name}[] = {{", *lines, "    nullptr,", "};"]))
    return name


def _quoted(text: str) -> str:
    escaped = "".join(c if c.isascii() and c.isprintable() and c not in '"\\?' else "_" for c in text)
    return f'"{escaped}"'
