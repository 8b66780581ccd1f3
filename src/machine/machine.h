/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdio.h>

#include "base/json.h"
#include "base/strbuf.h"
#include "device/meter.h"
#include "optim/optimizer.h"
#include "settings/settings.h"

/**
 * What a machine can do, as the simulator needs it: an INI file, written by `megatrain probe all` or by
 * hand from data sheets. Every rate says whether it is rated (a data sheet, or derived from one) or
 * measured, and may say where it is from. All rates are sustained, with random data.
 */
enum mt_rate_source { MT_RATE_NONE, MT_RATE_RATED, MT_RATE_MEASURED };
struct mt_rate {
    double value;
    enum mt_rate_source source;
};

/* X(id, section, key, unit, help); units: 1e9 bytes a second (GB/s), 2^30 bytes (GiB) */
#define MT_MACHINE_RATES(X)                                                                        \
    X(GEMM_BF16, "compute", "gemm_bf16_tflops", "TFLOP/s", "Large matrix products, f32 sums.")     \
    X(GEMM_F32, "compute", "gemm_f32_tflops", "TFLOP/s", "The same in f32.")                       \
    X(GEMM_E4M3, "compute", "gemm_e4m3_tflops", "TFLOP/s", "The same in FP8; none: not there.")    \
    X(ATTENTION, "compute", "attention_tflops", "TFLOP/s", "Attention forward in bf16.")           \
    X(ATTENTION_BWD, "compute", "attention_bwd_tflops", "TFLOP/s", "Attention backward in bf16.")  \
    X(DEVICE_GBS, "compute", "memory_gbs", "GB/s", "Device memory, read and written.")             \
    X(OP_US, "compute", "operation_us", "us", "Fixed cost of a device operation.")                 \
    X(PEAK_BF16, "compute", "peak_bf16_tflops", "TFLOP/s", "Data sheet, dense; for utilisation.")  \
    X(PEAK_F32, "compute", "peak_f32_tflops", "TFLOP/s", "Data sheet.")                            \
    X(PEAK_E4M3, "compute", "peak_e4m3_tflops", "TFLOP/s", "Data sheet, dense, with f32 sums.")    \
    X(POWER, "compute", "power_watts", "W", "Of the machine under load.")                          \
    X(DEVICE_GIB, "compute", "memory_gib", "GiB", "Device memory.")                                \
    X(CAPABILITY, "compute", "capability", "", "cuda: compute capability times 10; none: not known.") \
    X(MULTIPROCESSORS, "compute", "multiprocessors", "", "cuda: those that products share; none: not known.") \
    X(H2D, "link", "h2d_gbs", "GB/s", "Host to device alone.")                                     \
    X(D2H, "link", "d2h_gbs", "GB/s", "Device to host alone.")                                     \
    X(H2D_BOTH, "link", "h2d_both_gbs", "GB/s", "Host to device while the other direction is busy.")     \
    X(D2H_BOTH, "link", "d2h_both_gbs", "GB/s", "Device to host while the other direction is busy.")     \
    X(H2D_SHORT, "link", "h2d_short_gbs", "GB/s", "cpu: copies of 2 MiB, from memory to caches.")  \
    X(D2H_SHORT, "link", "d2h_short_gbs", "GB/s", "cpu: copies of 2 MiB, from caches to memory.")  \
    X(LINK_GPUS, "link", "gpus", "", "GPUs behind a link of these rates, as behind a switch; else 1.") \
    X(COPY_US, "link", "copy_us", "us", "Fixed cost of a copy; cpu: until who waits for it goes on.") \
    X(CORES, "host", "cores", "", "Cores that may be used.")                                       \
    X(HOST_GIB, "host", "memory_gib", "GiB", "Host memory.")                                       \
    X(DRAM, "host", "dram_gbs", "GB/s", "Host memory, read and written, all cores copying.")       \
    X(COPY, "host", "copy_gbs", "GB/s", "One thread copying: bytes copied.")                       \
    X(SHARE_COPY, "host", "compute_beside_copy", "", "Speed of compute beside a copying thread.")  \
    X(SHARE_UPDATE, "host", "compute_beside_adam", "", "Speed of compute beside the optimizer.")     \
    X(UPDATE_SHARE, "host", "adam_beside_compute", "", "Speed of the optimizer beside compute.")     \
    X(COPY_SHARE, "host", "copy_beside_compute", "", "Speed of a copy beside compute.")            \
    X(STEP_US, "host", "step_us", "us", "Fixed cost of a step: data, norm, start.")                \
    X(TOKEN_NS, "host", "token_ns", "ns", "Cost of a token on the host: sampling, upload.")        \
    X(DRIVES, "disk", "drives", "", "Drives to stripe over.")                                      \
    X(READ, "disk", "read_gbs", "GB/s", "One drive, reading alone.")                               \
    X(WRITE, "disk", "write_gbs", "GB/s", "One drive, writing alone, sustained.")                  \
    X(READ_BOTH, "disk", "read_both_gbs", "GB/s", "One drive, reading while it writes.")           \
    X(WRITE_BOTH, "disk", "write_both_gbs", "GB/s", "One drive, writing while it reads.")          \
    X(DISK_US, "disk", "request_us", "us", "Latency of a request.")                                \
    X(ENDURANCE, "disk", "endurance_tb", "TB", "One drive's rated writes.")                        \
    X(DISK_GIB, "disk", "size_gib", "GiB", "Space for training state on one drive.")

enum mt_rate_id {
#define MT_RATE_ENUM(id, section, key, unit, help) MT_RATE_##id,
    MT_MACHINE_RATES(MT_RATE_ENUM)
#undef MT_RATE_ENUM
    MT_N_RATES,
};

/** A timed operation. */
struct mt_op_sample {
    struct mt_metered op;
    double seconds;
};

/* Bytes of the copies that are measured. */
enum { MT_SHORT_COPY_BYTES = 2 << 20, MT_LONG_COPY_BYTES = 64 << 20 };
enum { MT_MACHINE_VERSION = 1, MT_MAX_UPDATES = 272, MT_MAX_FROM = 128 };

/** A timed update. */
struct mt_update_sample {
    char name[MT_OPTIMIZER_NAME]; /* mt_update_form_name(); "": that of mt_adamw, which has a section of its own */
    int threads;
    double ns; /* a parameter, bf16 gradients */
};
struct mt_machine {
    char name[128];
    char gpu[64];          /* of a stored machine: the GPU, as its driver names it; else "" */
    char fingerprint[256]; /* of the hardware it was measured on; "" for a file written by hand */
    bool cpu;              /* compute and copies share the host's cores and memory */
    struct mt_rate rate[MT_N_RATES];
    char from[MT_N_RATES][MT_MAX_FROM]; /* where each rated one is from, in words; "": its file does not say */
    char adam_from[MT_MAX_FROM];
    enum mt_rate_source adam_source;
    struct mt_update_sample updates[MT_MAX_UPDATES]; /* by name and threads: those of mt_adamw first */
    int n_updates;
    struct mt_op_sample *samples; /* owned */
    size_t n_samples, cap_samples;
};

/** Reads a profile; messages are "file:line: ...". Finish with mt_machine_finish(). */
int mt_machine_read(struct mt_machine *out, const char *path, struct mt_err *err);
/** The same, without mt_machine_complete(). */
int mt_machine_parse(struct mt_machine *out, const char *path, struct mt_err *err);
void mt_machine_print(const struct mt_machine *m, struct mt_str *out);
int mt_machine_write(const struct mt_machine *m, const char *path, struct mt_err *err);
/** Adds rates by section and key, each {"value", "unit", "source"}; operations and Adam as in the file. */
void mt_machine_to_json(const struct mt_machine *m, cJSON *o);
void mt_machine_finish(struct mt_machine *m);
/** Sets a rate that is not measured, and where it is from. */
__attribute__((format(printf, 4, 5))) void mt_machine_rate(struct mt_machine *m, enum mt_rate_id id, double value,
                                                           const char *from, ...);
/** Sets one that was measured. */
void mt_machine_measured(struct mt_machine *m, enum mt_rate_id id, double value);
/** A line of the list of prices. */
struct mt_price {
    char key[80];     /* "compute.gemm_bf16_tflops"; "adam.16": for so many threads */
    const char *unit;
    struct mt_rate rate;
    const char *from; /* of the machine; "": it is measured, or its file does not say */
};
/** All rates that the simulator takes its times from but those of single operations and of other optimizers; owned by
 * the caller. NULL: out of memory. */
struct mt_price *mt_machine_prices(const struct mt_machine *m, size_t *n);
/** How times follow from rates, in lines of text. */
extern const char mt_machine_rules[];
/** "cpu" or "cuda". */
static inline const char *mt_machine_device_kind(const struct mt_machine *m)
{
    return m->cpu ? "cpu" : "cuda";
}
/** Derives missing rates from others; an error names a missing rate that cannot be derived. */
int mt_machine_complete(struct mt_machine *m, const char *path, struct mt_err *err);

/** The rate of a data sheet that utilisation is a share of. */
static inline enum mt_rate_id mt_machine_peak(const struct mt_numerics *n)
{
    return n->compute == MT_COMPUTE_FP8 ? MT_RATE_PEAK_E4M3 :
           n->dtype == MT_BF16          ? MT_RATE_PEAK_BF16 :
                                          MT_RATE_PEAK_F32;
}

/** Adds a sample, or replaces that of the same operation; false: out of memory. */
bool mt_machine_add_sample(struct mt_machine *m, const struct mt_metered *op, double seconds);
bool mt_same_operation(const struct mt_metered *a, const struct mt_metered *b);
/** An operation as "gemm_nt.bf16.0.4096x512x512:2.15e9:8.9e6" (name, dtype, flags, shape, flops, bytes), and back;
 * false if the text is not an operation. */
void mt_operation_format(char *buf, size_t len, const struct mt_metered *op);
bool mt_operation_parse(struct mt_metered *op, const char *text);

/**
 * Seconds of a device operation when nothing else runs: its sample, or an estimate from the rates of the nearest
 * samples of its kind (weighted by inverse distance of the logarithms of the shape), or from the machine's rates.
 */
double mt_machine_op_seconds(const struct mt_machine *m, const struct mt_metered *op);
/** Nanoseconds per parameter of an update with `threads`, f32 moments and bf16 gradients. Linear between samples; with
 * fewer threads than in any sample, proportional to 1/threads. */
double mt_machine_update_ns(const struct mt_machine *m, int threads);
/** The same of the numerics' optimizer, masters, rounding and gradients: measured; if only with the nearest rounding or with
 * masters of 32 bits, by that; else by bytes and instructions. */
double mt_machine_optimizer_ns(const struct mt_machine *m, const struct mt_numerics *num, int threads);
/** Adds a sample of an optimizer, or replaces it; false: there are too many. */
bool mt_machine_add_update(struct mt_machine *m, const char *name, int threads, double ns);

/** Path of this user's measured profile for the device kind and thread count. */
void mt_machine_cache_path(char *buf, size_t len, const char *kind, int threads);
/** The model of processor and the instructions of it that rates depend on, from the text of /proc/cpuinfo. */
void mt_machine_processor(char *buf, size_t len, FILE *cpuinfo);
/** What a measured profile depends on: processor, cores, memory, device. */
void mt_machine_fingerprint(char *buf, size_t len, const char *device_name, int threads);
/**
 * The cached profile of this machine. -ENOENT: there is none; -ESTALE: it has another version or was measured on
 * other hardware, and err says which.
 */
int mt_machine_load_cached(struct mt_machine *out, const char *kind, const char *device_name,
                           int threads, struct mt_err *err);
