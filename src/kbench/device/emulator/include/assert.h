// No include guard: like the C library's, it follows NDEBUG each time it is included.
#undef assert
#ifdef NDEBUG
#define assert(...) ((void)0)
#else
#define assert(...) \
    ((__VA_ARGS__) ? (void)0 : emu_stop("assert", "assertion `" #__VA_ARGS__ "' failed", __FILE__, __LINE__))
#endif
