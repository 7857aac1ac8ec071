from __future__ import annotations

from planted_bugs.bug import Bug

# With the seed of the test: limits that are passed by the norm, a schedule that has ended, windows that are not full.
NORM, ENDED, FILLING = ({"N": count, "S": 5, "W": 8} for count in (61, 63, 62))

BUGS = {
    "the norm is not tested": Bug(" || is_outlier(norm_z, of.norm_limit)", "", version=1, block=64, sizes=NORM),
    "a row past the end of the schedule": Bug("min(index, steps - 1)", "index", version=1, block=64, sizes=ENDED),
    "windows are tested before they are full": Bug(
        "finite && pushed >= unsigned(size)", "finite", version=1, block=64, sizes=FILLING
    ),
    "each value is tested against the windows before it": Bug(
        "sum += i == place ? 0.0f : window[i] - value;", "sum += window[i] - value;", version=1, block=32, sizes=NORM
    ),
    "losses past the last packet are left out": Bug(
        "if (rest < count)", "if (rest < packets)", version=1, block=128, sizes=NORM
    ),
    "windows do not turn": Bug("pushed % unsigned(size)", "pushed", version=1, block=64, sizes=NORM),
}
