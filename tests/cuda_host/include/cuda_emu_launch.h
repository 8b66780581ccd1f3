/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <tuple>
#include <utility>

#include "cuda_runtime.h"

/**
 * MT_LAUNCH(kernel, grid, block, shared_bytes, stream, args...) and MT_SHARED_DYNAMIC(type, name) for the
 * host emulation; included by cuda/kernels/launch.cuh in place of nvcc's launch syntax. Arguments are converted to
 * the kernel's parameters and copied when it is launched, as CUDA does, and pointers are checked.
 */
#define MT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                  \
    mt_emu_launch_kernel(#kernel, kernel, dim3(grid), dim3(block), shared_bytes, stream, __VA_ARGS__)
#define MT_SHARED_DYNAMIC(type, name) type *name = static_cast<type *>(mt_emu_dynamic_shared())

template <class... P> struct mt_emu_call {
    void (*kernel)(P...);
    std::tuple<P...> args;

    static void run(const void *self)
    {
        const auto *c = static_cast<const mt_emu_call *>(self);
        std::apply(c->kernel, c->args);
    }
    static void destroy(void *self)
    {
        delete static_cast<mt_emu_call *>(self);
    }
};

template <class T> static inline bool mt_emu_check_argument(const char *kernel, int arg, const T &v)
{
    if constexpr (std::is_pointer<T>::value)
        return mt_emu_check_pointer(kernel, arg, static_cast<const void *>(v));
#if __has_builtin(__builtin_clear_padding)
    if constexpr (std::is_class<T>::value) {
        T members = v;
        __builtin_clear_padding(&members); /* which may hold anything, old pointers too */
        return mt_emu_check_struct(kernel, arg, &members, sizeof(members));
    }
#endif
    return true;
}

template <class... P, class... A>
static inline cudaError_t mt_emu_launch_kernel(const char *name, void (*kernel)(P...), dim3 grid,
                                               dim3 block, size_t shared_bytes, cudaStream_t stream,
                                               A &&...args)
{
    static_assert((std::is_trivially_copyable<P>::value && ...), "arguments are copied as bytes");
    static_assert((sizeof(P) + ... + 0) <= 4096, "more than 4 KiB of arguments");
    auto *call = new mt_emu_call<P...>{kernel, {static_cast<P>(args)...}};
    int arg = 0;
    bool ok = true;
    std::apply([&](const P &...v) { ((ok = mt_emu_check_argument(name, arg++, v) && ok), ...); },
               call->args);
    if (!ok) {
        delete call;
        return mt_emu_fail_launch();
    }
    struct mt_emu_launch l = {};
    l.name = name;
    l.kernel = reinterpret_cast<const void *>(kernel);
    l.grid = {grid.x, grid.y, grid.z};
    l.block = {block.x, block.y, block.z};
    l.shared_bytes = shared_bytes;
    l.stream = stream;
    l.run = mt_emu_call<P...>::run;
    l.free_args = mt_emu_call<P...>::destroy;
    l.args = call;
    (void)mt_emu_launch(&l);
    return cudaGetLastError(); /* as with nvcc: also what an earlier call on this thread left */
}
