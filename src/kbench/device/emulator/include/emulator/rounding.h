// Rounding to half, bfloat16 and float in all four directions.
//
// Each format turns its bits into a float (widen) and rounds a float to the nearest, ties to even (nearest).
// Everything else follows from one fact: a value that was first rounded "to odd" in a format with at least two
// more bits can be rounded again in any direction without a second rounding error. So an exact result is brought
// into a double, its last bit set if anything was cut off, and rounded from there.
#pragma once

namespace emu {

enum class Rounding { kNearest, kZero, kUp, kDown };

struct Binary32 {
    using Bits = uint32_t;
    static float widen(Bits bits) { return bit_cast<float>(bits); }
    static Bits nearest(float value) { return bit_cast<Bits>(value); }
    static constexpr Bits kMagnitude = 0x7fffffff;
};

// kNan: what any operation or conversion on the GPU makes of a NaN: sign 0, all other bits 1.
struct Bfloat16 {
    using Bits = uint16_t;
    static constexpr Bits kMagnitude = 0x7fff, kNan = 0x7fff;
    static float widen(Bits bits) { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
    static Bits nearest(float value) {
        const uint32_t bits = bit_cast<uint32_t>(value);
        if ((bits & 0x7fffffff) > 0x7f800000) return kNan;
        // Just under half of the last kept bit, and one more where that bit is odd; a carry reaches infinity.
        return static_cast<Bits>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};

// Integer code rather than _Float16, which clang 14 lacks on x86-64 and g++ 12 on aarch64.
struct Binary16 {
    using Bits = uint16_t;
    static constexpr Bits kMagnitude = 0x7fff, kNan = 0x7fff;
    static float widen(Bits bits) {
        const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, magnitude = bits & kMagnitude;
        if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000 | magnitude << 13);
        if (magnitude < 0x0400)  // subnormal: a multiple of 2^-24
            return bit_cast<float>(sign | bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f));
        return bit_cast<float>(sign | (magnitude + (112u << 10)) << 13);  // the exponent bias grows from 15 to 127
    }
    static Bits nearest(float value) {
        const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff;
        const uint32_t sign = bits >> 16 & 0x8000;
        if (magnitude > 0x7f800000) return kNan;
        if (magnitude >= 0x477ff000) return static_cast<Bits>(sign | 0x7c00);  // 65520 and more: infinity
        if (magnitude < 0x38800000) {  // below 2^-14: adding 1/2 makes the float adder round at 2^-24
            const float sum = bit_cast<float>(magnitude) + 0.5f;
            return static_cast<Bits>(sign | (bit_cast<uint32_t>(sum) - bit_cast<uint32_t>(0.5f)));
        }
        return static_cast<Bits>(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
    }
};

// ------------------------------------------------------------------------------------------ rounding to odd

inline float odd_float(double value) {
    const float nearest = static_cast<float>(value);
    if (nearest == value || value != value) return nearest;
    uint32_t bits = bit_cast<uint32_t>(nearest);
    if (fabs(static_cast<double>(nearest)) > fabs(value)) bits -= 1;  // truncate
    return bit_cast<float>(bits | 1);
}

template <class Integer> inline double odd_double(Integer value) {
    if constexpr (sizeof(Integer) <= 4) {
        return static_cast<double>(value);
    } else {  // a double has 53 bits: drop the lowest 11 and remember whether they held anything
        const bool negative = value < 0;
        uint64_t magnitude = static_cast<uint64_t>(value);
        if (negative) magnitude = 0 - magnitude;
        if (magnitude >> 53) magnitude = (magnitude >> 11 | ((magnitude & 0x7ff) != 0)) << 11;
        return negative ? -static_cast<double>(magnitude) : static_cast<double>(magnitude);
    }
}

// `nearest` plus an error too small to show in it, of which only the sign matters.
inline double odd_double(double nearest, double error) {
    uint64_t bits = bit_cast<uint64_t>(nearest);
    if (error == 0 || error != error || !std::isfinite(nearest) || bits & 1) return nearest;
    return bit_cast<double>((error > 0) == (nearest > 0) ? bits + 1 : bits - 1);
}

inline double odd_sum(double a, double b) {
    const double sum = a + b, b_part = sum - a;
    return odd_double(sum, (a - (sum - b_part)) + (b - b_part));  // Knuth's exact error of a sum
}
inline double odd_fma(float a, float b, float c) { return odd_sum(static_cast<double>(a) * b, c); }

// ------------------------------------------------------------------------------------------ rounding

// `value`: exact, or rounded to odd.
template <class Format> inline typename Format::Bits round_bits(double value, Rounding rounding = Rounding::kNearest) {
    using Bits = typename Format::Bits;
    Bits bits;
    if constexpr (std::is_same_v<Format, Binary32>) {
        bits = Format::nearest(static_cast<float>(value));
    } else {
        bits = Format::nearest(odd_float(value));
    }
    const double rounded = static_cast<double>(Format::widen(bits));
    if (rounding == Rounding::kNearest || rounded == value || rounded != rounded) return bits;
    const bool above = rounded > value;
    const bool must_fall = rounding == Rounding::kDown || (rounding == Rounding::kZero && value > 0);
    if (above != must_fall) return bits;
    // The neighbour in the wanted direction; across zero the sign changes.
    const Bits sign_bit = static_cast<Bits>(Format::kMagnitude + 1);
    if ((bits & Format::kMagnitude) == 0) return above ? static_cast<Bits>(sign_bit | 1) : static_cast<Bits>(1);
    const bool negative = (bits & sign_bit) != 0;
    return static_cast<Bits>(above == negative ? bits + 1 : bits - 1);
}
inline float round_float(double value, Rounding rounding) {
    return bit_cast<float>(round_bits<Binary32>(value, rounding));
}

// To an integer, saturating. NaN becomes 0, in 64 bits the smallest signed value: what the GPU does.
template <class Integer> inline Integer round_integer(double value, Rounding rounding) {
    constexpr int bits = static_cast<int>(8 * sizeof(Integer)) - (std::is_signed_v<Integer> ? 1 : 0);
    constexpr Integer largest = static_cast<Integer>(~0ull >> (64 - bits));
    constexpr Integer smallest = std::is_signed_v<Integer> ? static_cast<Integer>(-largest - 1) : Integer(0);
    if (value != value) return sizeof(Integer) == 8 ? static_cast<Integer>(1ull << 63) : Integer(0);
    const double whole = rounding == Rounding::kNearest ? rint(value)
                         : rounding == Rounding::kZero  ? trunc(value)
                         : rounding == Rounding::kUp    ? ceil(value)
                                                        : floor(value);
    const double limit = ldexp(1.0, bits);
    if (whole >= limit) return largest;
    if (whole <= static_cast<double>(smallest)) return smallest;
    return static_cast<Integer>(whole);
}

}  // namespace emu
