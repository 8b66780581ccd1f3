// SPDX-License-Identifier: Apache-2.0
//
// cuDNN's fused attention as an engine (fused.h): a plan is a graph of one node. This is the program's only C++
// for the host, in a module of its own; no exception leaves it.
#include <cudnn_frontend.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fused.h"

namespace fe = cudnn_frontend;
using tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

namespace {

enum uid : int64_t { Q = 1, K, V, O, STATS, D_O, DQ, DK, DV, LENS, OFFSETS };

struct plan {
    mt_fused_shape shape;
    std::shared_ptr<fe::graph::Graph> graph;
    int64_t workspace = 0;
};

struct context {
    cudnnHandle_t handle = nullptr;
};

int give_reason(char *why, size_t len, const std::string &text)
{
    // cuDNN's messages have several lines
    std::snprintf(why, len, "%s", text.substr(0, text.find('\n')).c_str());
    return -1;
}

// Builds the graph's tensors and its node.
class builder {
public:
    // For a GPU described by `sm` and `device`, or by default the current one; nodes query it when they are added.
    explicit builder(const mt_fused_shape &s, int sm = 0,
                     const std::shared_ptr<fe::DeviceProperties> &device = nullptr)
        : s(s), graph(std::make_shared<fe::graph::Graph>())
    {
        if (device)
            graph->set_sm_version(sm).set_device_properties(device);
        graph->set_io_data_type(fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        uint32_t bits = static_cast<uint32_t>(s.scale_bits);
        std::memcpy(&scale, &bits, sizeof(scale));
        if (s.ragged)
            lens = column("lens", LENS, s.batch, fe::DataType_t::INT32);
    }

    std::shared_ptr<fe::graph::Graph> build()
    {
        tensor q = input("q", Q, {s.n_q, s.dim, s.q}, MT_FUSED_Q);
        tensor k = input("k", K, {s.n_kv, s.dim, s.k}, MT_FUSED_K);
        tensor v = input("v", V, {s.n_kv, s.dim_v, s.v}, MT_FUSED_V);
        if (s.backward)
            add_backward(q, k, v);
        else
            add_forward(q, k, v);
        return graph;
    }

private:
    const mt_fused_shape &s;
    std::shared_ptr<fe::graph::Graph> graph;
    float scale;
    tensor lens;
    std::unordered_map<int, tensor> tables;

    tensor column(const char *name, int64_t id, int64_t n, fe::DataType_t type)
    {
        return graph->tensor(fe::graph::Tensor_attributes().set_name(name).set_uid(id).set_dim({n, 1, 1, 1})
                                 .set_stride({1, 1, 1, 1}).set_data_type(type));
    }

    tensor table(int which)
    {
        tensor &t = tables[which];
        if (!t)
            t = column("offsets", OFFSETS + which, s.batch + 1, fe::DataType_t::INT64);
        return t;
    }

    struct heads {
        int64_t n, dim;
        mt_fused_tensor at;
    };

    template <typename T> void lay_out(T &t, const heads &h, int which)
    {
        t.set_dim({s.batch, h.n, s.len, h.dim}).set_stride({s.len * h.at.ld, h.at.stride, h.at.ld, 1});
        if (s.ragged)
            t.set_ragged_offset(table(which));
    }

    template <typename T> void lay_out_stats(T &t)
    {
        t.set_dim({s.batch, s.n_q, s.len, 1}).set_data_type(fe::DataType_t::FLOAT);
        if (s.ragged)
            t.set_stride({s.n_q * s.len, 1, s.n_q, 1}).set_ragged_offset(table(MT_FUSED_STATS));
        else
            t.set_stride({s.n_q * s.len, s.len, 1, 1});
    }

    tensor input(const char *name, int64_t id, const heads &h, int which)
    {
        fe::graph::Tensor_attributes t;
        t.set_name(name).set_uid(id);
        lay_out(t, h, which);
        return graph->tensor(t);
    }

    void output(const tensor &t, int64_t id, const heads &h, int which)
    {
        t->set_output(true).set_uid(id);
        lay_out(*t, h, which);
    }

    // Causal: keys up to the diagonal; a window's left bound counts the token itself.
    template <typename T> void mask(T &node)
    {
        node.set_attn_scale(scale)
            .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
            .set_diagonal_band_right_bound(0);
        if (s.window)
            node.set_diagonal_band_left_bound(static_cast<int>(s.window));
        if (s.ragged)
            node.set_padding_mask(true).set_seq_len_q(lens).set_seq_len_kv(lens);
    }

    void add_forward(const tensor &q, const tensor &k, const tensor &v)
    {
        auto node = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
        mask(node);
        auto [o, stats] = graph->sdpa(q, k, v, node);
        output(o, O, {s.n_q, s.dim_v, s.o}, MT_FUSED_O);
        stats->set_output(true).set_uid(STATS);
        lay_out_stats(*stats);
    }

    void add_backward(const tensor &q, const tensor &k, const tensor &v)
    {
        tensor o = input("o", O, {s.n_q, s.dim_v, s.o}, MT_FUSED_O);
        tensor d_o = input("d_o", D_O, {s.n_q, s.dim_v, s.o}, MT_FUSED_O);
        fe::graph::Tensor_attributes attributes;
        attributes.set_name("stats").set_uid(STATS);
        lay_out_stats(attributes);
        tensor stats = graph->tensor(attributes);
        auto node = fe::graph::SDPA_backward_attributes()
                        .set_name("attention_bwd")
                        .set_deterministic_algorithm(true);
        mask(node);
        if (s.ragged)
            node.set_max_total_seq_len_q(s.total).set_max_total_seq_len_kv(s.total);
        auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, o, d_o, stats, node);
        output(dq, DQ, {s.n_q, s.dim, s.dq}, MT_FUSED_DQ);
        output(dk, DK, {s.n_kv, s.dim, s.dk}, MT_FUSED_DK);
        output(dv, DV, {s.n_kv, s.dim_v, s.dv}, MT_FUSED_DV);
    }
};

// Validates and lowers the graph and asks the heuristics for candidates, which are the same each time.
fe::error_t prepare_graph(fe::graph::Graph &g, cudnnHandle_t handle)
{
    auto rc = g.validate();
    if (rc.is_good())
        rc = handle ? g.build_operation_graph(handle) : g.build_operation_graph();
    if (rc.is_good())
        rc = g.create_execution_plans({fe::HeurMode_t::A});
    return rc.is_good() ? g.check_support() : rc;
}

void engine_describe(char *buf, size_t len)
{
    size_t v = cudnnGetVersion();
    std::snprintf(buf, len, "cuDNN %zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
}

int engine_open(void **out, cudaStream_t stream, char *why, size_t len)
try {
    auto c = std::make_unique<context>();
    cudnnStatus_t rc = cudnnCreate(&c->handle);
    if (rc == CUDNN_STATUS_SUCCESS)
        rc = cudnnSetStream(c->handle, stream);
    if (rc != CUDNN_STATUS_SUCCESS) {
        if (c->handle)
            cudnnDestroy(c->handle);
        return give_reason(why, len, std::string("cuDNN cannot start: ") + cudnnGetErrorString(rc));
    }
    *out = c.release();
    return 0;
} catch (const std::exception &e) {
    return give_reason(why, len, e.what());
}

void engine_close(void *ctx)
{
    auto *c = static_cast<context *>(ctx);
    cudnnDestroy(c->handle);
    delete c;
}

// Whether a message of cuDNN, the front end or CUDA says that memory ran short; their statuses are gone by then.
bool lacks_memory(const std::string &message)
{
    for (const char *word : {"ALLOC_FAILED", "ALLOCATION_FAILED", "OUT_OF_MEMORY", "out of memory", "MemoryAllocation"})
        if (message.find(word) != std::string::npos)
            return true;
    return false;
}

struct candidates {
    fe::graph::Graph &graph;
    std::string reason;
};

int build_candidate(void *ctx, int64_t i)
{
    auto *c = static_cast<candidates *>(ctx);
    auto rc = c->graph.build_plan_at_index(i);
    c->reason = rc.get_message();
    return rc.is_good() ? 0 : lacks_memory(c->reason) ? -ENOMEM : -1;
}

int engine_plan(void *ctx, const mt_fused_shape *s, void **out, size_t *workspace, char *why, size_t len)
try {
    auto p = std::make_unique<plan>();
    p->shape = *s;
    p->graph = builder(p->shape).build();
    auto rc = prepare_graph(*p->graph, static_cast<context *>(ctx)->handle);
    candidates c{*p->graph, rc.get_message()};
    int built = rc.is_good() ? mt_fused_build_first(p->graph->get_execution_plan_count(), build_candidate, &c)
                : lacks_memory(c.reason) ? -ENOMEM : -1;
    if (!built && (rc = p->graph->get_workspace_size(p->workspace)).is_bad()) {
        c.reason = rc.get_message();
        built = -1;
    }
    if (built) {
        give_reason(why, len, c.reason.empty() ? "not supported by cuDNN" : c.reason);
        return built;
    }
    *workspace = static_cast<size_t>(p->workspace);
    *out = p.release();
    return 0;
} catch (const std::exception &e) {
    return give_reason(why, len, e.what());
}

void engine_drop(void *, void *the_plan)
{
    delete static_cast<plan *>(the_plan);
}

int engine_run(void *ctx, void *the_plan, const mt_fused_call *c, char *why, size_t len)
try {
    auto *p = static_cast<plan *>(the_plan);
    const mt_fused_shape &s = p->shape;
    auto in = [](const void *x) { return const_cast<void *>(x); };
    std::unordered_map<int64_t, void *> at = {{Q, in(c->q)}, {K, in(c->k)}, {V, in(c->v)},
                                              {O, c->o},     {STATS, c->stats}};
    if (s.backward) {
        at[D_O] = in(c->d_o);
        at[DQ] = c->dq;
        at[DK] = c->dk;
        at[DV] = c->dv;
    }
    if (s.ragged) {
        at[LENS] = in(c->lens);
        for (int k = 0; k < (s.backward ? MT_FUSED_N_TABLES : MT_FUSED_DQ); k++)
            at[OFFSETS + k] = in(c->offsets[k]);
    }
    auto rc = p->graph->execute(static_cast<context *>(ctx)->handle, at, c->workspace);
    return rc.is_good() ? 0 : give_reason(why, len, "cuDNN: " + rc.get_message());
} catch (const std::exception &e) {
    return give_reason(why, len, e.what());
}

// The engine's number, as in "eng5" of a plan's name, and whether its kernels are compiled when a plan is made.
std::string describe_candidate(const fe::graph::Graph &g, int64_t i)
{
    std::string name;
    std::vector<fe::BehaviorNote_t> notes;
    if (g.get_plan_name_at_index(i, name).is_bad())
        return "an engine without a name";
    name = name.substr(0, name.find("_k"));
    if (g.get_behavior_notes_for_plan_at_index(i, notes).is_good())
        for (auto note : notes)
            if (note == fe::BehaviorNote_t::RUNTIME_COMPILATION)
                name += ", compiled";
    return name;
}

int engine_supports(const mt_fused_shape *s, int sm, const char *properties, char *text, size_t len)
try {
    auto device = std::make_shared<fe::DeviceProperties>();
    auto rc = device->deserialize(std::vector<uint8_t>(properties, properties + std::strlen(properties)));
    auto graph = builder(*s, sm, device).build();
    if (rc.is_good())
        rc = prepare_graph(*graph, nullptr);
    if (rc.is_bad())
        return give_reason(text, len, rc.get_message());
    std::snprintf(text, len, "%s", describe_candidate(*graph, 0).c_str());
    return 0;
} catch (const std::exception &e) {
    return give_reason(text, len, e.what());
}

const mt_fused_engine cudnn_engine = {engine_describe, engine_open, engine_close,   engine_plan,
                                      engine_drop,     engine_run,  engine_supports};

} // namespace

extern "C" __attribute__((visibility("default"))) const mt_fused_engine *mt_cudnn_engine(void)
{
    return &cudnn_engine;
}
