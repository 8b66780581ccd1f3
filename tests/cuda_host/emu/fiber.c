/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fibers: stacks between guard pages, and a switch that saves what a function call must keep. On x86-64 that is
 * a dozen instructions; elsewhere ucontext does it, with two system calls a switch.
 *
 * The sanitizers are told of each switch. ThreadSanitizer sees a fiber as a thread, and a switch as no
 * synchronisation: only barriers order the accesses of two fibers (block.c), so a missing one is a race.
 */
#include <errno.h>
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

struct start {
    struct mt_emu_scheduler *scheduler;
    void (*main)(struct mt_emu_scheduler *, void *);
    void *arg;
};

/* First to run on a fiber; never returns. Its own frame is not instrumented, for it is never left. */
__attribute__((used, noinline)) MT_EMU_UNCHECKED static void begin(struct start *s)
{
    struct start now = *s;
    mt_asan_finish_switch(NULL, &now.scheduler->stack_bottom, &now.scheduler->stack_bytes);
    now.main(now.scheduler, now.arg);
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

static void prepare(struct mt_emu_fiber *f, struct start *s)
{
    void **top = (void **)(void *)s;
    *--top = NULL; /* keeps the stack 16-byte aligned at mt_emu_first's call */
    *--top = NULL;
    *--top = (void *)mt_emu_first;
    *--top = NULL;          /* rbp */
    *--top = s;             /* rbx */
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
    begin((struct start *)(((uintptr_t)hi << 16 << 16) | lo));
}

static ucontext_t *context_of(struct mt_emu_fiber *f)
{
    if (!f->context && !(f->context = calloc(1, sizeof(ucontext_t))))
        mt_emu_die("no memory for a fiber");
    return f->context;
}

static void prepare(struct mt_emu_fiber *f, struct start *s)
{
    ucontext_t *c = context_of(f);
    getcontext(c);
    c->uc_stack.ss_sp = f->stack;
    c->uc_stack.ss_size = (size_t)((char *)s - f->stack);
    c->uc_link = NULL;
    uintptr_t p = (uintptr_t)s;
    makecontext(c, (void (*)(void))ucontext_begin, 2, (unsigned)(p >> 16 >> 16), (unsigned)p);
}

MT_EMU_UNCHECKED static void change(struct mt_emu_fiber *from, struct mt_emu_fiber *to)
{
    swapcontext(context_of(from), context_of(to));
}
#endif

void mt_emu_fiber_init(struct mt_emu_fiber *f)
{
    char *p = mmap(NULL, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p, GUARD_BYTES, PROT_NONE))
        mt_emu_die("cannot map a fiber's stack: %s", strerror(errno));
    *f = (struct mt_emu_fiber){.stack = p + GUARD_BYTES, .tsan = mt_tsan_create_fiber()};
}

void mt_emu_fiber_finish(struct mt_emu_fiber *f)
{
    if (!f->stack)
        return;
    mt_tsan_destroy_fiber(f->tsan);
    munmap(f->stack - GUARD_BYTES, GUARD_BYTES + STACK_BYTES);
    free(f->context);
    *f = (struct mt_emu_fiber){0};
}

MT_EMU_UNCHECKED void mt_emu_fiber_prepare(struct mt_emu_fiber *f, struct mt_emu_scheduler *s,
                          void (*main)(struct mt_emu_scheduler *, void *), void *arg)
{
    struct start *st = (struct start *)(void *)(f->stack + STACK_BYTES - sizeof(*st) - 16);
    st = (struct start *)((uintptr_t)st & ~(uintptr_t)15);
    st->scheduler = s;
    st->main = main;
    st->arg = arg;
    prepare(f, st);
}

MT_EMU_UNCHECKED void mt_emu_fiber_resume(struct mt_emu_scheduler *s, struct mt_emu_fiber *f)
{
    mt_asan_start_switch(&s->here.asan_stack, f->stack, STACK_BYTES);
    mt_tsan_switch(f->tsan);
    change(&s->here, f);
    mt_asan_finish_switch(s->here.asan_stack, NULL, NULL);
}

MT_EMU_UNCHECKED void mt_emu_fiber_yield(struct mt_emu_scheduler *s, struct mt_emu_fiber *f)
{
    mt_asan_start_switch(&f->asan_stack, s->stack_bottom, s->stack_bytes);
    mt_tsan_switch(s->here.tsan);
    change(f, &s->here);
    mt_asan_finish_switch(f->asan_stack, &s->stack_bottom, &s->stack_bytes);
}

MT_EMU_UNCHECKED void mt_emu_fiber_exit(struct mt_emu_scheduler *s, struct mt_emu_fiber *f)
{
    mt_asan_start_switch(NULL, s->stack_bottom, s->stack_bytes);
    mt_tsan_switch(s->here.tsan);
    change(f, &s->here);
    abort();
}
