/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the CUDA runtime that nvcc's launch code calls and that its headers hide: registration of kernels by
 * name, and launches, which run the C++ of the kernel's PTX on the emulation. Layouts and names are those of
 * crt/host_runtime.h. With MT_PTX_COVERAGE=FILE a line a kernel is appended at exit: its mangled name, the PTX file,
 * its blocks of code as LINE:INSTRUCTIONS:EXECUTED.
 */
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "cuda_emu_device.h"
#include "ptx.h"

namespace {

ptx::kernel *kernels;

struct registered {
    const void *host; /* what the launch code knows it by */
    const char *mangled;
    const ptx::kernel *k; /* found when it is first launched: constructors of files have no order */
    std::string name;
};

std::mutex lock;

std::map<const void *, registered> &table()
{
    static std::map<const void *, registered> t;
    return t;
}

struct configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
thread_local configuration pushed;

std::string readable(const char *name)
{
    int status = 0;
    char *plain = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    std::string s = status ? name : plain;
    free(plain);
    return s.rfind("void ", 0) ? s : s.substr(5);
}

const ptx::kernel *find(const char *name)
{
    const ptx::kernel *k = kernels;
    while (k && strcmp(k->name, name))
        k = k->next;
    return k;
}

void write_coverage()
{
    FILE *f = fopen(getenv("MT_PTX_COVERAGE"), "a");
    if (!f) {
        mt_emu_die("cannot write MT_PTX_COVERAGE = %s", getenv("MT_PTX_COVERAGE"));
    }
    for (const ptx::kernel *k = kernels; k; k = k->next) {
        fprintf(f, "%s\t%s\t", k->name, k->file);
        for (uint32_t i = 0; i < k->n_blocks; i++)
            fprintf(f, "%s%u:%u:%u", i ? " " : "", k->blocks[i].line, k->blocks[i].instructions, k->executed[i]);
        fprintf(f, "\n");
    }
    fclose(f);
}

cudaError_t refuse(const registered &r, const char *why, size_t n, size_t most)
{
    fprintf(stderr, "cuda emulation: kernel %s: %s: %zu, of %zu\n", r.name.c_str(), why, n, most);
    return mt_emu_fail_launch();
}

void free_launch(void *l)
{
    delete static_cast<ptx::launch *>(l);
}

} // namespace

void ptx::add_kernel(kernel *k)
{
    k->next = kernels;
    kernels = k;
}

extern "C" {

void **__cudaRegisterFatBinary(void *)
{
    static bool once = getenv("MT_PTX_COVERAGE") && !atexit(write_coverage);
    static void *handle;
    (void)once;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}

void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *, void *,
                            void *, int *)
{
    std::lock_guard<std::mutex> l(lock);
    table()[host] = {host, name, nullptr, readable(name)};
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream)
{
    pushed = {grid, block, shared, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *static_cast<cudaStream_t *>(stream) = pushed.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(const void **kernel, const void *host)
{
    static bool replaced;
    std::lock_guard<std::mutex> l(lock);
    const char *others = getenv("MT_PTX_KERNELS");
    if (others && !replaced && !dlopen(others, RTLD_NOW)) /* its constructors add them before the program's */
        mt_emu_die("MT_PTX_KERNELS: %s", dlerror());
    replaced = true;
    auto at = table().find(host);
    if (at == table().end())
        return cudaErrorInvalidDeviceFunction;
    registered &r = at->second;
    r.k = find(r.mangled);
    if (!r.k)
        mt_emu_die("kernel %s is in the program and has no PTX here", r.mangled);
    *kernel = &r;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared,
                             cudaStream_t stream)
{
    static std::atomic<uint32_t> serial;
    const registered &r = *static_cast<const registered *>(kernel);
    const ptx::kernel &k = *r.k;
    size_t threads = static_cast<size_t>(block.x) * block.y * block.z, most = 1;
    for (uint32_t m : k.max_threads)
        most *= m;
    most = most ? most : 256; /* more would not fit if the assembler took 255 registers for each */
    if (threads > most)
        return refuse(r, "more threads than its launch bounds", threads, most);
    if (k.shared_bytes > 48u << 10 || (k.shared_bytes && k.shared_bytes + shared > 48u << 10))
        return refuse(r, "bytes of shared memory beyond 48 KiB", k.shared_bytes + shared, 48u << 10);
    auto *l = new ptx::launch();
    l->k = &k;
    l->name = r.name.c_str();
    l->serial = ++serial;
    uint32_t end = ptx::SHARED_BASE;
    for (uint32_t i = 0; i < k.n_shared; i++)
        end = k.shared[i].address + k.shared[i].bytes + ptx::SHARED_GAP;
    uint32_t align = std::max(k.dynamic_align, 16u);
    l->dynamic_address = (end + align - 1) / align * align;
    l->dynamic_bytes = static_cast<uint32_t>(shared);
    for (uint32_t i = 0; i < k.n_params; i++)
        memcpy(l->params + k.params[i].offset, args[i], k.params[i].bytes);
    struct mt_emu_launch e = {};
    e.name = l->name;
    e.kernel = r.host;
    e.grid = {grid.x, grid.y, grid.z};
    e.block = {block.x, block.y, block.z};
    e.shared_bytes = l->dynamic_address - ptx::SHARED_BASE + shared;
    e.stream = stream;
    e.run = k.run;
    e.free_args = free_launch;
    e.args = l;
    return mt_emu_launch(&e);
}

} // extern "C"
