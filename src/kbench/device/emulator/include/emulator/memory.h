// Loads and stores with a caching hint: here plain ones, for the types that CUDA allows.
#pragma once

namespace emu {

template <class T> inline constexpr bool kCacheable = false;
#define EMU_CACHEABLE(T) template <> inline constexpr bool kCacheable<T> = true;
#define EMU_CACHEABLE_VECTORS(T, name) EMU_CACHEABLE(T) EMU_CACHEABLE(name##2) EMU_CACHEABLE(name##4)
EMU_CACHEABLE(char)
EMU_CACHEABLE_VECTORS(signed char, char)
EMU_CACHEABLE_VECTORS(unsigned char, uchar)
EMU_CACHEABLE_VECTORS(short, short)
EMU_CACHEABLE_VECTORS(unsigned short, ushort)
EMU_CACHEABLE_VECTORS(int, int)
EMU_CACHEABLE_VECTORS(unsigned int, uint)
EMU_CACHEABLE_VECTORS(float, float)
EMU_CACHEABLE(long)
EMU_CACHEABLE(unsigned long)
EMU_CACHEABLE(long long)
EMU_CACHEABLE(longlong2)
EMU_CACHEABLE(unsigned long long)
EMU_CACHEABLE(ulonglong2)
EMU_CACHEABLE(double)
EMU_CACHEABLE(double2)
EMU_CACHEABLE(__half)
EMU_CACHEABLE(__half2)
EMU_CACHEABLE(__nv_bfloat16)
EMU_CACHEABLE(__nv_bfloat162)
#undef EMU_CACHEABLE_VECTORS
#undef EMU_CACHEABLE

// Stops deduction: the pointer alone decides the type of a store, as with CUDA's overloads.
template <class T> using Same = typename std::enable_if<kCacheable<T>, T>::type;

}  // namespace emu

#define EMU_LOAD(name) template <class T> inline emu::Same<T> name(const T* address) { return *address; }
#define EMU_STORE(name) template <class T> inline void name(T* address, emu::Same<T> value) { *address = value; }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
EMU_LOAD(__ldcv)
EMU_STORE(__stwb)
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwt)
#undef EMU_LOAD
#undef EMU_STORE
