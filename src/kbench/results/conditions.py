"""How a row's time was taken, in words: the mode, the second timer, and what the card said of itself."""

from __future__ import annotations

from kbench.results.schema import Row

_MODES = {"cold": "cold L2", "hot": "hot L2", "graph": "one after another in a CUDA graph, hot L2"}


def mode_text(row: Row) -> str:
    """What a time of this row is a time of."""
    return mode_name(row.cache_mode)


def mode_name(cache_mode: str) -> str:
    """The same of a row's `cache_mode`."""
    return _MODES.get(cache_mode, f"{cache_mode} L2")


def second_text(row: Row) -> str:
    """What a second timer said, and whether it agrees; "" where there is none."""
    second = (row.measurement or {}).get("second")
    if not second:
        return ""
    if second.get("agrees") is None:
        return f"no second timer: {second['by'].removeprefix('none: ')}"
    verdict = "agrees" if second["agrees"] else "DIFFERS"
    return f"{second['ms']:.4f} ms by {second['by']}: {verdict} (allowed: {second['allowed_ms']:.4f} ms apart)"


def card_text(row: Row) -> str:
    """Clock, temperature, power and throttling during the samples; "" where NVML said nothing."""
    found = (row.measurement or {}).get("conditions") or {}
    low, high = found.get("sm_mhz", (None, None))
    parts = []
    if low is not None:
        parts.append(f"SM {low} MHz" if low == high else f"SM {low} to {high} MHz")
    for name, unit in (("temperature_c", "C"), ("power_w", "W")):
        if name in found:
            parts.append(f"{found[name]:g} {unit}")
    if found.get("throttled"):
        parts.append(f"held back in {found['throttled']} samples ({', '.join(found['throttles'])})")
    elif "throttled" in found:
        waits = found["throttle_waits"]
        parts.append(f"not held back ({waits} samples repeated)" if waits else "not held back")
    return ", ".join(parts)
