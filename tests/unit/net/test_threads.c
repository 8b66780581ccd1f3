/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between hosts: what arrives, in which order, and how waits end. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "net/threads.h"

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
static void run(struct host h[HOSTS], int n, double deadline, void (*const f[HOSTS])(struct host *h))
{
    mt_net_threads *t;
    pthread_t thread[HOSTS];
    assert_int_equal(mt_net_threads_create(&t, n, deadline, NULL), 0);
    for (int i = 0; i < n; i++) {
        h[i] = (struct host){.net = mt_net_threads_of(t, i), .run = f[i]};
        assert_int_equal(pthread_create(&thread[i], NULL, start, &h[i]), 0);
    }
    for (int i = 0; i < n; i++)
        pthread_join(thread[i], NULL);
    mt_net_threads_destroy(&t);
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

static void messages_arrive_in_order(void **state)
{
    struct host h[HOSTS];
    (void)state;
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

static void another_size_is_refused(void **state)
{
    struct host h[HOSTS];
    (void)state;
    run(h, 2, 0.2, (void (*const[HOSTS])(struct host *)){send_four, recv_eight});
    assert_int_equal(h[1].rc, -EPROTO);
    assert_non_null(strstr(h[1].err.msg, "host 0 sent 4 bytes where 8 were expected"));
}

static void a_wait_ends_at_its_deadline(void **state)
{
    struct host h[HOSTS];
    (void)state;
    run(h, 2, 0.2, (void (*const[HOSTS])(struct host *)){nothing, recv_eight});
    assert_int_equal(h[1].rc, -ETIMEDOUT);
    assert_non_null(strstr(h[1].err.msg, "nothing came from host 0"));
    run(h, 2, 0.2, (void (*const[HOSTS])(struct host *)){send_four, nothing});
    assert_int_equal(h[0].rc, -ETIMEDOUT);
    assert_non_null(strstr(h[0].err.msg, "nothing was taken by host 1"));
}

static void tell(struct host *h)
{
    mt_net_tell(h->net, "a drive failed");
}

/* It waits for host 0, which is there; but host 2 has ended. */
static void a_host_that_ends_tells_why(void **state)
{
    struct host h[HOSTS];
    (void)state;
    run(h, 3, 30, (void (*const[HOSTS])(struct host *)){nothing, recv_eight, tell});
    assert_int_equal(h[1].rc, -ECONNABORTED);
    assert_non_null(strstr(h[1].err.msg, "host 2 has ended: a drive failed"));
}

static void one_process_has_no_hosts(void **state)
{
    mt_net *net;
    (void)state;
    assert_false(mt_net_is_launched());
    assert_int_equal(mt_net_open(&net, NULL), 0);
    assert_null(net);
}

int main(void)
{
    alarm(100);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_arrive_in_order),
        cmocka_unit_test(another_size_is_refused),
        cmocka_unit_test(a_wait_ends_at_its_deadline),
        cmocka_unit_test(a_host_that_ends_tells_why),
        cmocka_unit_test(one_process_has_no_hosts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
