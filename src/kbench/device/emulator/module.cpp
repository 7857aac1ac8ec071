// Where a kernel's library was loaded, and its thread-local storage: the static __shared__ variables.
#include <link.h>

#include "module.h"

// glibc and musl both have it; it makes sure that the calling thread has the storage of a module, and says where.
extern "C" void* __tls_get_addr(size_t* module_and_offset);

namespace emu {
namespace {

struct Search {
    uintptr_t address;
    Module found;
};

// Called once for each loaded library; 1 ends the search.
int visit(dl_phdr_info* library, size_t, void* data) {
    Search& search = *static_cast<Search*>(data);
    Module module = {library->dlpi_addr, UINTPTR_MAX, 0, 0, 0};
    for (int i = 0; i < library->dlpi_phnum; ++i) {
        const ElfW(Phdr)& segment = library->dlpi_phdr[i];
        if (segment.p_type == PT_LOAD) {
            const uintptr_t low = library->dlpi_addr + segment.p_vaddr;
            module.low = low < module.low ? low : module.low;
            module.high = low + segment.p_memsz > module.high ? low + segment.p_memsz : module.high;
        } else if (segment.p_type == PT_TLS && segment.p_memsz) {
            module.tls_id = library->dlpi_tls_modid;
            module.tls_bytes = segment.p_memsz;
        }
    }
    if (search.address < module.low || search.address >= module.high) return 0;
    search.found = module;
    return 1;
}

}  // namespace

char* thread_local_storage(const Module& module) {
    if (!module.tls_id) return nullptr;
    size_t where[2] = {module.tls_id, 0};
    return static_cast<char*>(__tls_get_addr(where));
}

}  // namespace emu

// The library that holds this code, which must stay loaded. Never freed: kernels keep pointing at it.
EMU_API const emu::Module* emu_find_module(const void* code) {
    emu::Search search = {reinterpret_cast<uintptr_t>(code), {}};
    return dl_iterate_phdr(emu::visit, &search) ? new emu::Module(search.found) : nullptr;
}
