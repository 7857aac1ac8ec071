"""`kbench plot`: what the page of a run shows, that it needs nothing else, and what is said where there is no page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fakes import failed, make_row, measured
from kbench.ceilings import Ceilings
from kbench.cli import plot
from kbench.cli.app import run_command
from kbench.cli.plot import require_page_writable
from kbench.errors import Exit
from kbench.plot.charts import HEIGHT, WIDTH
from kbench.plot.contest import contests
from kbench.plot.page import page
from kbench.results.schema import Row
from kbench.results.store import RunWriter, read_run

CARD = Ceilings(4000.0, "a kernel", 2 << 30, {"fp32": 50.0, "bf16": 800.0}, 8192, ("a note on the card",))
VOID = {"meta", "link", "img", "br", "hr", "input"}


def sweep(folder: Path, rows: Sequence[Row], ceilings: Ceilings | None = CARD, name: str = "Test GPU") -> Path:
    device: dict[str, Any] = {"name": name, "arch": "sm_90", "driver": "580.1", "compiler": "NVRTC 13.0"}
    if ceilings is not None:
        device["ceilings"] = ceilings.to_dict()
    command = ["kbench", "sweep", "toy"]
    with RunWriter(folder, device=device, command=command, options={}, kbench_version="1") as run:
        for row in rows:
            run.append(row)
    return run.path


def drawn(folder: Path, rows: Sequence[Row], **more: Any) -> str:
    run = read_run(sweep(folder, rows, **more))
    return page(run, contests(run))


def two_families() -> list[Row]:
    return [
        *(make_row(1, block=block, median_ms=ms) for block, ms in ((32, 9.0), (64, 8.0), (128, 8.5))),
        *(make_row(2, block=block, median_ms=ms) for block, ms in ((32, 0.5), (64, 0.4), (128, 0.402))),
        failed(3, block=32, reason="out: 3 of 4096 elements wrong"),
        failed(3, block=64, status="refused", reason="needs N above 64"),
        make_row(1, family="copy", block=64, median_ms=1.0, traffic=2e9),
        make_row(1, family="gemm", block=64, median_ms=1.0, traffic=1e9, flops=40e9),
    ]


class Outline(HTMLParser):
    """Tags that are open, whether each was closed in its turn, and what every tag refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.crossed: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def pictures(text: str) -> dict[str, ElementTree.Element]:
    """The SVG elements of a page by their label; each has to be well-formed XML."""
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    return {picture.get("aria-label", ""): picture for picture in found}


def items(text: str, kind: str) -> list[str]:
    """The words of each <li> of a list of a class."""
    lists = re.findall(rf'<ul class="{kind}">(.*?)</ul>', text, re.DOTALL)
    found = [item for text in lists for item in re.findall("<li.*?</li>", text)]
    return [" ".join(html.unescape(re.sub("<[^>]*>", " ", item)).split()).replace(" :", ":") for item in found]


# --------------------------------------------------------------------------------------------- the page


def test_a_page_is_well_formed_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    text = drawn(tmp_path, two_families())
    outline = Outline(text)
    assert not outline.open and not outline.crossed
    links = [value for _, name, value in outline.attributes if name in ("href", "src", "srcset", "data", "action")]
    places = {f"#{value}" for _, name, value in outline.attributes if name == "id"}
    assert links and set(links) <= places
    assert not re.search(r"//|url\(|@import|<script|<link|<iframe|<img", text.removeprefix("<!DOCTYPE html>"))
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_every_family_has_its_pictures_and_the_run_its_summary(tmp_path: Path) -> None:
    text = drawn(tmp_path, two_families())
    assert list(pictures(text)) == [
        "roofline of the run",
        *(f"{family} N=64 fp32: time over block size" for family in ("toy", "copy", "gemm")),
    ]
    assert re.findall('<section id="(.*?)">', text) == ["p1", "p2", "p3"]
    table = re.findall(r"<tr>(<td>.*?)</tr>", text.partition('class="sums"')[2].partition("</table>")[0])
    cells = [[re.sub("<[^>]*>", "", cell) for cell in re.findall("<td>(.*?)</td>", line)] for line in table]
    assert cells == [
        ["toy N=64 fp32", "2", "64", "0.4000", "", "", ""],
        ["copy N=64 fp32", "1", "64", "1.000", "2,000", "", "50% copy"],
        ["gemm N=64 fp32", "1", "64", "1.000", "1,000", "40.0", "80% gemm"],
    ]
    assert "a note on the card" in text and "Test GPU (sm_90, driver 580.1, NVRTC 13.0)" in text
    assert "Fastest: v2 at block size 64, 0.4000 ms (95% interval 0.3960..0.4040); not told apart from it: 1" in text


def test_intervals_and_the_winner_are_drawn_where_they_belong(tmp_path: Path) -> None:
    wide = make_row(1, block=32, measurement=measured(4.0, 0.5))
    rows = [wide, make_row(1, block=64, median_ms=2.0), make_row(2, block=64, median_ms=1.0)]
    picture = pictures(drawn(tmp_path, rows))["toy N=64 fp32: time over block size"]
    points = {group.findtext("title"): group for group in picture.iter("g")}
    assert len(points) == 3
    first = points["v1 at block size 32: 4.000 ms (2.000..6.000)"]
    bar = re.findall(r"M([\d.]+) ([\d.]+)", first.find("path").get("d"))
    low, high = float(bar[0][1]), float(bar[-1][1])
    dot = first.find("circle")
    assert dot is not None and high < float(dot.get("cy", "")) < low
    assert low - high > 50  # three times as much, of an axis of 268 pixels over not much more than that
    ring = next(circle for circle in picture.iter("circle") if circle.get("class") == "ring")
    best = points["v2 at block size 64: 1.000 ms (0.9900..1.010)"].find("circle")
    assert best is not None and (ring.get("cx"), ring.get("cy")) == (best.get("cx"), best.get("cy"))


def test_the_ladder_has_factors_over_the_first_version(tmp_path: Path) -> None:
    text = drawn(tmp_path, [*two_families()[:7]])
    assert items(text, "bars") == [
        "v1 idea number 1 1.00x 8.000 ms @64",
        "v2 idea number 2 20.0x 0.4000 ms @64",
        "v3 idea number 3 no proven time",
    ]
    widths = [float(width) for width in re.findall(r'class="fill" style="width:([\d.]+)%', text)]
    assert widths == [5.0, 100.0]
    assert "logarithmic" not in text


def test_a_ladder_over_orders_of_magnitude_is_logarithmic_and_says_so(tmp_path: Path) -> None:
    rows = [make_row(1, median_ms=800.0), make_row(2, median_ms=8.0), make_row(3, median_ms=0.4)]
    text = drawn(tmp_path, rows)
    widths = [float(width) for width in re.findall(r'class="fill" style="width:([\d.]+)%', text)]
    assert "logarithmic" in text
    assert 5 < widths[0] < widths[1] < widths[2] == 100.0


def test_the_heat_map_is_strongest_at_the_winner(tmp_path: Path) -> None:
    text = drawn(tmp_path, two_families()[:8])
    heat = text.partition('<table class="heat">')[2].partition("</table>")[0]
    strength = [float(value) for value in re.findall("--s:([0-9.]+)", heat)]
    assert len(strength) == 6 and max(strength) == strength[4] and min(strength) == strength[0]
    assert re.findall(r'class="[^"]*best"[^>]*>(.*?)<', heat) == ["0.400*"]
    assert '<td class="bad">fail</td><td>refused</td><td></td>' in heat


def test_rows_without_a_time_are_named_with_their_reasons(tmp_path: Path) -> None:
    rows = [*two_families(), make_row(4, block=32, median_ms=0.1, overridden=True)]
    text = drawn(tmp_path, rows)
    assert items(text, "rows") == [
        "v3 at 32: fail: out: 3 of 4096 elements wrong",
        "v3 at 64: refused: needs N above 64",
        "v4 at 32: judged by another tolerance than the family's",
    ]
    assert "v4 at block size" not in text  # a looser bound wins nothing, and is drawn nowhere


def test_the_roofline_has_the_ceilings_and_the_points_below_them(tmp_path: Path) -> None:
    text = drawn(tmp_path, two_families())
    roofline = pictures(text)["roofline of the run"]
    words = [word.text for word in roofline.iter("text")]
    assert {"4,000 GB/s", "fp32 50.0", "gemm v1"} <= set(words)
    assert "bf16 800" not in words  # of a dtype that nothing ran in
    assert [circle.findtext("title") for circle in roofline.iter("circle")] == [
        "gemm N=64 fp32: 40.0 TFLOP/s at 40.0 a byte, 80% of gemm"
    ]
    slope, roof = (path.get("d", "") for path in roofline.iter("path") if "roof" in path.get("class", ""))
    ends = [tuple(map(float, re.findall(r"[\d.]+", path))) for path in (slope, roof)]
    assert ends[0][2:] == ends[1][:2] and ends[1][1] == ends[1][3] < ends[0][1]
    circle = next(roofline.iter("circle"))
    assert float(circle.get("cy", "")) > ends[1][1]
    assert "copy v1" not in words and "copy v1 N=64 fp32 2,000 GB/s 50%" in items(text, "bars")


def test_multiply_adds_are_the_roof_of_fp32_where_they_are_faster(tmp_path: Path) -> None:
    for rate, name in ((61.0, "fp32 FMA 61.0"), (49.0, "fp32 50.0")):
        text = drawn(tmp_path, two_families(), ceilings=replace(CARD, fma_tflops=rate))
        roofline = pictures(text)["roofline of the run"]
        roofs = [word.text for word in roofline.iter("text") if "fp32" in (word.text or "")]
        assert roofs == [name]
    assert "80% of gemm" in text


def test_without_ceilings_rates_are_drawn_all_the_same(tmp_path: Path) -> None:
    text = drawn(tmp_path, two_families(), ceilings=None)
    assert "gemm v1" in [word.text for word in pictures(text)["roofline of the run"].iter("text")]
    assert "copy v1 N=64 fp32 2,000 GB/s" in items(text, "bars")
    assert "ceilings of this card: not known" in text


def test_a_run_of_the_emulator_gives_verdicts_and_says_so(tmp_path: Path) -> None:
    rows = [make_row(1, device="emulator", block=32), failed(2, device="emulator", block=32, reason="a race")]
    text = drawn(tmp_path, rows, ceilings=None, name="emulator")
    assert "Verdicts only: the emulator is not a GPU" in text
    assert not pictures(text) and "Summary" not in text and 'class="bars"' not in text
    assert '<td class="ok">pass</td>' in text and '<td class="bad">fail</td>' in text
    assert items(text, "rows") == ["v2 at 32: fail: a race"]


def test_a_run_on_a_gpu_in_which_nothing_is_right(tmp_path: Path) -> None:
    text = drawn(tmp_path, [failed(1), failed(2)])
    assert "no row of this run was both proven and timed" in text and not pictures(text)


def test_names_are_text_whatever_they_hold(tmp_path: Path) -> None:
    evil = '<img src=x onerror="a()">&amp;'
    rows = [
        make_row(1, family=evil, idea=evil, sizes={evil: 8}, params={evil: 2}, median_ms=1.0, traffic=1e9, flops=1e10),
        failed(2, family=evil, idea=evil, sizes={evil: 8}, reason=evil),
    ]
    text = drawn(tmp_path, rows, name=evil, ceilings=Ceilings(1.0, notes=(evil,)))
    outline = Outline(text)
    assert not outline.open and not outline.crossed and pictures(text)
    assert "<img" not in text and not any(name.startswith("on") for _, name, _ in outline.attributes)
    assert any(evil in word for word in outline.words)


def test_modes_problems_and_dtypes_are_apart_and_a_repeated_row_counts_once(tmp_path: Path) -> None:
    rows = [
        make_row(1, median_ms=5.0),
        make_row(1, median_ms=3.0),
        make_row(1, median_ms=1.0, cache_mode="hot"),
        make_row(1, median_ms=1.0, sizes={"N": 128}),
        make_row(1, median_ms=1.0, dtype="bf16"),
        make_row(1, median_ms=2.0, params={"ROWS": 2}),
    ]
    run = read_run(sweep(tmp_path, rows))
    found = contests(run)
    assert [len(contest.rows) for contest in found] == [2, 1, 1, 1]
    assert [row.measurement and row.measurement["median_ms"] for row in found[0].rows] == [3.0, 2.0]
    assert "v1 ROWS=2 at block size 256" in page(run, found)


@pytest.mark.parametrize("count", [1, 14, 60])
def test_names_of_lines_stand_inside_and_apart(count: int, tmp_path: Path) -> None:
    rows = [make_row(number, median_ms=1.0 + number / 1e4) for number in range(1, count + 1)]
    picture = next(iter(pictures(drawn(tmp_path, rows)).values()))
    names = [word for word in picture.iter("text") if "name" in word.get("class", "")]
    heights = sorted(float(word.get("y", "")) for word in names)
    assert len(heights) == count and heights[0] > 0 and heights[-1] < HEIGHT
    assert all(0 < float(word.get("x", "")) < WIDTH for word in names)
    assert all(after - before > 4 for before, after in zip(heights, heights[1:], strict=False))


def test_many_block_sizes_have_numbers_that_do_not_touch(tmp_path: Path) -> None:
    rows = [make_row(1, block=block, median_ms=1.0) for block in range(32, 1025, 32)]
    picture = next(iter(pictures(drawn(tmp_path, rows)).values()))
    bottom = [word for word in picture.iter("text") if (word.text or "").isdigit() and float(word.get("y", "")) > 290]
    places = sorted(float(word.get("x", "")) for word in bottom)
    assert {"32", "64", "128", "256", "512", "1024"} <= {word.text for word in bottom}
    assert all(after - before >= 29 for before, after in zip(places, places[1:], strict=False))


# ------------------------------------------------------------------------------------------ the command


def test_the_examples_of_the_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep(tmp_path / "results", two_families())
    for line in plot.EXAMPLES:
        assert run_command(line.split()[1:]) == Exit.OK
    assert (tmp_path / "sweep.html").is_file()


def test_a_run_is_named_by_path_id_or_a_part_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sweep(tmp_path, two_families())
    last = sweep(tmp_path, two_families()[:1])
    for name in ("latest", str(path), path.stem, path.stem[-6:]):
        expected = last if name == "latest" else path
        assert run_command(["plot", name, "--results", str(tmp_path), "--json"]) == Exit.OK
        told = json.loads(capsys.readouterr().out)
        assert (told["run"], told["problems"]) == (str(expected), 1 if name == "latest" else 3)
        assert Path(told["page"]) == tmp_path / "tables" / expected.stem / "plot.html"
        assert f"<title>kbench {expected.stem}" in Path(told["page"]).read_text()


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = run_command(["plot", *arguments])
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("kbench: error: ")
    return status, err


def test_a_run_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--results", str(tmp_path))
    assert f"{tmp_path} holds no runs; `kbench sweep` writes one" in error_of(capsys, *where)[1]
    assert "no run of the id 'abc'" in error_of(capsys, "abc", *where)[1]
    assert "cannot read" in error_of(capsys, str(tmp_path / "gone.jsonl"), *where)[1]
    first = sweep(tmp_path, two_families())
    sweep(tmp_path, two_families())
    status, told = error_of(capsys, "test-gpu", *where)
    assert status == Exit.USAGE and "2 runs with 'test-gpu' in their ids" in told and first.stem in told


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"median_ms": 8.0', '"median_ms": null'),
        ('"median_ms": 8.0', '"median_ms": -8.0'),
        ('"median_ms": 8.0', '"median_ms": "8"'),
        ('"sizes": {"N": 64}', '"sizes": [64]'),
        ('"sizes": {"N": 64}', '"sizes": {"N": "x"}'),
        ('"block": 32', '"block": 0'),
        ('"family": "toy"', '"family": 5'),
        ('"status": "pass"', '"status": "fine"'),
        ('"copy_gbs": 4000.0', '"copy_gbs": "fast"'),
        ('"gemm_tflops": {', '"gemm_tflops": {"tf32": 0, '),
        ('"traffic": 2000000000.0', '"traffic": "2e9"'),
        ('"kind": "header"', '"kind": "heading"'),
    ],
)
def test_a_damaged_run(old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sweep(tmp_path, two_families())
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    status, told = error_of(capsys, "--results", str(tmp_path))
    assert status == Exit.USAGE and str(path) in told
    assert not (tmp_path / "tables").exists()


def test_a_run_without_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(tmp_path, [])
    status, told = error_of(capsys, "--results", str(tmp_path))
    assert status == Exit.USAGE and "holds no rows, so there is nothing to plot" in told


def test_a_run_that_was_killed_is_drawn_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sweep(tmp_path, two_families())
    path.write_text("\n".join(path.read_text().splitlines()[:4])[:-20])
    output = tmp_path / "page.html"
    assert run_command(["plot", "--results", str(tmp_path), "-o", str(output)]) == Exit.OK
    assert "is cut off and was left out" in capsys.readouterr().err
    assert "did not come to its end" in output.read_text()


def test_half_a_character_is_no_reason_to_draw_nothing(tmp_path: Path) -> None:
    path = sweep(tmp_path, two_families())
    path.write_text(path.read_text().replace("idea number 2", "idea \\ud800 number 2"))
    output = tmp_path / "page.html"
    assert run_command(["plot", str(path), "-o", str(output)]) == Exit.OK
    assert "idea ? number 2" in output.read_text()


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sweep(tmp_path, two_families())
    before = path.read_bytes()
    where = ("--results", str(tmp_path))
    assert error_of(capsys, *where, "-o", str(path))[0] == Exit.USAGE  # over the run itself
    assert path.read_bytes() == before
    (tmp_path / "folder.html").mkdir()
    for name in (tmp_path / "folder.html", path / "below.html", Path("/proc/kbench.html")):
        status, told = error_of(capsys, *where, "-o", str(name))
        assert status == Exit.CANNOT and f"cannot write {name}" in told and "choose another file with -o" in told
    assert not list(tmp_path.glob(".folder*"))


def test_a_sweep_says_before_any_work_that_its_page_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kbench.sweep.Bench", lambda *given: pytest.fail("the bench was set up"))
    (tmp_path / "folder.html").mkdir()
    for name, status in ((tmp_path / "folder.html", Exit.USAGE), (Path("/proc/kbench.html"), Exit.CANNOT)):
        assert run_command(["sweep", "toy", "--results", str(tmp_path), "--html", str(name)]) == status
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "choose another file with --html FILE.html" in told
    # A page asks for no folders of results beside it.
    (tmp_path / "runs").write_text("")
    require_page_writable(tmp_path / "page.html", "--html")
