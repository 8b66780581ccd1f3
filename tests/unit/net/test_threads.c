/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between hosts: what arrives, in which order, how waits end, and what faults on the way become. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "net_threads.h"
#include "test.h"

enum { HOSTS = 4, ROUNDS = 50 };

struct host {
    mt_net *net;
    void (*run)(struct host *h);
    int rc;
    struct mt_err err;
    uint32_t sum;
};

static void *start(void *arg)
{
    struct host *h = arg;
    h->run(h);
    return NULL;
}

/* Runs one function on each host. */
static void run_faulty(struct host h[HOSTS], int n, double deadline, void (*const f[HOSTS])(struct host *h),
                       const struct mt_net_fault *fault)
{
    mt_net_threads *t;
    pthread_t thread[HOSTS];
    assert_int_equal(mt_net_threads_create(&t, n, deadline, fault, NULL), 0);
    for (int i = 0; i < n; i++) {
        h[i] = (struct host){.net = mt_net_threads_of(t, i), .run = f[i]};
        assert_int_equal(pthread_create(&thread[i], NULL, start, &h[i]), 0);
    }
    for (int i = 0; i < n; i++)
        pthread_join(thread[i], NULL);
    mt_net_threads_destroy(&t);
}

static void run(struct host h[HOSTS], int n, double deadline, void (*const f[HOSTS])(struct host *h))
{
    run_faulty(h, n, deadline, f, NULL);
}

/* Each host in turn sends to all others. */
static void all_to_all(struct host *h)
{
    const int own = mt_net_rank(h->net), n = mt_net_size(h->net);
    for (int round = 0; round < ROUNDS; round++)
        for (int from = 0; from < n; from++)
            for (int to = 0; to < n; to++) {
                uint32_t x = (uint32_t)(round * 100 + from * 10 + to), y = 0;
                if (from == own && to != own)
                    h->rc |= mt_net_send(h->net, to, &x, sizeof(x), &h->err);
                if (to == own && from != own)
                    h->rc |= mt_net_recv(h->net, from, &y, sizeof(y), &h->err) || x != y;
                h->sum += y;
            }
}

TEST(messages_arrive_in_order)
{
    struct host h[HOSTS];
    run(h, HOSTS, 30, (void (*const[HOSTS])(struct host *)){all_to_all, all_to_all, all_to_all, all_to_all});
    for (int i = 0; i < HOSTS; i++)
        assert_true(!h[i].rc && h[i].sum > 0);
}

static void send_four(struct host *h)
{
    h->rc = mt_net_send(h->net, 1, "four", 4, &h->err);
}

static void recv_eight(struct host *h)
{
    char buf[8];
    h->rc = mt_net_recv(h->net, 0, buf, sizeof(buf), &h->err);
}

static void nothing(struct host *h)
{
    h->rc = 0;
}

TEST(another_size_is_refused)
{
    struct host h[HOSTS];
    run(h, 2, 10, (void (*const[HOSTS])(struct host *)){send_four, recv_eight});
    assert_int_equal(h[1].rc, -EPROTO);
    assert_non_null(strstr(h[1].err.msg, "host 0 sent 4 bytes where 8 were expected"));
}

TEST(a_wait_ends_at_its_deadline)
{
    struct host h[HOSTS];
    run(h, 2, 0.2, (void (*const[HOSTS])(struct host *)){nothing, recv_eight});
    assert_int_equal(h[1].rc, -ETIMEDOUT);
    assert_non_null(strstr(h[1].err.msg, "nothing came from host 0"));
    run(h, 2, 0.2, (void (*const[HOSTS])(struct host *)){send_four, nothing});
    assert_int_equal(h[0].rc, -ETIMEDOUT);
    assert_non_null(strstr(h[0].err.msg, "nothing was taken by host 1"));
}

static void tell(struct host *h)
{
    mt_net_tell(h->net, &(struct mt_err){.kind = MT_ERR_NO_FIT, .msg = "a drive failed"});
}

/* It waits for host 0, which is there; but host 2 has ended. */
TEST(a_host_that_ends_tells_why)
{
    struct host h[HOSTS];
    run(h, 3, 30, (void (*const[HOSTS])(struct host *)){nothing, recv_eight, tell});
    assert_int_equal(h[1].rc, -ECONNABORTED);
    assert_int_equal(h[1].err.kind, MT_ERR_NO_FIT);
    assert_non_null(strstr(h[1].err.msg, "host 2 has ended: a drive failed"));
}

static void tell_of_no_kind(struct host *h)
{
    mt_net_tell(h->net, &(struct mt_err){.kind = (enum mt_err_kind)(MT_ERR_CHECKPOINT + 1), .msg = "a later version"});
}

static void tell_of_a_kind_below_all(struct host *h)
{
    mt_net_tell(h->net, &(struct mt_err){.kind = (enum mt_err_kind)-2, .msg = "a damaged text"});
}

TEST(an_end_of_an_unknown_kind_is_a_plain_failure)
{
    struct host h[HOSTS];
    assert_int_equal(mt_net_err_kind(INT64_C(1) << 32 | MT_ERR_DEVICE), MT_ERR_RUNTIME);
    assert_int_equal(mt_net_err_kind(MT_ERR_CHECKPOINT), MT_ERR_CHECKPOINT);
    void (*const tells[])(struct host *) = {tell_of_no_kind, tell_of_a_kind_below_all};
    for (int i = 0; i < 2; i++) {
        run(h, 2, 30, (void (*const[HOSTS])(struct host *)){tells[i], recv_eight});
        assert_int_equal(h[1].rc, -ECONNABORTED);
        assert_int_equal(h[1].err.kind, MT_ERR_RUNTIME);
        assert_non_null(strstr(h[1].err.msg, i ? "host 0 has ended: a damaged text" : "host 0 has ended: a later version"));
    }
}

/* --- faults ---------------------------------------------------------------------------------------------------- */

/* Lengths around those at which messages are cut: none, in one operation, in one more, in several pieces; and two that
 * their length does not tell apart. */
static const size_t length_of[] = {0, 1, 4096, 4097, (4 << 20) + 3, 100, 100};
enum { LENGTHS = sizeof(length_of) / sizeof(length_of[0]) };

enum { ROOM = (4 << 20) + 8 };
static unsigned char sent[LENGTHS][ROOM]; /* by every host */

static void make_content(void)
{
    for (size_t i = 0; i < LENGTHS; i++)
        for (size_t k = 0; k < length_of[i]; k++)
            sent[i][k] = (unsigned char)(k * 31 + k / 4096 + i * 7 + 1);
}

/* Sends all lengths to the next host while all come from the one before. */
static void pass_around(struct host *h)
{
    const int own = mt_net_rank(h->net), n = mt_net_size(h->net);
    struct mt_net_message m[2][LENGTHS];
    unsigned char *in = mt_calloc(LENGTHS, ROOM);
    for (size_t i = 0; i < LENGTHS; i++) {
        m[0][i] = (struct mt_net_message){.host = (own + n - 1) % n, .data = in + i * ROOM, .bytes = length_of[i]};
        m[1][i] = (struct mt_net_message){.host = (own + 1) % n, .sends = true, .data = sent[i], .bytes = length_of[i]};
        mt_net_submit(h->net, &m[0][i]);
        mt_net_submit(h->net, &m[1][i]);
    }
    for (size_t i = 0; i < LENGTHS; i++)
        for (int d = 0; d < 2; d++) {
            int rc = mt_net_wait(h->net, &m[d][i], h->rc ? NULL : &h->err);
            if (rc && !h->rc)
                mt_net_tell(h->net, &h->err);
            h->rc = h->rc ? h->rc : rc;
        }
    for (size_t i = 0; i < LENGTHS; i++) /* what has come without an error is right, whatever came of the rest */
        h->sum += !m[0][i].rc && memcmp(in + i * ROOM, sent[i], length_of[i]);
    free(in);
}

static void (*const around[HOSTS])(struct host *) = {pass_around, pass_around, pass_around, pass_around};

TEST(many_are_under_way_at_once)
{
    struct host h[HOSTS];
    run(h, 3, 30, around);
    for (int i = 0; i < 3; i++)
        assert_true(!h[i].rc && !h[i].sum);
}

/* Every send of a host once with each fault: nothing hangs, no content is wrong, and whoever notices names a host. */
TEST(every_fault_on_the_way_is_noticed)
{
    static const char *const name[MT_N_NET_FAULTS] = {"dropped", "late", "flipped", "short", "doubled", "silent"};
    size_t sends = 0;
    struct host h[HOSTS];
    struct mt_net_fault f = {.host = 1, .nth = SIZE_MAX, .seconds = 0.02, .sends = &sends};
    run_faulty(h, 3, 30, around, &f);
    const size_t n = sends;
    assert_true(!h[0].rc && n >= LENGTHS);
    for (f.kind = 0; f.kind < MT_N_NET_FAULTS; f.kind++) {
        size_t noticed = 0, wrong = 0, named = 0;
        bool lost = f.kind == MT_NET_DROPPED || f.kind == MT_NET_SILENT;
        for (f.nth = 0; f.nth < n; f.nth++) {
            run_faulty(h, 3, lost ? 0.04 : 30, around, &f); /* what is not lost is noticed at once */
            noticed += h[2].rc != 0;
            named += h[2].rc && (strstr(h[2].err.msg, "host 1") || strstr(h[2].err.msg, "host 0"));
            for (int i = 0; i < 3; i++)
                wrong += h[i].sum + (h[i].rc && h[i].rc != -EPROTO && h[i].rc != -ETIMEDOUT && h[i].rc != -ECONNABORTED);
        }
        print_message("%-8s %zu of %zu sends: %zu noticed, %zu wrong\n", name[f.kind], n, n, noticed, wrong);
        assert_int_equal(wrong, 0);
        assert_int_equal(named, noticed);
        /* a message that is late is none that is lost; a double of the last one follows what nobody waits for */
        assert_int_equal(noticed, f.kind == MT_NET_LATE ? 0 : f.kind == MT_NET_DOUBLED ? n - 1 : n);
    }
}

TEST(one_process_has_no_hosts)
{
    mt_net *net;
    assert_false(mt_net_is_launched());
    assert_int_equal(mt_net_open(&net, NULL), 0);
    assert_null(net);
}

int main(void)
{
    alarm(100);
    make_content();
    return test_run();
}
