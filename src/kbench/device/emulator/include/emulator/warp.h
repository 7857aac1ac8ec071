// Warp operations: shuffles, votes, matches, reductions. The runtime makes the lanes of the mask meet.
#pragma once

namespace emu {

// Any trivially copyable value up to 32 bytes, in pieces of 8. cg tiles shuffle structures by it.
template <class T>
inline T shuffle(WarpOp op, unsigned mask, T value, int argument, int width, const char* file, int line) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 32, "only plain values up to 32 bytes are shuffled");
    uint64_t words[(sizeof(T) + 7) / 8] = {};
    memcpy(words, &value, sizeof(T));
    for (uint64_t& word : words) word = emu_warp(op, mask, word, argument, width, file, line);
    memcpy(static_cast<void*>(&value), words, sizeof(T));
    return value;
}

inline unsigned vote(WarpOp op, unsigned mask, bool predicate, const char* file, int line) {
    return static_cast<unsigned>(emu_warp(op, mask, predicate, 0, 32, file, line));
}

// Values are compared by their bits.
template <class T> inline unsigned match(WarpOp op, unsigned mask, T value, const char* file, int line) {
    uint64_t word = 0;
    memcpy(&word, &value, sizeof(T));
    return static_cast<unsigned>(emu_warp(op, mask, word, 0, 32, file, line));
}

template <class T> inline T warp_reduce(WarpOp op, unsigned mask, T value, const char* file, int line) {
    return static_cast<T>(emu_warp(op, mask, static_cast<unsigned>(value), 0, 32, file, line));
}

}  // namespace emu

inline void __syncwarp(unsigned int mask = 0xffffffffu, EMU_WHERE) {
    emu_warp(emu::kSyncWarp, mask, 0, 0, 32, EMU_HERE);
}
inline unsigned int __activemask(EMU_WHERE) { return emu_active_mask(EMU_HERE); }

// The types that CUDA has: a char or short is promoted to int, a structure is refused.
#define EMU_SHUFFLES(T)                                                                                        \
    inline T __shfl_sync(unsigned int mask, T value, int lane, int width = 32, EMU_WHERE) {                    \
        return emu::shuffle(emu::kShuffle, mask, value, lane, width, EMU_HERE);                                \
    }                                                                                                          \
    inline T __shfl_up_sync(unsigned int mask, T value, unsigned int delta, int width = 32, EMU_WHERE) {       \
        return emu::shuffle(emu::kShuffleUp, mask, value, static_cast<int>(delta), width, EMU_HERE);           \
    }                                                                                                          \
    inline T __shfl_down_sync(unsigned int mask, T value, unsigned int delta, int width = 32, EMU_WHERE) {     \
        return emu::shuffle(emu::kShuffleDown, mask, value, static_cast<int>(delta), width, EMU_HERE);         \
    }                                                                                                          \
    inline T __shfl_xor_sync(unsigned int mask, T value, int lanes, int width = 32, EMU_WHERE) {               \
        return emu::shuffle(emu::kShuffleXor, mask, value, lanes, width, EMU_HERE);                            \
    }
#define EMU_MATCHES(T)                                                                                         \
    inline unsigned int __match_any_sync(unsigned int mask, T value, EMU_WHERE) {                              \
        return emu::match(emu::kMatchAny, mask, value, EMU_HERE);                                              \
    }                                                                                                          \
    inline unsigned int __match_all_sync(unsigned int mask, T value, int* all, EMU_WHERE) {                    \
        const unsigned lanes = emu::match(emu::kMatchAll, mask, value, EMU_HERE);                              \
        *all = lanes != 0;                                                                                     \
        return lanes;                                                                                          \
    }
#define EMU_SHUFFLES_AND_MATCHES(T) \
    EMU_SHUFFLES(T)                 \
    EMU_MATCHES(T)
EMU_SHUFFLES_AND_MATCHES(int)
EMU_SHUFFLES_AND_MATCHES(unsigned int)
EMU_SHUFFLES_AND_MATCHES(long)
EMU_SHUFFLES_AND_MATCHES(unsigned long)
EMU_SHUFFLES_AND_MATCHES(long long)
EMU_SHUFFLES_AND_MATCHES(unsigned long long)
EMU_SHUFFLES_AND_MATCHES(float)
EMU_SHUFFLES_AND_MATCHES(double)
EMU_SHUFFLES(__half)
EMU_SHUFFLES(__half2)
EMU_SHUFFLES(__nv_bfloat16)
EMU_SHUFFLES(__nv_bfloat162)
#undef EMU_SHUFFLES_AND_MATCHES
#undef EMU_MATCHES
#undef EMU_SHUFFLES

inline unsigned int __ballot_sync(unsigned int mask, int predicate, EMU_WHERE) {
    return emu::vote(emu::kBallot, mask, predicate != 0, EMU_HERE);
}
inline int __any_sync(unsigned int mask, int predicate, EMU_WHERE) {
    return emu::vote(emu::kAny, mask, predicate != 0, EMU_HERE) != 0;
}
inline int __all_sync(unsigned int mask, int predicate, EMU_WHERE) {
    return emu::vote(emu::kAll, mask, predicate != 0, EMU_HERE) != 0;
}
// Whether the predicate is the same in all lanes.
inline int __uni_sync(unsigned int mask, int predicate, EMU_WHERE) {
    return emu::match(emu::kMatchAll, mask, predicate != 0, EMU_HERE) != 0;
}

#define EMU_REDUCE(name, T, op)                                                   \
    inline T __reduce_##name##_sync(unsigned int mask, T value, EMU_WHERE) {      \
        return emu::warp_reduce(op, mask, value, EMU_HERE);                       \
    }
EMU_REDUCE(add, unsigned int, emu::kReduceAdd)
EMU_REDUCE(add, int, emu::kReduceAdd)
EMU_REDUCE(min, unsigned int, emu::kReduceMin)
EMU_REDUCE(min, int, emu::kReduceMinSigned)
EMU_REDUCE(max, unsigned int, emu::kReduceMax)
EMU_REDUCE(max, int, emu::kReduceMaxSigned)
EMU_REDUCE(and, unsigned int, emu::kReduceAnd)
EMU_REDUCE(or, unsigned int, emu::kReduceOr)
EMU_REDUCE(xor, unsigned int, emu::kReduceXor)
#undef EMU_REDUCE
