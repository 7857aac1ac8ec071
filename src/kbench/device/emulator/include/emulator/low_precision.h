// __half and __nv_bfloat16, their pairs, and (in low_precision_functions.inc) CUDA's functions of them.
//
// Arithmetic is done in float and rounded once more: with 24 bits against 11 or 8 that gives the correctly rounded
// result of +, -, *, / and sqrt (Figueroa, "When is double rounding innocuous?", 1995: 24 >= 2 * 11 + 2).
// A fused multiply-add has no such margin and goes through rounding to odd.
#pragma once

struct __half_raw { unsigned short x; };
struct __nv_bfloat16_raw { unsigned short x; };
struct __half2_raw { unsigned short x, y; };
struct __nv_bfloat162_raw { unsigned short x, y; };

namespace emu {

// One number of 16 bits, as the base of its own class, so that messages show CUDA's names. Constructors and
// conversions are those of CUDA's classes, none added: an expression that is ambiguous there (half + float) is
// ambiguous here.
template <class Self, class Format, class Raw> class Narrow {
    unsigned short bits_;

    static unsigned short from(double value) { return round_bits<Format>(value); }

public:
    Narrow() = default;
    constexpr Narrow(Raw raw) : bits_(raw.x) {}
    template <class OtherSelf, class OtherFormat, class OtherRaw>
    explicit Narrow(const Narrow<OtherSelf, OtherFormat, OtherRaw>& other) : bits_(Format::nearest(other.widened())) {}
    Narrow(float value) : bits_(Format::nearest(value)) {}
    Narrow(double value) : bits_(from(value)) {}
    Narrow(short value) : bits_(from(value)) {}
    Narrow(unsigned short value) : bits_(from(value)) {}
    Narrow(int value) : bits_(from(value)) {}
    Narrow(unsigned int value) : bits_(from(value)) {}
    Narrow(long value) : bits_(from(odd_double(value))) {}
    Narrow(unsigned long value) : bits_(from(odd_double(value))) {}
    Narrow(long long value) : bits_(from(odd_double(value))) {}
    Narrow(unsigned long long value) : bits_(from(odd_double(value))) {}

    constexpr operator Raw() const { return {bits_}; }
    operator float() const { return Format::widen(bits_); }
    constexpr operator bool() const { return (bits_ & Format::kMagnitude) != 0; }
    operator char() const { return integer<char>(); }
    operator signed char() const { return integer<signed char>(); }
    operator unsigned char() const { return integer<unsigned char>(); }
    operator short() const { return integer<short>(); }
    operator unsigned short() const { return integer<unsigned short>(); }
    operator int() const { return integer<int>(); }
    operator unsigned int() const { return integer<unsigned int>(); }
    operator long() const { return integer<long>(); }
    operator unsigned long() const { return integer<unsigned long>(); }
    operator long long() const { return integer<long long>(); }
    operator unsigned long long() const { return integer<unsigned long long>(); }

    static constexpr Self of_bits(unsigned bits) { return Raw{static_cast<unsigned short>(bits)}; }
    constexpr unsigned short bits() const { return bits_; }
    float widened() const { return Format::widen(bits_); }

    friend Self operator+(const Self& a, const Self& b) { return a.widened() + b.widened(); }
    friend Self operator-(const Self& a, const Self& b) { return a.widened() - b.widened(); }
    friend Self operator*(const Self& a, const Self& b) { return a.widened() * b.widened(); }
    friend Self operator/(const Self& a, const Self& b) { return a.widened() / b.widened(); }
    friend Self operator+(const Self& a) { return a; }
    friend Self operator-(const Self& a) { return of_bits(a.bits() ^ 0x8000u); }
    friend Self& operator+=(Self& a, const Self& b) { return a = a + b; }
    friend Self& operator-=(Self& a, const Self& b) { return a = a - b; }
    friend Self& operator*=(Self& a, const Self& b) { return a = a * b; }
    friend Self& operator/=(Self& a, const Self& b) { return a = a / b; }
    friend Self& operator++(Self& a) { return a = a + Self(1); }
    friend Self& operator--(Self& a) { return a = a - Self(1); }
    friend Self operator++(Self& a, int) { const Self old = a; ++a; return old; }
    friend Self operator--(Self& a, int) { const Self old = a; --a; return old; }
    friend bool operator==(const Self& a, const Self& b) { return a.widened() == b.widened(); }
    friend bool operator!=(const Self& a, const Self& b) { return a.widened() != b.widened(); }
    friend bool operator<(const Self& a, const Self& b) { return a.widened() < b.widened(); }
    friend bool operator>(const Self& a, const Self& b) { return a.widened() > b.widened(); }
    friend bool operator<=(const Self& a, const Self& b) { return a.widened() <= b.widened(); }
    friend bool operator>=(const Self& a, const Self& b) { return a.widened() >= b.widened(); }

    friend bool either_nan(const Self& a, const Self& b) {
        return a.widened() != a.widened() || b.widened() != b.widened();
    }

private:
    template <class Integer> Integer integer() const { return round_integer<Integer>(widened(), Rounding::kZero); }
};

// Two of them in one 32-bit word.
template <class Self, class Number, class Raw2> struct alignas(4) NarrowPair {
    Number x, y;

    NarrowPair() = default;
    constexpr NarrowPair(const Number& x, const Number& y) : x(x), y(y) {}
    constexpr NarrowPair(Raw2 raw) : x(Number::of_bits(raw.x)), y(Number::of_bits(raw.y)) {}
    constexpr operator Raw2() const { return {x.bits(), y.bits()}; }

    friend Self operator+(const Self& a, const Self& b) { return {a.x + b.x, a.y + b.y}; }
    friend Self operator-(const Self& a, const Self& b) { return {a.x - b.x, a.y - b.y}; }
    friend Self operator*(const Self& a, const Self& b) { return {a.x * b.x, a.y * b.y}; }
    friend Self operator/(const Self& a, const Self& b) { return {a.x / b.x, a.y / b.y}; }
    friend Self operator+(const Self& a) { return a; }
    friend Self operator-(const Self& a) { return {-a.x, -a.y}; }
    friend Self& operator+=(Self& a, const Self& b) { return a = a + b; }
    friend Self& operator-=(Self& a, const Self& b) { return a = a - b; }
    friend Self& operator*=(Self& a, const Self& b) { return a = a * b; }
    friend Self& operator/=(Self& a, const Self& b) { return a = a / b; }
    friend Self& operator++(Self& a) { ++a.x, ++a.y; return a; }
    friend Self& operator--(Self& a) { --a.x, --a.y; return a; }
    friend Self operator++(Self& a, int) { const Self old = a; ++a; return old; }
    friend Self operator--(Self& a, int) { const Self old = a; --a; return old; }
    // True when it holds for both.
    friend bool operator==(const Self& a, const Self& b) { return a.x == b.x && a.y == b.y; }
    friend bool operator!=(const Self& a, const Self& b) { return a.x != b.x && a.y != b.y; }
    friend bool operator<(const Self& a, const Self& b) { return a.x < b.x && a.y < b.y; }
    friend bool operator>(const Self& a, const Self& b) { return a.x > b.x && a.y > b.y; }
    friend bool operator<=(const Self& a, const Self& b) { return a.x <= b.x && a.y <= b.y; }
    friend bool operator>=(const Self& a, const Self& b) { return a.x >= b.x && a.y >= b.y; }
};

}  // namespace emu

struct __half : emu::Narrow<__half, emu::Binary16, __half_raw> {
    using Narrow::Narrow;
};
struct __nv_bfloat16 : emu::Narrow<__nv_bfloat16, emu::Bfloat16, __nv_bfloat16_raw> {
    using Narrow::Narrow;
};
struct __half2 : emu::NarrowPair<__half2, __half, __half2_raw> {
    using NarrowPair::NarrowPair;
};
struct __nv_bfloat162 : emu::NarrowPair<__nv_bfloat162, __nv_bfloat16, __nv_bfloat162_raw> {
    using NarrowPair::NarrowPair;
};
using half = __half;
using half2 = __half2;
using nv_half = __half;
using nv_half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

// The names differ only in how they spell the type, so one file defines both sets.
#define EMU_JOIN_(a, b, c, d) a##b##c##d
#define EMU_JOIN(a, b, c, d) EMU_JOIN_(a, b, c, d)

#define EMU_N __half
#define EMU_N2 __half2
#define EMU_FORMAT emu::Binary16
#define EMU_NAME half
#define EMU_NAME2 half2
#include "low_precision_functions.inc"
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline float2 __half22float2(__half2 a) { return {a.x.widened(), a.y.widened()}; }
inline __half2 __half2half2(__half a) { return {a, a}; }

#define EMU_N __nv_bfloat16
#define EMU_N2 __nv_bfloat162
#define EMU_FORMAT emu::Bfloat16
#define EMU_NAME bfloat16
#define EMU_NAME2 bfloat162
#include "low_precision_functions.inc"
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {a.x.widened(), a.y.widened()}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
