"""What ncu is asked to count, by its names, and which of these make up each of our figures.

Names: Nsight Compute's kernel profiling guide, "Metrics Reference" and the section files that come with ncu. A GPU or a
version of ncu that lacks one leaves that figure empty; several names for one figure are tried in their order.
"""

from __future__ import annotations

# Sections that one reads in ncu's own viewer first; each brings its metrics in the form that this GPU has.
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
    "LaunchStats",
    "Occupancy",
)

TIME = ("gpu__time_duration.sum",)
READ = ("dram__bytes_read.sum", "dram__bytes_op_read.sum")
WRITTEN = ("dram__bytes_write.sum", "dram__bytes_op_write.sum")
DRAM = (
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
L2 = ("lts__throughput.avg.pct_of_peak_sustained_elapsed", "lts__t_sectors.avg.pct_of_peak_sustained_elapsed")
L2_HITS = ("lts__t_sector_hit_rate.pct",)
MULTIPROCESSORS = ("sm__throughput.avg.pct_of_peak_sustained_elapsed",)
ISSUE = (
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__inst_issued.avg.pct_of_peak_sustained_active",
)
TENSOR = ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",)
ACHIEVED = ("sm__warps_active.avg.pct_of_peak_sustained_active",)
POSSIBLE = ("sm__maximum_warps_per_active_cycle_pct",)
REGISTERS = ("launch__registers_per_thread",)
LOAD_SECTORS = ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",)
LOAD_REQUESTS = ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",)
STORE_SECTORS = ("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",)
STORE_REQUESTS = ("l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",)
CONFLICTS = ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",)
WAVEFRONTS = ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",)

# Asked for by name: sections need not have them.
NAMED = tuple(
    names[0]
    for names in (
        TIME, READ, WRITTEN, DRAM, L2, L2_HITS, MULTIPROCESSORS, ISSUE, TENSOR, ACHIEVED, REGISTERS, LOAD_SECTORS,
        LOAD_REQUESTS, STORE_SECTORS, STORE_REQUESTS, CONFLICTS, WAVEFRONTS,
    )
)  # fmt: skip

# Warps of a scheduler that stand still for one reason, on average over its issued instructions.
STALL = "smsp__average_warps_issue_stalled_"
STALL_ENDS = ("_per_issue_active.ratio", "_per_issue_active")
NOT_A_STALL = "selected"  # the warp that issues

STALLS = {
    "long_scoreboard": "global or local memory",
    "short_scoreboard": "shared memory or slow arithmetic",
    "barrier": "other warps at a barrier",
    "wait": "an instruction of fixed latency",
    "math_pipe_throttle": "a busy arithmetic pipe",
    "lg_throttle": "the queue of global and local accesses",
    "mio_throttle": "the queue of shared memory and slow arithmetic",
    "tex_throttle": "the queue of texture accesses",
    "drain": "its stores, to exit",
    "membar": "a memory fence",
    "not_selected": "its turn",
    "no_instruction": "instructions",
    "imc_miss": "constants",
    "branch_resolving": "a branch",
    "dispatch_stall": "the dispatcher",
    "gmma": "a warp group's matrix product",
    "sleeping": "the end of its sleep",
    "misc": "something else",
}
