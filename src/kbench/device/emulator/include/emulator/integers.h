// Integer intrinsics, bit casts, and min/max of integers. Arithmetic wraps around, as on the GPU.
#pragma once

namespace emu {

template <class To, class From> inline To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    return __builtin_bit_cast(To, value);
}

// Signed overflow is undefined in C++ and wraps in device code.
template <class T> constexpr T wrapping_add(T a, T b) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
}
template <class T> constexpr T wrapping_sub(T a, T b) {
    using Unsigned = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Unsigned>(a) - static_cast<Unsigned>(b));
}

constexpr uint64_t join(unsigned high, unsigned low) { return static_cast<uint64_t>(high) << 32 | low; }

}  // namespace emu

inline int __float_as_int(float x) { return emu::bit_cast<int>(x); }
inline unsigned int __float_as_uint(float x) { return emu::bit_cast<unsigned int>(x); }
inline float __int_as_float(int x) { return emu::bit_cast<float>(x); }
inline float __uint_as_float(unsigned int x) { return emu::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return emu::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return emu::bit_cast<double>(x); }
inline int __double2hiint(double x) { return static_cast<int>(emu::bit_cast<uint64_t>(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(emu::bit_cast<uint64_t>(x)); }
inline double __hiloint2double(int high, int low) {
    return emu::bit_cast<double>(emu::join(static_cast<unsigned>(high), static_cast<unsigned>(low)));
}

inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned int __brev(unsigned int x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}
inline unsigned long long __brevll(unsigned long long x) {
    return emu::join(__brev(static_cast<unsigned>(x)), __brev(static_cast<unsigned>(x >> 32)));
}

// The position of the offset-th set bit of mask at or above base (offset > 0), or at or below it (< 0).
inline unsigned int __fns(unsigned int mask, unsigned int base, int offset) {
    if (offset == 0) return mask >> (base & 31) & 1 ? base : ~0u;
    const int step = offset > 0 ? 1 : -1;
    for (int position = static_cast<int>(base); position >= 0 && position < 32; position += step)
        if (mask >> position & 1 && (offset -= step) == 0) return static_cast<unsigned>(position);
    return ~0u;
}

inline int __mulhi(int x, int y) { return static_cast<int>((static_cast<int64_t>(x) * y) >> 32); }
inline unsigned int __umulhi(unsigned int x, unsigned int y) {
    return static_cast<unsigned>((static_cast<uint64_t>(x) * y) >> 32);
}
inline long long __mul64hi(long long x, long long y) {
    return static_cast<long long>((static_cast<__int128>(x) * y) >> 64);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(x) * y) >> 64);
}
inline unsigned int __umul24(unsigned int x, unsigned int y) { return (x & 0xffffffu) * (y & 0xffffffu); }
inline int __mul24(int x, int y) {
    const auto low24 = [](int v) { return static_cast<int>(static_cast<unsigned>(v) << 8) >> 8; };
    return static_cast<int>(static_cast<unsigned>(low24(x)) * static_cast<unsigned>(low24(y)));
}
inline unsigned int __usad(unsigned int x, unsigned int y, unsigned int z) { return (x > y ? x - y : y - x) + z; }
inline unsigned int __sad(int x, int y, unsigned int z) {
    const int64_t difference = static_cast<int64_t>(x) - y;
    return static_cast<unsigned>(difference < 0 ? -difference : difference) + z;
}
// Averages without overflow, rounded down and (r) up.
inline int __hadd(int x, int y) { return static_cast<int>((static_cast<int64_t>(x) + y) >> 1); }
inline int __rhadd(int x, int y) { return static_cast<int>((static_cast<int64_t>(x) + y + 1) >> 1); }
inline unsigned int __uhadd(unsigned int x, unsigned int y) {
    return static_cast<unsigned>((static_cast<uint64_t>(x) + y) >> 1);
}
inline unsigned int __urhadd(unsigned int x, unsigned int y) {
    return static_cast<unsigned>((static_cast<uint64_t>(x) + y + 1) >> 1);
}

// Each hex digit of the selector picks one byte of y:x, or (bit 3) its sign spread over the byte.
inline unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
    const uint64_t bytes = emu::join(y, x);
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned digit = selector >> 4 * i & 0xf;
        const unsigned byte = static_cast<unsigned>(bytes >> 8 * (digit & 7)) & 0xff;
        result |= (digit & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return result;
}

// A 64-bit shift of high:low of which one half is kept; the shift is taken modulo 32, or (c) clamped to 32.
inline unsigned int __funnelshift_l(unsigned int low, unsigned int high, unsigned int shift) {
    return static_cast<unsigned>(emu::join(high, low) << (shift & 31) >> 32);
}
inline unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift) {
    return static_cast<unsigned>(emu::join(high, low) >> (shift & 31));
}
inline unsigned int __funnelshift_lc(unsigned int low, unsigned int high, unsigned int shift) {
    return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
inline unsigned int __funnelshift_rc(unsigned int low, unsigned int high, unsigned int shift) {
    return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}

inline int __dp4a(char4 a, char4 b, int c) {
    return emu::wrapping_add(c, a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w);
}
inline unsigned int __dp4a(uchar4 a, uchar4 b, unsigned int c) {
    return c + static_cast<unsigned>(a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w);
}
inline int __dp4a(int a, int b, int c) { return __dp4a(emu::bit_cast<char4>(a), emu::bit_cast<char4>(b), c); }
inline unsigned int __dp4a(unsigned int a, unsigned int b, unsigned int c) {
    return __dp4a(emu::bit_cast<uchar4>(a), emu::bit_cast<uchar4>(b), c);
}

#define EMU_MIN_MAX(A, B, T)                                                                       \
    inline T min(A a, B b) { return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b); } \
    inline T max(A a, B b) { return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a); }
// As in CUDA, a signed and an unsigned argument meet as unsigned.
#define EMU_MIN_MAX_SIGNED_UNSIGNED(Signed, Unsigned) \
    EMU_MIN_MAX(Signed, Signed, Signed)               \
    EMU_MIN_MAX(Unsigned, Unsigned, Unsigned)         \
    EMU_MIN_MAX(Signed, Unsigned, Unsigned)           \
    EMU_MIN_MAX(Unsigned, Signed, Unsigned)
EMU_MIN_MAX_SIGNED_UNSIGNED(int, unsigned int)
EMU_MIN_MAX_SIGNED_UNSIGNED(long, unsigned long)
EMU_MIN_MAX_SIGNED_UNSIGNED(long long, unsigned long long)
#undef EMU_MIN_MAX_SIGNED_UNSIGNED
#undef EMU_MIN_MAX
inline unsigned int umin(unsigned int a, unsigned int b) { return min(a, b); }
inline unsigned int umax(unsigned int a, unsigned int b) { return max(a, b); }
inline long long llmin(long long a, long long b) { return min(a, b); }
inline long long llmax(long long a, long long b) { return max(a, b); }
inline unsigned long long ullmin(unsigned long long a, unsigned long long b) { return min(a, b); }
inline unsigned long long ullmax(unsigned long long a, unsigned long long b) { return max(a, b); }
