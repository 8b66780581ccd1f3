/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fibers: stacks between guard pages, and a switch that saves what a function call must keep. On x86-64 that is
 * a dozen instructions; elsewhere ucontext does it, with two system calls a switch.
 *
 * The sanitizers are told of each switch. ThreadSanitizer sees a fiber as a thread, and a switch as no
 * synchronisation: only barriers order the accesses of two fibers (block.c), so a missing one is a race.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "emu.h"
#include "sanitizers.h"

#ifdef MT_EMU_SANITIZED
enum { STACK_BYTES = 256 << 10, GUARD_BYTES = 4096 };
#else
enum { STACK_BYTES = 64 << 10, GUARD_BYTES = 4096 };
#endif

/* First to run on a fiber; never returns. Its own frame is not instrumented, for it is never left. */
__attribute__((used, noinline)) MT_EMU_UNCHECKED static void begin(struct mt_emu_fiber *f)
{
    mt_asan_finish_switch(NULL, NULL, NULL);
    f->main(f->arg);
    abort();
}

#ifdef __x86_64__
/* mt_emu_switch(void **save, void *load): pushes the callee-saved registers, changes stacks, pops. */
__asm__(".text\n"
        ".p2align 4\n"
        ".type mt_emu_switch, @function\n"
        "mt_emu_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size mt_emu_switch, . - mt_emu_switch\n"
        /* A new fiber arrives here with its argument in rbx and a stack aligned as after a call. */
        ".type mt_emu_first, @function\n"
        "mt_emu_first:\n"
        "    xorl %ebp, %ebp\n"
        "    movq %rbx, %rdi\n"
        "    call *%r12\n"
        "    ud2\n"
        ".size mt_emu_first, . - mt_emu_first\n");
extern void mt_emu_switch(void **save, void *load) __attribute__((visibility("hidden")));
extern void mt_emu_first(void) __attribute__((visibility("hidden")));

static void prepare(struct mt_emu_fiber *f)
{
    /* at different places of their pages, or the tops of all stacks would share a few cache lines */
    static _Thread_local size_t colour;
    void **top = (void **)(void *)(f->stack + f->stack_bytes - (colour++ * 448) % 4096);
    *--top = NULL; /* keeps the stack 16-byte aligned at mt_emu_first's call */
    *--top = NULL;
    *--top = (void *)mt_emu_first;
    *--top = NULL;          /* rbp */
    *--top = f;             /* rbx */
    *--top = (void *)begin; /* r12 */
    *--top = NULL;          /* r13 */
    *--top = NULL;          /* r14 */
    *--top = NULL;          /* r15 */
    f->sp = top;
}

MT_EMU_UNCHECKED static void change(struct mt_emu_fiber *from, struct mt_emu_fiber *to)
{
    mt_emu_switch(&from->sp, to->sp);
}

#else
#include <ucontext.h>

static void ucontext_begin(unsigned hi, unsigned lo)
{
    begin((struct mt_emu_fiber *)(((uintptr_t)hi << 16 << 16) | lo));
}

static ucontext_t *context_of(struct mt_emu_fiber *f)
{
    if (!f->context && !(f->context = calloc(1, sizeof(ucontext_t))))
        mt_emu_die("no memory for a fiber");
    return f->context;
}

static void prepare(struct mt_emu_fiber *f)
{
    ucontext_t *c = context_of(f);
    getcontext(c);
    c->uc_stack.ss_sp = f->stack;
    c->uc_stack.ss_size = f->stack_bytes;
    c->uc_link = NULL;
    uintptr_t p = (uintptr_t)f;
    makecontext(c, (void (*)(void))ucontext_begin, 2, (unsigned)(p >> 16 >> 16), (unsigned)p);
}

MT_EMU_UNCHECKED static void change(struct mt_emu_fiber *from, struct mt_emu_fiber *to)
{
    swapcontext(context_of(from), context_of(to));
}
#endif

void mt_emu_fiber_init(struct mt_emu_fiber *f, void (*main)(void *), void *arg)
{
    char *p = mmap(NULL, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p, GUARD_BYTES, PROT_NONE))
        mt_emu_die("cannot map a fiber's stack: %s", strerror(errno));
    *f = (struct mt_emu_fiber){.stack = p + GUARD_BYTES, .stack_bytes = STACK_BYTES, .main = main,
                               .arg = arg, .tsan = mt_tsan_create_fiber()};
    prepare(f);
}

void mt_emu_fiber_adopt(struct mt_emu_fiber *f)
{
    pthread_attr_t attr;
    void *bottom = NULL;
    *f = (struct mt_emu_fiber){.tsan = mt_tsan_this_fiber()};
    if (pthread_getattr_np(pthread_self(), &attr))
        mt_emu_die("cannot find this thread's stack");
    pthread_attr_getstack(&attr, &bottom, &f->stack_bytes);
    pthread_attr_destroy(&attr);
    f->stack = bottom;
}

void mt_emu_fiber_finish(struct mt_emu_fiber *f)
{
    mt_tsan_destroy_fiber(f->tsan);
    mt_asan_unpoison(f->stack, f->stack_bytes); /* of frames that were never left */
    munmap(f->stack - GUARD_BYTES, GUARD_BYTES + STACK_BYTES);
    free(f->context);
    *f = (struct mt_emu_fiber){0};
}

MT_EMU_UNCHECKED void mt_emu_fiber_switch(struct mt_emu_fiber *from, struct mt_emu_fiber *to)
{
    mt_asan_start_switch(&from->asan_stack, to->stack, to->stack_bytes);
    mt_tsan_switch(to->tsan);
    change(from, to);
    mt_asan_finish_switch(from->asan_stack, NULL, NULL);
}
