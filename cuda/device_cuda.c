/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA device: its backend table, how it is created and destroyed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "blas.h"
#include "cuda_priv.h"
#include "cuda_kind.h"
#include "hw/gpu.h"
#include "kernels.h"
#include "workspace.h"

static void destroy_streams(cudaStream_t *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (s[i])
            cudaStreamDestroy(s[i]);
        s[i] = NULL;
    }
}

static void cuda_destroy(mt_device *dev)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    cudaSetDevice(d->index);
    for (int s = 0; s < MT_N_STREAMS; s++)
        if (d->streams[s])
            cudaStreamSynchronize(d->streams[s]);
    for (int s = 0; s < MT_MAX_SIDES; s++)
        if (d->side[s])
            cudaStreamSynchronize(d->side[s]);
    destroy_streams(d->side, MT_MAX_SIDES);
    mt_cuda_attention_destroy(d);
    mt_cuda_blas_destroy(d);
    for (int s = 0; s < MT_N_STREAMS; s++)
        mt_cuda_ring_destroy(&d->rings[s]);
    mt_cuda_clock_destroy(&d->clock);
    destroy_streams(d->streams, MT_N_STREAMS);
    mt_cuda_pins_leave(d);
    mt_cuda_memory_destroy(d);
    for (int s = 0; s < MT_N_STREAMS; s++)
        pthread_mutex_destroy(&d->staging[s]);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

static void cuda_poison(mt_device *dev, void *ptr, size_t bytes)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    if (mt_cuda_enter(d, NULL) == 0)
        mt_cuda_check(d, cudaMemsetAsync(ptr, 0xff, bytes, mt_cuda_stream(d, MT_STREAM_COMPUTE)), NULL,
                      "poison of %zu bytes", bytes);
}

static int cuda_call(mt_device *dev, void (*fn)(void *ctx), void *ctx, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    return mt_cuda_enter(d, err)
        ?: mt_cuda_check(d, cudaLaunchHostFunc(d->streams[MT_STREAM_COMPUTE], fn, ctx), err, "call of the host");
}

static int cuda_open_sides(mt_device *dev, int n, void *memory, struct mt_err *err)
{
    struct mt_cuda_device *d = mt_cuda(dev);
    int rc = mt_cuda_enter(d, err);
    for (int i = 0; i < n && !rc; i++) {
        d->side_memory[i] = (char *)memory + (size_t)i * MT_CUDA_BLAS_BYTES;
        if (!d->side[i])
            rc = mt_cuda_check(d, cudaStreamCreateWithFlags(&d->side[i], cudaStreamNonBlocking), err,
                               "cannot create a side stream");
    }
    return rc;
}

static void cuda_turn_to(mt_device *dev, int side)
{
    mt_cuda(dev)->turned = side;
}

static size_t cuda_workspace(mt_device *dev, enum mt_dev_op op, const void *args)
{
    return mt_cuda_workspace(mt_cuda(dev)->sm, op, args);
}

/* Between what is said of attention and of products. */
static const char products_mark[] = " | products: ";

static void cuda_findings(mt_device *dev, struct mt_str *out)
{
    struct mt_str products = {0};
    mt_trials_print(mt_cuda(dev)->trials, out);
    mt_cuda_blas_choices(dev, &products);
    if (products.len)
        mt_str_printf(out, "%s%s", products_mark, products.p);
    out->failed |= products.failed;
    mt_str_finish(&products);
}

static bool cuda_adopt_findings(mt_device *dev, const char *text)
{
    const char *mark = strstr(text, products_mark);
    MT_FREED char *attention = strndup(text, mark ? (size_t)(mark - text) : strlen(text));
    bool taken = attention && mt_trials_read(mt_cuda(dev)->trials, attention);
    /* without the mark nothing was chosen, and that holds, too */
    return taken && mt_cuda_blas_adopt(dev, mark ? mark + strlen(products_mark) : "");
}

static void cuda_products_of(mt_device *dev, char *buf, size_t len)
{
    char blas[40];
    mt_cuda_blas_describe(blas, sizeof(blas));
    snprintf(buf, len, "%s, %s, sm_%d, %d multiprocessors", dev->limits.product, blas, dev->limits.capability,
             dev->limits.multiprocessors);
}

static const struct mt_device_backend cuda_backend = {
    .destroy = cuda_destroy,
    .alloc = mt_cuda_alloc,
    .free = mt_cuda_free,
    .bytes_used = mt_cuda_bytes_used,
    .poison = cuda_poison,
    .register_host = mt_cuda_register_host,
    .unregister_host = mt_cuda_unregister_host,
    .event_create = mt_cuda_event_create,
    .event_destroy = mt_cuda_event_destroy,
    .event_record = mt_cuda_event_record,
    .event_wait = mt_cuda_event_wait,
    .event_sync = mt_cuda_event_sync,
    .event_time_ns = mt_cuda_event_time_ns,
    .copy = mt_cuda_copy,
    .call = cuda_call,
    .open_sides = cuda_open_sides,
    .turn_to = cuda_turn_to,
    .sync = mt_cuda_sync,
    .status = mt_cuda_status,
    .range = mt_cuda_range,
    .findings = cuda_findings,
    .adopt_findings = cuda_adopt_findings,
    .share_findings = mt_cuda_attention_share,
    .products_of = cuda_products_of,
    .tune = mt_cuda_blas_tune,
    .products = mt_cuda_blas_choices,
    .adopt_products = mt_cuda_blas_adopt,
    .doubt = mt_cuda_attention_doubt,
    .distrust = mt_cuda_attention_distrust,
    .submit = mt_cuda_submit,
    .workspace = cuda_workspace,
};

/* The oldest GPU that the kernels are built for. */
enum { MIN_SM = 80 };

/* Before CUDA's first call. It makes 8 queues of a GPU's streams, and streams that share one wait for each other: a
 * device has COMPUTE, H2D and D2H, the side streams, and a ring's stream for each of the three. */
static void ask_for_queues(void)
{
    _Static_assert(2 * MT_N_STREAMS + MT_MAX_SIDES <= 16, "a queue for each stream");
    if (!getenv("CUDA_DEVICE_MAX_CONNECTIONS"))
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16", 0);
}

static int fail_no_gpu(cudaError_t rc, struct mt_err *err)
{
    int driver = 0, ours = 0;
    char text[300];
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    (void)cudaGetLastError();
    bool known = cudaDriverGetVersion(&driver) == cudaSuccess && cudaRuntimeGetVersion(&ours) == cudaSuccess;
    const char *shown = known && driver == 0 ? mt_hw_gpu_shown_by("") : NULL;
    if (shown)
        return mt_fail(err, MT_ERR_DEVICE, -ENODEV, "no GPU can be used: %s shows one, but the NVIDIA driver's library libcuda.so.1 "
                       "is not found: start a container with the GPU (--gpus all), or install the driver", shown);
    if (known && driver == 0)
        return mt_fail(err, MT_ERR_DEVICE, -ENODEV, "no GPU can be used: there is no NVIDIA driver; "
                       "install it, or set device.kind = cpu");
    if (known && rc == cudaErrorInsufficientDriver)
        return mt_fail(err, MT_ERR_DEVICE, -ENODEV, "no GPU can be used: the NVIDIA driver supports CUDA %d.%d and older, "
                       "this program was built with CUDA %d.%d: update the driver, or build with an older CUDA toolkit "
                       "(scripts/build takes one that serves); on a data-center GPU the package cuda-compat of the newer version will do, too",
                       driver / 1000, driver / 10 % 100, ours / 1000, ours / 10 % 100);
    if (rc == cudaErrorNoDevice && visible)
        return mt_fail(err, MT_ERR_DEVICE, -ENODEV, "no GPU can be used: CUDA_VISIBLE_DEVICES=%.60s hides all of them; change "
                       "that, or set device.kind = cpu", visible);
    return mt_fail(err, MT_ERR_DEVICE, -ENODEV, "no GPU can be used: %s; fix that, or set device.kind = cpu",
                   mt_cuda_error_text(text, sizeof(text), rc));
}

static int find_gpu(int index, struct cudaDeviceProp *prop, struct mt_err *err)
{
    int n = 0;
    char text[300];
    ask_for_queues();
    cudaError_t rc = cudaGetDeviceCount(&n);
    if (rc != cudaSuccess)
        return fail_no_gpu(rc, err);
    if (index < 0 || index >= n)
        return mt_fail(err, MT_ERR_DEVICE, -ENODEV, "there is no GPU %d: %d %s found; change device.index, or set "
                       "device.kind = cpu", index, n, n == 1 ? "was" : "were");
    rc = cudaGetDeviceProperties(prop, index);
    if (rc != cudaSuccess)
        return mt_fail(err, MT_ERR_DEVICE, -ENODEV, "GPU %d: %s", index,
                       mt_cuda_error_text(text, sizeof(text), rc));
    if (prop->major * 10 + prop->minor < MIN_SM)
        return mt_fail(err, MT_ERR_DEVICE, -ENODEV,
                       "GPU %d (%s) has compute capability %d.%d; %d.%d or later is needed", index,
                       prop->name, prop->major, prop->minor, MIN_SM / 10, MIN_SM % 10);
    rc = cudaSetDevice(index) ?: mt_cuda_has_code();
    return rc == cudaSuccess ? 0
                             : mt_fail(err, MT_ERR_DEVICE, -ENODEV, "GPU %d (%s, compute capability %d.%d): %s", index, prop->name,
                                       prop->major, prop->minor, mt_cuda_error_text(text, sizeof(text), rc));
}

void mt_cuda_probe(struct mt_device_info *out, int index)
{
    struct cudaDeviceProp prop;
    struct mt_err err;
    char text[160];
    *out = (struct mt_device_info){.present = false};
    if (find_gpu(index, &prop, &err)) {
        out->shown = mt_cuda_count() > 0 || mt_hw_gpu_shown_by("");
        snprintf(out->text, sizeof(out->text), "%.500s", err.msg);
        return;
    }
    cudaError_t rc = cudaMemGetInfo(&out->free_bytes, &out->total_bytes);
    int limited = 0; /* a limit on the time of kernels is set on GPUs with a display */
    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&limited, cudaDevAttrKernelExecTimeout, index);
    out->has_display = limited;
    out->is_integrated = prop.integrated;
    out->is_paged = mt_hw_on_wsl();
    out->present = rc == cudaSuccess;
    out->shown = !out->present;
    if (out->present)
        snprintf(out->text, sizeof(out->text), "%.100s, compute capability %d.%d, %d multiprocessors",
                 prop.name, prop.major, prop.minor, prop.multiProcessorCount);
    else
        snprintf(out->text, sizeof(out->text), "%.50s: %s", prop.name,
                 mt_cuda_error_text(text, sizeof(text), rc));
}

int mt_cuda_count(void)
{
    int n = 0;
    ask_for_queues();
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : ((void)cudaGetLastError(), 0);
}

void mt_cuda_identify(char *out, size_t len, int index)
{
    struct cudaDeviceProp prop;
    const unsigned char *b = (const unsigned char *)prop.uuid.bytes;
    *out = 0;
    ask_for_queues();
    if (cudaGetDeviceProperties(&prop, index) != cudaSuccess)
        (void)cudaGetLastError();
    else
        snprintf(out, len,
                 "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                 b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
                 b[14], b[15]);
}

static int create_streams(struct mt_cuda_device *d, struct mt_err *err)
{
    int rc = 0;
    for (int s = 0; s < MT_N_STREAMS && !rc; s++)
        rc = mt_cuda_check(d, cudaStreamCreateWithFlags(&d->streams[s], cudaStreamNonBlocking), err,
                           "cannot create a stream");
    if (!rc)
        mt_cuda_name_streams(d);
    return rc;
}

static void set_limits(struct mt_cuda_device *d, const struct cudaDeviceProp *prop,
                       const struct mt_device_params *p)
{
    struct mt_device_limits *l = &d->base.limits;
    char blas[40], attention[40], pci[20] = "", uuid[48] = "";
    mt_cuda_blas_describe(blas, sizeof(blas));
    mt_cuda_attention_describe(d, attention, sizeof(attention));
    *l = mt_device_kind_limits(&mt_cuda_kind, p->budget_bytes - mt_arena_used(d->arena), p->n_threads);
    l->native_bf16 = true;
    l->e4m3 = d->sm >= 89;
    l->capability = d->sm;
    l->multiprocessors = prop->multiProcessorCount;
    snprintf(l->product, sizeof(l->product), "%.60s", prop->name);
    if (cudaDeviceGetPCIBusId(pci, sizeof(pci), d->index) != cudaSuccess)
        (void)cudaGetLastError();
    mt_cuda_identify(uuid, sizeof(uuid), d->index);
    snprintf(l->address, sizeof(l->address), "%s, %s", pci, uuid);
    snprintf(l->name, sizeof(l->name), "cuda %d (%.40s, sm_%d, %.20s, attention: %.20s)", d->index,
             prop->name, d->sm, blas, attention);
}

int mt_cuda_device_create(mt_device **out, const struct mt_device_params *p, struct mt_err *err)
{
    struct cudaDeviceProp prop;
    int rc = find_gpu(p->index, &prop, err);
    if (rc)
        return rc;
    struct mt_cuda_device *d = mt_calloc(1, sizeof(*d));
    if (!d)
        return mt_fail_nomem(err, "the cuda device", sizeof(*d));
    d->base.backend = &cuda_backend;
    d->index = p->index;
    d->sm = prop.major * 10 + prop.minor;
    d->n_threads = p->n_threads;
    d->apart = getenv("MEGATRAIN_CUDA_APART") != NULL;
    pthread_mutex_init(&d->lock, NULL);
    for (int s = 0; s < MT_N_STREAMS; s++)
        pthread_mutex_init(&d->staging[s], NULL);
    rc = mt_cuda_enter(d, err)
        ?: mt_cuda_pins_join(d, err)
        ?: mt_cuda_memory_create(d, p->budget_bytes, err)
        ?: create_streams(d, err)
        ?: mt_cuda_clock_create(d, err)
        ?: mt_cuda_blas_create(d, err)
        ?: mt_cuda_attention_create(d, prop.multiProcessorCount, err);
    if (rc) {
        cuda_destroy(&d->base);
        return rc;
    }
    set_limits(d, &prop, p);
    *out = &d->base;
    return 0;
}
