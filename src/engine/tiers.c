/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Divides host memory. What is kept in it is chosen by the disk traffic that a byte of host memory saves in a step. A
 * byte of weights saves two reads (update, backward) and a write; of gradients a write and a read; of masters and
 * moments a read and a write. Among units the first are kept; with updates under backward evenly spread ones. Spilled
 * activations get buffers before whole units do.
 */
#include <string.h>

#include "base/mem.h"
#include "engine/map.h"
#include "engine/records.h"
#include "engine/share.h"
#include "model/ranges.h"
#include "schedule/build.h"
#include "store/files/file_weights.h"

enum {
    RING = 6, /* two pieces each being read, updated, written */
    LARGE_PIECE = 4 << 20,
    MIN_PIECE = 64 << 10,
    MANY_PIECES = 64, /* of a unit: enough to overlap; more only make the step's program longer */
    SPILL_SHARE = 16, /* of host memory */
};

struct tiers {
    struct mt_engine_plan *plan;
    const struct mt_engine_params *p;
    struct mt_plane_desc desc[MT_N_PLANES];
    mt_plane_bits of_trained; /* kinds that trained ranges have */
    mt_plane_bits wide;       /* that files have in another format */
    mt_plane_bits trained;   /* kinds that updates read and write */
    mt_plane_bits gradients; /* that backward writes and updates read */
    mt_plane_bits fixed;     /* whose home is fixed, besides those in files */
    enum mt_base_place base;  /* where frozen weights are kept */
    uint64_t host; /* bytes of host memory to divide */
    mt_plane_bits moved;      /* by move_last() */
    const mt_plane_bits *was; /* [n_units] on the disk before keep_first() */
    size_t device_bytes[MT_N_POOLS]; /* of a buffer of each device pool: independent of where planes are */
};

/* Sorts the kinds of planes by use. */
static void sort_kinds(struct tiers *t)
{
    mt_plane_descs(t->desc, t->p->train ? t->p->numerics.optimizer : NULL, t->p->layout->master,
                   t->p->numerics.grad_dtype);
    enum mt_base_place base = t->base;
    t->fixed = base == MT_BASE_HOST || base == MT_BASE_DISK ? mt_frozen_planes() : 0;
    /* updates under backward, and other hosts if units have no owners, find gradients in host memory */
    bool stay = mt_program_has_ring(&t->plan->program) || (mt_engine_n_hosts(t->p) > 1 && !t->plan->program.owned);
    for (int k = 0; k < MT_N_PLANES; k++) {
        mt_plane_bits bit = (mt_plane_bits)1 << k;
        t->of_trained |= t->desc[k].range == MT_RANGE_TRAINED ? bit : 0;
        t->wide |= t->desc[k].range == MT_RANGE_IN_FILE_WIDE ? bit : 0;
        if (t->desc[k].role == MT_ROLE_GRADIENT) {
            t->gradients |= bit;
            t->fixed |= stay ? bit : 0;
        } else if (t->desc[k].apart || t->desc[k].on_device)
            t->fixed |= t->of_trained & bit;
        else
            t->trained |= t->of_trained & bit;
    }
}

static size_t plane_bytes(const struct tiers *t, size_t unit, int k)
{
    return t->plan->planes[unit].bytes[k];
}

static mt_plane_bits has_planes(const struct tiers *t, size_t unit)
{
    return t->plan->planes[unit].has;
}

/* Takes one of a set of planes, which is not empty. */
static int take(mt_plane_bits *planes)
{
    int k = __builtin_ctz(*planes);
    *planes &= *planes - 1;
    return k;
}

static uint64_t bytes_of(const struct tiers *t, size_t unit, mt_plane_bits planes)
{
    uint64_t sum = 0;
    for (mt_plane_bits left = planes & has_planes(t, unit); left;)
        sum += plane_bytes(t, unit, take(&left));
    return sum;
}

/* Planes of a unit that are read in place from files, unless its block is one of the base_blocks that are not. */
static mt_plane_bits file_planes(const struct tiers *t, size_t unit)
{
    return t->base == MT_BASE_FILES ? has_planes(t, unit) & mt_unit_file_planes(&t->p->layout->units[unit]) : 0;
}

/* If hosts own units, what only the owner of this one needs: what updates use and no load does. */
static mt_plane_bits owned_planes(const struct tiers *t, size_t unit)
{
    mt_plane_bits owned = t->plan->program.owned ? t->of_trained & has_planes(t, unit) : 0;
    return owned & ~mt_unit_loaded_planes(t->p->layout, unit, t->p->numerics.dtype);
}

/* Computes each unit's planes once: they are needed often. */
static void measure_units(const struct tiers *t)
{
    for (size_t u = 0; u < t->plan->program.n_units; u++) {
        struct mt_unit_planes *planes = &t->plan->planes[u];
        planes->has = 0;
        for (int k = 0; k < MT_N_PLANES; k++) {
            size_t n = mt_unit_n_elems(&t->p->layout->units[u], t->desc, (enum mt_plane_kind)k);
            n = k == MT_PLANE_GRAD && t->plan->units[u].grad_in_ring ? 0 : n;
            planes->has |= (mt_plane_bits)(n > 0) << k;
            planes->bytes[k] = mt_align_up(mt_plane_desc_bytes(&t->desc[k], n), MT_DISK_ALIGN);
        }
        bool own = mt_program_owner(&t->plan->program, u) == t->p->placement.host;
        t->plan->owned[u] = owned_planes(t, u);
        t->plan->elsewhere[u] = own ? 0 : t->plan->owned[u];
    }
}

/* Bytes that several planes have of piece_align elements. */
static size_t aligned_bytes(const struct tiers *t, mt_plane_bits kinds)
{
    size_t sum = 0;
    while (kinds)
        sum += mt_plane_desc_bytes(&t->desc[take(&kinds)], t->plan->program.piece_align);
    return sum;
}

/* Sets the fields of the unit's shape that depend on where its planes are. */
static void describe(const struct tiers *t, size_t unit)
{
    struct mt_unit_shape *s = &t->plan->units[unit];
    mt_plane_bits disk = t->plan->on_disk[unit], files = t->plan->in_files[unit];
    bool updates = t->p->train && s->trainable;
    mt_plane_bits loaded = mt_unit_loaded_planes(t->p->layout, unit, t->p->numerics.dtype);
    size_t converted = bytes_of(t, unit, files & loaded & t->wide);
    size_t trained = bytes_of(t, unit, (disk | files) & loaded & t->of_trained);
    s->staged_bytes = bytes_of(t, unit, (disk | files) & loaded);
    s->staged_bytes_adapters = s->adapter_bytes ? trained : 0;
    s->staged_bytes_written = updates ? trained : 0;
    s->staged_bytes_read = converted ? s->staged_bytes - converted + t->p->layout->units[unit].wide_file_bytes : 0;
    s->grad_on_disk = disk & t->gradients;
    s->state_bytes_written = updates ? aligned_bytes(t, disk & t->trained & ~loaded) : 0;
    s->state_bytes = updates ? s->state_bytes_written + aligned_bytes(t, disk & t->gradients) : 0;
}

static void describe_all(const struct tiers *t)
{
    for (size_t u = 0; u < t->plan->program.n_units; u++)
        describe(t, u);
}

static uint64_t subtract(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* Bytes of the unit's planes in host memory, or on drives: of those that its owner alone has, or of the others. */
static uint64_t bytes_in(const struct tiers *t, size_t unit, enum mt_map_place place, bool owned)
{
    mt_plane_bits disk = t->plan->on_disk[unit], files = t->plan->in_files[unit];
    mt_plane_bits here = place == MT_MAP_DRIVES ? disk : ~(disk | files);
    return bytes_of(t, unit, here & (owned ? t->plan->owned[unit] : ~t->plan->owned[unit]));
}

/* Of the host that has most, less what it may have beyond the others: all choose the same places, as the step is one
 * program. */
static uint64_t planes_in_host(const struct tiers *t)
{
    uint64_t sum = 0, own[MT_MAX_LANES] = {0}, most = 0;
    for (size_t u = 0; u < t->plan->program.n_units; u++) {
        sum += bytes_in(t, u, MT_MAP_MEMORY, false);
        own[mt_program_owner(&t->plan->program, u)] += bytes_in(t, u, MT_MAP_MEMORY, true);
    }
    for (size_t i = 0; i < MT_MAX_LANES; i++)
        most = MT_MAX(most, subtract(own[i], t->p->more[i]));
    return sum + most;
}

/* Windows through which planes on the disk, in files and on other hosts are loaded and saved (store/planes.h). */
static uint64_t windows(const struct tiers *t)
{
    uint64_t sum = 0;
    size_t most[MT_N_PLANES] = {0};
    for (size_t u = 0; u < t->plan->program.n_units; u++) {
        mt_plane_bits left = t->plan->on_disk[u] | t->plan->in_files[u] | t->plan->owned[u];
        for (left &= ~t->gradients; left;) {
            int k = take(&left);
            most[k] = MT_MAX(most[k], plane_bytes(t, u, k));
        }
    }
    for (int k = 0; k < MT_N_PLANES; k++)
        sum += MT_MIN(most[k], (size_t)MT_PLANE_WINDOW);
    return sum;
}

/* Bytes of the sums of planes on the disk. */
static uint64_t sums(const struct tiers *t)
{
    uint64_t n = 0;
    for (size_t u = 0; u < t->plan->program.n_units && t->p->placement.nvme_checksums; u++)
        for (mt_plane_bits left = t->plan->on_disk[u]; left;) {
            int k = take(&left);
            n += mt_disk_sums_n(plane_bytes(t, u, k), mt_plane_desc_bytes(&t->desc[k], t->plan->program.piece_elems),
                                MT_DISK_BLOCK);
        }
    return n * sizeof(uint64_t);
}

static void buffer_bytes(const struct tiers *t, size_t bytes[MT_N_POOLS])
{
    for (int i = 0; i < MT_N_POOLS; i++)
        bytes[i] = mt_pools[i].device ? t->device_bytes[i] : 0;
    mt_program_host_buffer_bytes(&t->plan->program, bytes);
}

static uint64_t host_pools(const struct tiers *t)
{
    size_t bytes[MT_N_POOLS];
    uint64_t sum = 0;
    buffer_bytes(t, bytes);
    for (int i = 0; i < MT_N_POOLS; i++)
        if (!mt_pools[i].device)
            sum += bytes[i] * (uint64_t)t->plan->program.n_buffers[0][i];
    return sum;
}

static uint64_t in_use(const struct tiers *t)
{
    return planes_in_host(t) + windows(t) + sums(t) + host_pools(t);
}

static bool fits(const struct tiers *t)
{
    return in_use(t) <= t->host;
}

/* The fewest host buffers with which the step works. */
static void least_buffers(const struct tiers *t)
{
    size_t bytes[MT_N_POOLS];
    struct mt_program_params *p = &t->plan->program;
    buffer_bytes(t, bytes);
    for (int i = 0; i < MT_N_POOLS; i++)
        if (!mt_pools[i].device)
            p->n_buffers[0][i] = bytes[i] ? mt_pools[i].least : 0;
    if (bytes[MT_POOL_STATE])
        p->n_buffers[0][MT_POOL_STATE] = RING;
    mt_program_ring_buffers(p, p->n_buffers[0]);
}

/* Pieces large enough for drives, in a ring of at most an eighth of host memory. */
static void choose_piece(const struct tiers *t)
{
    struct mt_program_params *p = &t->plan->program;
    size_t largest = MT_PIECE_ALIGN, widest = p->piece_align;
    for (size_t u = 0; u < p->n_units; u++) {
        largest = MT_MAX(largest, t->plan->units[u].update_elems);
        widest = MT_MAX(widest, t->plan->units[u].state_bytes);
    }
    size_t piece = t->p->placement.piece_elems;
    if (!piece) {
        size_t most = MT_MAX((size_t)LARGE_PIECE, largest / MANY_PIECES);
        uint64_t bytes = t->host / 8 / RING;
        uint64_t fit = bytes / widest * p->piece_align + bytes % widest * p->piece_align / widest;
        piece = (size_t)MT_MIN(fit, (uint64_t)most);
        piece = MT_MAX(piece, (size_t)MIN_PIECE);
    }
    /* a lower bound of the piece keeps the step's program short */
    piece = MT_MAX(piece, mt_div_up(largest, 30000));
    bool whole = t->p->train && t->p->numerics.optimizer->grain == MT_GRAIN_TENSOR;
    p->piece_elems = mt_align_up(whole ? largest : MT_MIN(piece, largest), p->piece_align);
}

static void put(const struct tiers *t, size_t unit, mt_plane_bits planes, bool on_disk)
{
    planes &= has_planes(t, unit) & ~t->fixed & ~file_planes(t, unit);
    t->plan->on_disk[unit] =
        on_disk ? t->plan->on_disk[unit] | planes : t->plan->on_disk[unit] & ~planes;
    describe(t, unit);
}

/* By bisection: the fewest n, above `low`, with which the rest fits, as it does with `high`; or the most, below `high`,
 * with which it does, as with `low`. */
static void place_as_fits(const struct tiers *t, void (*place)(const struct tiers *, size_t), size_t low, size_t high,
                          bool fewest)
{
    while (high - low > 1) {
        size_t mid = low + (high - low) / 2;
        place(t, mid);
        *(fits(t) == fewest ? &high : &low) = mid;
    }
    place(t, fewest ? high : low);
}

/* Number of blocks with planes that can be read in place: of layers, which a step reads twice, or of the embedding and
 * the head, which it reads once. */
static size_t file_blocks(const struct tiers *t, bool layers)
{
    const struct mt_unit *unit = t->p->layout->units;
    size_t n = 0;
    int last = -1;
    for (size_t u = 0; u < t->plan->program.n_units; u++) {
        bool counts = file_planes(t, u) && (unit[u].kind == MT_UNIT_LAYER) == layers;
        n += counts && unit[u].block != last;
        last = counts ? unit[u].block : last;
    }
    return n;
}

static size_t all_file_blocks(const struct tiers *t)
{
    return file_blocks(t, true) + file_blocks(t, false);
}

/* Keeps these planes of n blocks of one kind in host memory: spread evenly, so that drives are never idle for long. */
static void keep_kind(const struct tiers *t, bool layers, size_t n)
{
    const struct mt_unit *unit = t->p->layout->units;
    size_t of = file_blocks(t, layers), i = 0; /* blocks so far */
    int last = -1;
    for (size_t u = 0; u < t->plan->program.n_units; u++) {
        mt_plane_bits planes = file_planes(t, u);
        if ((unit[u].kind == MT_UNIT_LAYER) != layers)
            continue;
        i += planes && unit[u].block != last;
        last = planes ? unit[u].block : last;
        t->plan->in_files[u] = planes && i * n / of > (i - 1) * n / of ? 0 : planes;
    }
}

/* Keeps these planes of n blocks in host memory, those first of which a byte saves most. */
static void keep_blocks(const struct tiers *t, size_t n)
{
    size_t layers = MT_MIN(n, file_blocks(t, true));
    keep_kind(t, true, layers);
    keep_kind(t, false, n - layers);
    t->plan->base_blocks = (int64_t)n;
    describe_all(t);
}

/* Puts frozen weights where memory.base and memory.base_blocks say. */
static void put_base(const struct tiers *t)
{
    for (size_t u = 0; u < t->plan->program.n_units; u++)
        t->plan->on_disk[u] = t->base == MT_BASE_DISK ? has_planes(t, u) & mt_frozen_planes() : 0;
    size_t n = (size_t)MT_MAX(t->p->placement.base_blocks, 0);
    keep_blocks(t, MT_MIN(n, all_file_blocks(t)));
}

/*
 * Puts planes on the disk for n units, and in host memory for the others: for the last ones; or where updates are under
 * backward evenly spread (the last first, the first last), so that drives have as much to do all the time.
 */
static void move_last(const struct tiers *t, size_t n)
{
    size_t n_units = t->plan->program.n_units;
    bool under = mt_program_has_ring(&t->plan->program);
    for (size_t u = 0; u < n_units; u++)
        put(t, u, t->moved, under ? (u + 1) * n / n_units > u * n / n_units : u >= n_units - n);
    choose_piece(t);
    least_buffers(t);
}

/* Moves planes to the disk, last units first, until the rest fits. */
static void move_until_fits(struct tiers *t, mt_plane_bits planes)
{
    t->moved = planes;
    if (!fits(t))
        place_as_fits(t, move_last, 0, t->plan->program.n_units, true);
}

/* The first n units, whole, in host memory. */
static void keep_first(const struct tiers *t, size_t n)
{
    for (size_t u = 0; u < t->plan->program.n_units; u++)
        put(t, u, t->was[u], u >= n);
}

/* Moves whole units back to host memory, first units first, while they fit. */
static void keep_units(struct tiers *t)
{
    size_t n = t->plan->program.n_units;
    MT_FREED mt_plane_bits *was = mt_calloc(n + 1, sizeof(*was));
    if (!was)
        return; /* costs drive traffic, nothing else */
    memcpy(was, t->plan->on_disk, n * sizeof(*was));
    t->was = was;
    place_as_fits(t, keep_first, 0, n + 1, false);
}

static void grow(const struct tiers *t, int pool, int want)
{
    int *n = &t->plan->program.n_buffers[0][pool];
    size_t bytes[MT_N_POOLS];
    uint64_t used = in_use(t);
    buffer_bytes(t, bytes);
    if (!*n || *n >= want || used > t->host)
        return;
    uint64_t more = bytes[pool] ? (t->host - used) / bytes[pool] : (uint64_t)want;
    *n += (int)MT_MIN(more, (uint64_t)(want - *n));
}

static uint64_t spilled(const struct tiers *t, const int wanted[MT_N_POOLS])
{
    size_t bytes[MT_N_POOLS];
    mt_program_buffer_bytes(&t->plan->program, MT_ALL_LANES, bytes);
    uint64_t want = 0;
    for (int i = 0; i < MT_N_POOLS; i++)
        want += (uint64_t)wanted[i] * bytes[i];
    return want;
}

/* Host memory kept for spilled activations, not for weights: spills of forward are queued after the writes of whole
 * units' states. */
static uint64_t spill_reserve(const struct tiers *t, const int wanted[MT_N_POOLS])
{
    return t->host == UINT64_MAX ? 0 : MT_MIN(spilled(t, wanted), t->host / SPILL_SHARE);
}

static void choose_states(struct tiers *t)
{
    /* states go to the disk first: a byte of them in host memory saves the least traffic */
    const mt_plane_bits weights = mt_loaded_planes(MT_BF16);
    for (size_t u = 0; u < t->plan->program.n_units; u++)
        put(t, u, ~(weights | t->gradients), true);
    choose_piece(t);
    least_buffers(t);
    move_until_fits(t, t->gradients);
    move_until_fits(t, weights);
}

/* A third staging buffer lets reading, Adam and loading each have one. */
static void add_staging(const struct tiers *t)
{
    int most[MT_N_POOLS];
    mt_program_max_buffers(&t->plan->program, most);
    grow(t, MT_POOL_STAGED, MT_MIN(3, most[MT_POOL_STAGED]));
    grow(t, MT_POOL_GRAD_OUT, MT_MIN(2, most[MT_POOL_GRAD_OUT]));
}

static void set_aside(struct tiers *t, uint64_t *beside, uint64_t bytes)
{
    *beside += bytes;
    if (t->host != UINT64_MAX)
        t->host = subtract(t->host, bytes);
}

/* What each host has left for states, and lacks for those that it owns now: lacks[place], of the host that lacks most.
 * beside: what each has there besides planes. */
static void measure_room(const struct tiers *t, const uint64_t beside[MT_N_MAP_PLACES], struct mt_map_room *room,
                         uint64_t lacks[MT_N_MAP_PLACES])
{
    const struct mt_program_params *p = &t->plan->program;
    for (int place = 0; place < MT_N_MAP_PLACES; place++) {
        uint64_t common = beside[place], own[MT_MAX_LANES] = {0};
        for (size_t u = 0; u < p->n_units; u++) {
            common += bytes_in(t, u, (enum mt_map_place)place, false);
            own[mt_program_owner(p, u)] += bytes_in(t, u, (enum mt_map_place)place, true);
        }
        lacks[place] = 0;
        for (int i = 0; i < mt_program_hosts(p); i++) {
            uint64_t drives = t->p->drive_room[i] ? t->p->drive_room[i] : UINT64_MAX;
            uint64_t has = place == MT_MAP_DRIVES ? drives : t->host == UINT64_MAX ? t->host : t->host + t->p->more[i];
            room->of[i][place] = subtract(has, common);
            lacks[place] = MT_MAX(lacks[place], subtract(own[i] + common, has));
        }
    }
}

/* Where hosts have more memory or drives than others, and equal parts of the states are too much for those: deals units
 * by what each has left for states. The step is then to be placed anew, as sums go to other hosts. */
static void deal_by_room(const struct tiers *t, const uint64_t beside[MT_N_MAP_PLACES])
{
    enum { MOST_DEALS = 4 };
    struct mt_engine_plan *plan = t->plan;
    size_t n = plan->program.n_units;
    uint64_t more = 0, lacks[MT_N_MAP_PLACES];
    MT_FREED uint64_t (*bytes)[MT_N_MAP_PLACES] = mt_calloc(n + 1, sizeof(*bytes));
    struct mt_map_room room = {.own_lanes = mt_program_own_lanes(&plan->program), .bytes = bytes};
    if (!bytes || !plan->program.owned || plan->n_deals >= MOST_DEALS)
        return;
    measure_room(t, beside, &room, lacks);
    for (size_t i = 0; i < MT_MAX_LANES; i++)
        more |= t->p->more[i];
    if (!more) /* of equal memory, equal parts are all that there is */
        lacks[MT_MAP_MEMORY] = 0;
    for (int place = 0; place < MT_N_MAP_PLACES; place++) {
        uint64_t left = 0;
        for (int i = 0; i < mt_program_hosts(&plan->program); i++)
            left += MT_MIN(room.of[i][place], UINT64_MAX - left);
        for (size_t u = 0; u < n; u++)
            left = subtract(left, bytes[u][place] = bytes_in(t, u, (enum mt_map_place)place, true));
        if (lacks[place] && !left) /* too much for all of them together */
            return;
    }
    if (!lacks[MT_MAP_MEMORY] && !lacks[MT_MAP_DRIVES])
        return;
    mt_map_gradients(plan->units, t->p->layout, mt_program_lanes(&plan->program), true, &room);
    measure_units(t);
    plan->n_deals++;
}

/* Is anything read in place? Not if all blocks stay in host memory. */
static bool reads_files(const struct mt_engine_plan *plan)
{
    for (size_t u = 0; u < plan->program.n_units; u++)
        if (plan->in_files[u])
            return true;
    return false;
}

/* Divides host memory; `spill`: activations may be spilled to the disk. Returns the host memory that this takes. */
static uint64_t choose(struct mt_engine_plan *plan, const struct mt_engine_params *p, const int wanted[MT_N_POOLS],
                       enum mt_base_place base_home, bool spill)
{
    struct tiers t = {.plan = plan, .p = p, .host = p->host_bytes, .base = base_home};
    bool shared = mt_device_limits(p->dev)->shares_host_memory;
    uint64_t beside = 0, most = 0;
    for (size_t i = 0; i < MT_MAX_LANES && shared; i++)
        most = MT_MAX(most, plan->bytes_of_host[i]); /* of all hosts alike */
    sort_kinds(&t);
    measure_units(&t);
    put_base(&t);
    bool in_files = reads_files(plan);
    plan->file_bytes = in_files ? mt_file_weights_bytes(0) : 0;
    mt_program_buffer_bytes(&plan->program, MT_ALL_LANES, t.device_bytes);
    set_aside(&t, &beside, most + plan->staging_bytes + plan->file_bytes +
                               plan->top_bytes + (spill ? p->drive_bytes + plan->sum_bytes : plan->spill_bytes));
    bool base = in_files || t.base == MT_BASE_DISK;
    bool may_move = p->may_use_disk && p->placement.states == MT_STATES_AUTO;
    bool states = p->may_use_disk && p->placement.states == MT_STATES_DISK;
    if (!states)
        deal_by_room(&t, (const uint64_t[]){0, windows(&t)});
    states |= may_move && planes_in_host(&t) + windows(&t) > t.host;
    plan->program.spill_disk = spill;
    if ((states || base) && !spill)
        set_aside(&t, &beside, p->drive_bytes);
    uint64_t reserve = spill ? spill_reserve(&t, wanted) : 0;
    least_buffers(&t);
    /* with activations on the disk, only states are left that could make room for the fewest buffers */
    states |= spill && may_move && !fits(&t);
    t.host -= reserve;
    if (states)
        choose_states(&t);
    if (states || base)
        add_staging(&t);
    t.host += reserve;
    /* Spill buffers come before whole units: equal traffic saved per byte, and the number needed is bounded. */
    for (int i = 0; spill && i < MT_N_POOLS; i++)
        grow(&t, i, MT_MIN(wanted[i], MT_MAX_BUFFERS / (int)mt_engine_n_hosts(p)));
    if (states && may_move)
        keep_units(&t);
    if (t.base == MT_BASE_FILES && p->placement.base == MT_BASE_AUTO && p->placement.base_blocks == MT_AUTO)
        place_as_fits(&t, keep_blocks, 0, all_file_blocks(&t) + 1, false); /* as many frozen blocks */
    plan->uses_files = reads_files(plan);
    describe_all(&t);
    uint64_t takes = in_use(&t);
    if (takes <= t.host)
        deal_by_room(&t, (const uint64_t[]){spill ? spilled(&t, wanted) : 0, takes - planes_in_host(&t)});
    return takes + beside;
}

static uint64_t choose_spill(struct mt_engine_plan *plan, const struct mt_engine_params *p,
                             const int wanted[MT_N_POOLS], enum mt_base_place base)
{
    bool may_spill = false;
    for (int i = 0; i < MT_N_POOLS; i++)
        may_spill |= p->may_use_disk && wanted[i] > 0;
    bool spill = may_spill && plan->activations == MT_ACT_DISK;
    /* boundaries are few bytes a token: if nothing else fits they are spilled to the disk unasked, unlike records */
    uint64_t takes = choose(plan, p, wanted, base, spill);
    struct mt_records records = mt_records_of(p->layout, &p->placement);
    bool boundaries_alone = plan->activations == MT_ACT_RECOMPUTE && !mt_records_offload(&records);
    if (takes > p->host_bytes && may_spill && boundaries_alone && p->placement.states != MT_STATES_HOST)
        takes = choose(plan, p, wanted, base, true);
    return takes;
}

/* Whether to read weights in place: some are on the disk or too large for host memory, and no copy is cheaper. */
static bool wants_files(const struct mt_engine_plan *plan, const struct mt_engine_params *p, uint64_t takes)
{
    bool any = false, on_disk = false;
    for (size_t u = 0; u < plan->program.n_units; u++) {
        mt_plane_bits files = plan->planes[u].has & mt_unit_file_planes(&p->layout->units[u]);
        any |= files != 0;
        on_disk |= (plan->on_disk[u] & files) != 0;
    }
    return any && (on_disk || takes > p->host_bytes);
}

uint64_t mt_tiers_choose(struct mt_engine_plan *plan, const struct mt_engine_params *p,
                         const int wanted[MT_N_POOLS])
{
    uint64_t takes = choose_spill(plan, p, wanted, p->placement.base);
    if (p->placement.base == MT_BASE_AUTO && wants_files(plan, p, takes))
        takes = choose_spill(plan, p, wanted, MT_BASE_FILES);
    plan->uses_disk = plan->program.spill_disk;
    for (size_t u = 0; u < plan->program.n_units; u++)
        plan->uses_disk |= (plan->on_disk[u] & ~plan->elsewhere[u]) != 0; /* even planes that no step uses */
    size_t bytes[MT_N_POOLS];
    mt_program_buffer_bytes(&plan->program, MT_ALL_LANES, bytes);
    for (int i = 0; i < MT_N_POOLS; i++) {
        if (mt_pools[i].device)
            continue;
        if (!bytes[i])
            plan->program.n_buffers[0][i] = 0;
        plan->pool_bytes[i] = bytes[i] * (size_t)plan->program.n_buffers[0][i];
    }
    return takes;
}
