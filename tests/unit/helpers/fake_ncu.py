"""Stands in for Nsight Compute's ncu: runs the program that it is given on a device of numpy, writes a report that says
what was launched between start and stop of the profiler, and prints it as the raw page.

$FAKE_NCU says how it behaves: "" well; "permission", "no-kernels", "crash", "hang", "no-metric", "words".
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","dram__bytes_read.sum","dram__bytes_write.sum","gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",'
    '"gpu__time_duration.sum","sm__warps_active.avg.pct_of_peak_sustained_active","launch__registers_per_thread"'
)
UNITS = '"","","","","","","","","","","","byte","byte","%","ns","%","register/thread"'
ROW = (
    '"{id}","7","python","host","{name}","1","7","(256, 1, 1)","(3, 1, 1)","0","9.0",'
    '"{read}","1,200","91.5","{ns}","50.00","16"'
)


def main(arguments: list[str]) -> int:
    mode = os.environ.get("FAKE_NCU", "")
    if arguments == ["--version"]:
        print("NVIDIA (R) Nsight Compute Command Line Profiler\nVersion 2025.3.1.0 (build 1) (public-release)")
        return 0
    if arguments[0] == "--import":
        return show(Path(arguments[1]), mode)
    print("==PROF== Connected to process 7 (python)", flush=True)
    if mode == "permission":
        print(
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
        )
        return 1
    if mode == "crash":
        print("==ERROR== Profiling failed because a driver resource was unavailable.")
        return 9
    if mode == "hang":
        time.sleep(60)
    asked = value(arguments, "--metrics") or ""
    if mode == "no-metric" and "l1tex__data_bank" in asked:
        print("==ERROR== Failed to find metric regex:^l1tex__data_bank_conflicts_pipe_lsu_mem_shared\\.sum$")
        return 1
    profiled = launch(arguments[-1])
    if mode == "no-kernels":
        profiled = []
    if not profiled:
        print("==WARNING== No kernels were profiled.")
        return 0
    report = {"kernels": profiled, "arguments": arguments}
    Path(str(value(arguments, "--export"))).write_text(json.dumps(report), encoding="utf-8")
    return 0


def value(arguments: list[str], option: str) -> str | None:
    return arguments[arguments.index(option) + 1] if option in arguments else None


def show(report: Path, mode: str) -> int:
    if mode == "words":
        print("this is no table")
        return 0
    print(f"==PROF== Reading {report}\n{HEADER}\n{UNITS}")
    for position, name in enumerate(json.loads(report.read_text(encoding="utf-8"))["kernels"]):
        print(ROW.format(id=position, name=f"void {name}(float *, int)", read=f"{3600 + position:,}", ns="2,500"))
    return 0


def launch(spec: str) -> list[str]:
    """Run the launcher here, on a device of numpy; the kernels that it launched with the profiler on."""
    from check_fakes import COUNT, FakeDevice, double, inside
    from kbench.device.cuda import device
    from kbench.measure import flush
    from kbench.profile import launch as launcher

    on = [False]
    profiled: list[str] = []

    def spoilt(schedule, out, *others):
        double(schedule, out, *others)
        inside(out, COUNT)[:] += 1

    class Card(FakeDevice):
        stream = contextlib.nullcontext()

        def build(self, source, kernels, arch=""):
            return {"double": spoilt if "spoilt" in source.text else double, launcher.MARKER: lambda *nothing: None}

        def enqueue(self, bound, stream=None, schedule=""):
            super().enqueue(bound, stream, schedule)
            if on[0]:
                profiled.extend(step.kernel for step in bound.prepared.plan)

    device.CudaDevice = Card
    flush.Flush = lambda device: lambda stream: None
    launcher._switch_profiler = lambda on: switch(on)
    launcher.WARMUP_S = 0.0

    def switch(state):
        on[0] = state

    sys.argv = ["launch", spec]
    launcher.main()
    return profiled


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
