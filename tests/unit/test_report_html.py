"""The page of a report: it is whole, fetches nothing, shows every row, and draws what changed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import reports
from kbench.report.surfaces import html, picture, words
from parsed_html import Parsed
from reports import NASTY

REPORTS = ("everything", "fine", "empty", "machine_differs", "nasty", "many")


@pytest.mark.parametrize("which", REPORTS)
def test_a_page_is_whole_and_fetches_nothing(which: str) -> None:
    text = html.render(getattr(reports, which)())
    page = Parsed(text)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "b", "object"}
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on") or name in ("src", "action")]
    assert "default-src 'none'" in text
    places = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(places) == len(set(places))
    links = page.all("a", "href")
    assert all(link.startswith("#") and link[1:] in places for link in links)
    assert len(text) < 3_000_000


def test_a_page_shows_names_as_they_are() -> None:
    page = Parsed(html.render(reports.nasty()))
    assert page.text.count(words.plain(NASTY)) > 50


def test_a_page_has_every_row_once_and_the_unchanged_behind_a_click() -> None:
    text = html.render(reports.everything())
    assert text.count('<tr class="row') == len(reports.everything().changes)
    assert text.count('<tr class="row same') == text[text.index("<details>") :].count('<tr class="row') == 6


def test_an_anchor_hides_the_rows_of_other_verdicts_and_families() -> None:
    text = html.render(reports.everything())
    for place, style in (("only-slower", "slower"), ("only-over-budget", "over-budget"), ("family-0", "f0")):
        assert f"#{place}:target ~ * tr.row:not(.{style}) {{ display: none }}" in text
        assert f'<a href="#{place}">' in text
    assert '<tr class="row slower f0"><td>layernorm_forward:6' in text


def test_only_facts_that_should_agree_stand_out() -> None:
    text = html.render(reports.machine_differs())
    assert '<td class="differs">NVIDIA H100 80GB HBM3</td>' in text
    assert "<td>9e0d771</td>" in text


def test_a_page_draws_rows_that_have_samples_and_says_how_to_read_it() -> None:
    text = html.render(reports.everything())
    assert text.count("<svg") == 3, "slower, unclear, faster: counts and other rows have no samples"
    assert text.count(picture.EXPLAINED) == 1
    assert picture.EXPLAINED not in html.render(reports.fine())
    assert html.render(reports.many(500)).count("<svg") == html.PICTURES


def pixels(svg: str, style: str) -> list[tuple[float, float]]:
    found = re.search(rf'<path class="{style}" d="([^"]*)"', svg)
    assert found, style
    return [(float(x), float(y)) for x, y in re.findall(r"M([-\d.]+) ([-\d.]+)", found[1])]


def test_a_picture_has_a_dot_for_each_sample_and_a_row_of_them_for_each_round() -> None:
    svg = picture.picture(reports.SLOWER)
    for style in ("dots c0", "dots c1"):
        dots = pixels(svg, style)
        assert len(dots) == 60 and len({y for _, y in dots}) == 5
        assert all(picture.LEFT <= x <= picture.WIDTH for x, _ in dots)
    (before, _), (after, _), (limit, _) = (pixels(svg, style)[0] for style in ("estimate c0", "estimate c1", "limit"))
    assert before < limit < after
    (left, _) = pixels(svg, "reach")[0]
    assert limit < left < after, "the interval lies beyond the limit: that is what made it a regression"
    faster = picture.picture(reports.FASTER)
    assert pixels(faster, "estimate c2")[0] < pixels(faster, "limit")[0] < pixels(faster, "estimate c0")[0]


def test_one_disturbed_sample_does_not_squeeze_the_others() -> None:
    calm = picture.picture(reports.SLOWER)
    rounds = [list(samples) for samples in reports.SLOWER.rounds_after]
    rounds[0][0] = 50.0
    svg = picture.picture(replace(reports.SLOWER, rounds_after=rounds))
    apart = [pixels(one, "estimate c1")[0][0] - pixels(one, "estimate c0")[0][0] for one in (calm, svg)]
    assert apart[1] > 0.8 * apart[0]
    assert re.search(r"\d+ samples? beyond the edges", svg)


@pytest.mark.parametrize("rounds", [(), [[]], [[0.5]], [[float("nan"), -1.0, 0.0, float("inf")]]])
def test_there_is_no_picture_of_nothing(rounds: list[list[float]]) -> None:
    assert picture.picture(replace(reports.SLOWER, rounds_before=rounds)) == ""


def test_a_picture_of_equal_samples_or_of_very_many_is_drawn() -> None:
    same = [[0.5] * 10] * 3
    assert "<svg" in picture.picture(
        replace(reports.SAME, rounds_before=same, rounds_after=same, before=0.5, after=0.5)
    )
    much = [[0.5 + 0.001 * i for i in range(64)] for _ in range(200)]
    svg = picture.picture(replace(reports.SLOWER, rounds_before=much))
    assert len(pixels(svg, "dots c0")) <= picture.DOTS and "one sample of 22 drawn" in svg
