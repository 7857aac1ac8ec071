"""What ncu prints as CSV: launches with their metrics, in base units, whatever else stands around them."""

from __future__ import annotations

import pytest

from kbench.errors import CannotRunError
from kbench.profile.raw import Profiled, number, plain_name, read_raw, scale_of, short_name, split_at

RAW = """==PROF== Connected to process 4711 (/usr/bin/python3.12)

"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__bytes_read.sum","gpu__time_duration.sum","lts__t_sector_hit_rate.pct","device__attribute_display_name"
"","","","","","","","","","","","Mbyte","us","%",""
"0","4711","python3.12","localhost","void scale<float, (int)256>(float *, const float *, int)","1","13","(256, 1, 1)",\
"(4,096, 2, 1)","0","9.0","1,024.50","12.3","n/a","NVIDIA H200"
"1","4711","python3.12","localhost","add(float *, ""x"")","1","13","(32, 4, 1)","(7, 1, 1)","0","9.0","","2","66.67",""
==PROF== Disconnected from process 4711
"""


def test_launches_in_order_with_their_metrics_in_base_units() -> None:
    first, second = read_raw(RAW)
    assert (short_name(first.name), first.block, second.block) == ("scale<float, 256>", (256, 1, 1), (32, 4, 1))
    assert first.values == {"dram__bytes_read.sum": pytest.approx(1_024.5e6), "gpu__time_duration.sum": 12_300}
    assert second.values == {"gpu__time_duration.sum": 2000, "lts__t_sector_hit_rate.pct": 66.67}


def test_without_a_line_of_units_base_units_are_what_was_asked_for() -> None:
    (only,) = read_raw('"ID","Kernel Name","gpu__time_duration.sum"\n"0","k","1,500"\n')
    assert only.values == {"gpu__time_duration.sum": 1500} and only.grid == () == only.block


def test_a_line_that_is_cut_off_is_left_out() -> None:
    text = '"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n"0","k","1"\n"1","k'
    assert [each.values["gpu__time_duration.sum"] for each in read_raw(text)] == [1]


def test_no_launches_are_no_error() -> None:
    assert read_raw('"ID","Kernel Name","a__b"\n"","","ns"\n') == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "ended with: nothing"),
        ("==WARNING== No kernels were profiled.\n", "ended with: nothing"),
        ("some\nprose, of another program\n", "it ended with: prose, of another program"),
        ('"ID","Kernel Name","Metric Name","Metric Value"\n"0","k","a","1"\n', "not one column a metric"),
    ],
)
def test_another_output_is_one_line_of_error(text: str, words: str) -> None:
    with pytest.raises(CannotRunError, match=words):
        read_raw(text)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1,234,567", 1234567), ("0.5", 0.5), ("1e-3", 0.001), ("12 (3; 9)", 12), ("-1", -1), ("", None), ("n/a", None),
        ("nan", None), ("inf", None), ("NVIDIA H200", None), ("(!) 1", None),
    ],
)  # fmt: skip
def test_numbers(cell: str, value: float | None) -> None:
    assert number(cell) == value


@pytest.mark.parametrize(
    ("metric", "unit", "scale"),
    [
        ("gpu__time_duration.sum", "ms", 1e6),
        ("gpu__time_duration.sum", "nsecond", 1),
        ("gpu__time_duration.sum", "fortnight", None),
        ("gpu__time_duration.sum", "", None),
        ("dram__bytes_read.sum", "Kbyte", 1e3),
        ("dram__bytes_read.sum", None, 1),
        ("launch__shared_mem_per_block_static", "Kbyte/block", 1e3),
        ("launch__registers_per_thread", "register/thread", 1),
        ("smsp__sass_average_data_bytes_per_sector.pct", "%", 1),
    ],
)
def test_units(metric: str, unit: str | None, scale: float | None) -> None:
    assert scale_of(metric, unit) == scale


@pytest.mark.parametrize(
    ("text", "short", "plain"),
    [
        ("void k<float, (int)8>(float *)", "k<float, 8>", "k"),
        ("k", "k", "k"),
        ("void n::k<a<b>, c>(void (*)(int))", "n::k<a<b>, c>", "k"),
        ("void (anonymous namespace)::k(int)", "k", "k"),
        ("sm90_xmma_gemm_f32f32_tn_n", "sm90_xmma_gemm_f32f32_tn_n", "sm90_xmma_gemm_f32f32_tn_n"),
        ("", "", ""),
    ],
)
def test_names(text: str, short: str, plain: str) -> None:
    assert (short_name(text), plain_name(text)) == (short, plain)


def test_kernels_are_told_apart_by_the_marker_before_them() -> None:
    kernels = [Profiled(name) for name in ("before", "marker", "a", "b(int)", "marker(int)", "marker", "c")]
    found = split_at("marker", kernels)
    assert [[kernel.name for kernel in part] for part in found] == [["a", "b(int)"], [], ["c"]]
