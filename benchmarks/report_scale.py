"""How long `kbench report` takes for a hundred thousand records, and how much memory.

    PYTHONPATH=src:tests/unit/helpers python3 benchmarks/report_scale.py [--records N] [--samples N] [--profile]

Writes two run files, as large as sweeps in rounds would make them, to a temporary folder, and compares them in a
process of its own. Both files together have so many records. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 3
BLOCKS = (32, 64, 128, 256, 512, 1024)
VERSIONS = 10
RUN = """
import resource, sys, time
from kbench.cli.app import run_command
started = time.perf_counter()
status = run_command(sys.argv[1:])
taken, used = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
print(f"{taken:.2f} {used.ru_utime + used.ru_stime:.2f} {used.ru_maxrss / 1024:.0f} {status}", file=sys.stderr)
"""
PROFILE = """
import cProfile, pstats, sys
from kbench.cli.app import run_command
profile = cProfile.Profile()
profile.runcall(run_command, sys.argv[1:])
pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
"""


def write(path: Path, records: int, samples: int, seed: int) -> None:
    """A run file with so many records, each like one of a sweep on an H200."""
    from gpu_rows import kernel
    from report_runs import plain, write_run

    rng = random.Random(seed)
    write_run(path, [])
    head, footer = path.read_text(encoding="utf-8").splitlines()
    with path.open("w", encoding="utf-8") as file:
        file.write(head + "\n")
        experiments = records // ROUNDS
        for number in range(ROUNDS):
            for at in range(experiments):
                place, block = divmod(at, len(BLOCKS))
                place, version = divmod(place, VERSIONS)
                row = plain(version + 1, BLOCKS[block], f"family_{place % 25}")
                row.sizes = {"B": 8, "T": 64 * (place // 25 + 1), "C": 768}
                row.kernels = [kernel(f"k{version}<float, {BLOCKS[block]}>", 1024, BLOCKS[block], 30 + version)]
                ms = 0.01 * (1 + version) * (1 + rng.gauss(0, 0.003))
                row.measurement = {
                    "samples_ms": [round(ms * (1 + abs(rng.gauss(0, 0.01))), 6) for _ in range(samples)],
                    "median_ms": ms, "low_ms": ms, "high_ms": ms, "confidence": 0.95, "q1_ms": ms, "q3_ms": ms,
                    "warmups": 5, "overhead_ms": 0.0015, "mode": "cold", "stopped": "64 samples", "note": "",
                    "count": samples, "runs": 1, "conditions": {"sm_mhz": [1980, 1980], "temperature_c": 41},
                    "second": {"ms": ms, "by": "a CUDA graph", "allowed_ms": 0.001, "agrees": True},
                }  # fmt: skip
                row.round = number
                file.write(json.dumps({"kind": "row", **row.to_dict()}) + "\n")
        file.write(footer + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000, help="of both sides together")
    parser.add_argument("--samples", type=int, default=30, help="of a record")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("before.jsonl", "after.jsonl")]
        for seed, path in enumerate(files):
            write(path, options.records // 2, options.samples, seed)
        size = sum(path.stat().st_size for path in files)
        command = [sys.executable, "-c", PROFILE if options.profile else RUN, "report", *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True)
        print(done.stdout[-300:])
        if options.profile:
            print(done.stderr)
            return 0
        seconds, cpu, megabytes, status = done.stderr.split()[-4:]
        print(
            f"{options.records:,} records, {size / 1e6:.0f} MB of files: {seconds} s "
            f"({cpu} s of CPU time with Python's start), {megabytes} MB, exit status {status}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
