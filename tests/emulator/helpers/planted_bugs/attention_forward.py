"""Bugs of attention_forward that the check must find."""

from planted_bugs.bug import Bug

ODD = {"B": 1, "T": 37, "C": 8, "NH": 2}
LONG = {"B": 1, "T": 70, "C": 8, "NH": 1}
ALIGNED = {"B": 2, "T": 72, "C": 8, "NH": 1}

BUGS = {
    "a tile of keys overwritten too early": Bug(
        "__syncthreads();  // the tile before this one has been read by everybody", "", 2, 64, LONG
    ),
    "a sum that does not shrink with its maximum": Bug(
        "sum = sum * shrink + warp_sum(weight);", "sum = sum + warp_sum(weight);", 2, 64, LONG
    ),
    "no mask": Bug("t2 <= t ? scale * to_float(preatt[i]) : -infinity()", "scale * to_float(preatt[i])", 3, 64, ODD),
    "no zeros above the diagonal": Bug(
        "first < T; first += kWarpSize * kPacket) {\n        float scores[kPacket] = {};",
        "first < size; first += kWarpSize * kPacket) {\n        float scores[kPacket] = {};",
        4, 64, {"B": 1, "T": 141, "C": 8, "NH": 2},
    ),
    "what stands behind the diagonal read": Bug(
        "scores[i] = first + i < size ? to_float(packet[i]) : -infinity();", "scores[i] = to_float(packet[i]);",
        6, 64, ALIGNED, "bf16",
    ),
    "half a packet of a tail dropped": Bug(
        "if (first + i * kStep < T) store_scaled", "if (first + i * kStep + kPacket / 2 < T) store_scaled",
        5, 32, ODD | {"T": 67}, "fp16",
    ),
}  # fmt: skip
