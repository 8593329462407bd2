#include "api/explain.h"

#include <functional>

#include "common/host_device.h"

namespace flash_cuda {

namespace {

Kernels kernels_of(const Target& target) {
  if (target.emulated) return emulated_kernels();
  TensorInfo q;
  q.name = "q";
  q.device = DeviceType::kCuda;
  q.device_index = target.device_index;
  return kernels_for_gpu(target.device, q);
}

template <class Kernel>
void describe(Explanation& e, const Kernel& kernel, size_t workspace_bytes) {
  e.served = true;
  e.kernel = kernel.name;
  e.arch = kernel.arch;
  e.block_q = kernel.block_q;
  e.block_kv = kernel.block_kv;
  e.threads = kernel.threads;
  e.workspace_bytes = workspace_bytes;
}

void explain_call(Explanation& e, const FwdArgs& a, const Sizes& s, const Kernels& kernels) {
  const FwdCall call = prepare_fwd(a, s, kernels);
  const int64_t partials = call.out_partial_numel + call.lse_partial_numel;
  describe(e, *call.kernel, call.workspace_bytes + sizeof(float) * static_cast<size_t>(partials));
  if (call.kernel->tile) {
    const FwdTileShape tile = call.kernel->tile(call.params);
    e.block_q = tile.block_q;
    e.block_kv = tile.block_kv;
    e.threads = tile.threads;
    e.cluster = tile.cluster;
  }
  e.split = call.combine != nullptr || call.params.dealt_out;
  e.dealt_out = call.params.dealt_out;
  e.num_splits = call.params.num_splits;
  e.split_size = call.params.split_size;
  e.pack_gqa = e.split && call.params.pack_gqa;  // the other kernels may ignore it
}

void explain_call(Explanation& e, const BwdArgs& b, const Sizes& s, const Kernels& kernels) {
  const BwdCall call = prepare_bwd(b, s, kernels);
  describe(e, *call.kernel, call.workspace_bytes);
}

// ---- nearby calls

FwdArgs& fwd_of(FwdArgs& a) { return a; }
FwdArgs& fwd_of(BwdArgs& b) { return b.fwd; }
void set_deterministic(FwdArgs&, bool) {}
void set_deterministic(BwdArgs& b, bool value) { b.deterministic = value; }
bool deterministic(const FwdArgs&) { return false; }
bool deterministic(const BwdArgs& b) { return b.deterministic; }

std::vector<TensorInfo*> rows_of(FwdArgs& a) { return {&a.q, &a.k, &a.v}; }
std::vector<TensorInfo*> rows_of(BwdArgs& b) {
  return {&b.fwd.q, &b.fwd.k, &b.fwd.v, &b.out, &b.dout};
}

// A call that may be changed: sizes and strides of its rows are its own.
template <class Args>
struct Nearby {
  Nearby(const Args& a, const Sizes& s) : args(a), sizes(s) {}
  Nearby(const Nearby&) = delete;

  // Makes q, k, v (out, dout) contiguous and aligned, with these head dims.
  void make_contiguous(int64_t head_dim, int64_t head_dim_v) {
    sizes.head_dim = head_dim;
    sizes.head_dim_v = head_dim_v;
    int i = 0;
    for (TensorInfo* t : rows_of(args)) {
      const bool values = i >= 2;  // v, out, dout
      int64_t stride = 1;
      for (int d = t->ndim - 1; d >= 0; --d) {
        own_sizes[i][d] = d < t->ndim - 1 ? t->sizes[d] : values ? head_dim_v : head_dim;
        own_strides[i][d] = stride;
        stride *= own_sizes[i][d];
      }
      t->sizes = own_sizes[i];
      t->strides = own_strides[i];
      t->data = nullptr;
      ++i;
    }
  }

  Args args;
  Sizes sizes;
  int64_t own_sizes[5][4], own_strides[5][4];
};

template <class Args>
struct Change {
  std::string text;
  bool applies;
  std::function<void(Nearby<Args>&)> apply;
};

template <class Args>
std::vector<Change<Args>> changes(const Args& args, const Sizes& s) {
  using Near = Nearby<Args>;
  Args copy = args;
  const FwdArgs& a = fwd_of(copy);
  const auto drop = [](TensorInfo FwdArgs::* member) {
    return [member](Near& n) { fwd_of(n.args).*member = TensorInfo{}; };
  };
  const int64_t dim = 8 * ceil_div(s.head_dim, int64_t{8}),
                dim_v = 8 * ceil_div(s.head_dim_v, int64_t{8});
  const bool other_type = a.q.dtype != ScalarType::kBFloat16 && a.q.dtype != ScalarType::kFloat16;
  return {
      {"contiguous q, k and v", true,
       [](Near& n) { n.make_contiguous(n.sizes.head_dim, n.sizes.head_dim_v); }},
      {join("head_dim ", dim, " and head_dim_v ", dim_v, " (pad with zeros)"),
       dim != s.head_dim || dim_v != s.head_dim_v, [=](Near& n) { n.make_contiguous(dim, dim_v); }},
      {"deterministic=False", deterministic(args),
       [](Near& n) { set_deterministic(n.args, false); }},
      {"num_splits=1", a.num_splits > 1 || a.split_size > 0,
       [](Near& n) {
         fwd_of(n.args).num_splits = 1;
         fwd_of(n.args).split_size = 0;
       }},
      {"pack_gqa=None", a.pack_gqa >= 0, [](Near& n) { fwd_of(n.args).pack_gqa = -1; }},
      {"strict=False", a.strict, [](Near& n) { fwd_of(n.args).strict = false; }},
      {"dropout_p=0", a.dropout_p > 0, [](Near& n) { fwd_of(n.args).dropout_p = 0; }},
      {"softcap=0", a.softcap > 0, [](Near& n) { fwd_of(n.args).softcap = 0; }},
      {"attention_chunk=0", a.attention_chunk > 0,
       [](Near& n) { fwd_of(n.args).attention_chunk = 0; }},
      {"no bias", a.bias.given(), drop(&FwdArgs::bias)},
      {"no alibi_slopes", a.alibi_slopes.given(), drop(&FwdArgs::alibi_slopes)},
      {"no sink", a.sink.given(), drop(&FwdArgs::sink)},
      {"no qv", a.qv.given(), drop(&FwdArgs::qv)},
      {"no leftpad_k", a.leftpad_k.given(), drop(&FwdArgs::leftpad_k)},
      {"top_left=False", a.top_left, [](Near& n) { fwd_of(n.args).top_left = false; }},
      {"bfloat16 q, k and v", other_type,
       [](Near& n) {
         for (TensorInfo* t : rows_of(n.args)) t->dtype = ScalarType::kBFloat16;
         n.make_contiguous(n.sizes.head_dim, n.sizes.head_dim_v);
         FwdArgs& f = fwd_of(n.args);
         f.q_descale = f.k_descale = f.v_descale = TensorInfo{};
         if (f.qv.given()) f.qv.dtype = ScalarType::kBFloat16;
         if (f.bias.given()) f.bias.dtype = ScalarType::kFloat32;
       }},
  };
}

// Kernels ask by its address whether a tensor is there, and one of which only the shape is known
// has none: it gets one that is aligned and that nobody reads.
void give_address(TensorInfo& t) {
  alignas(256) static const char somewhere[256] = {};
  if (t.given() && !t.data) t.data = somewhere;
}
void give_addresses(FwdArgs& a) { for_each_tensor(a, give_address); }
void give_addresses(BwdArgs& b) {
  give_addresses(b.fwd);
  for (TensorInfo* t : {&b.dout, &b.dlse, &b.out, &b.lse}) give_address(*t);
}

template <class Args>
Explanation explain(Args args, const Sizes& sizes, const Target& target) {
  give_addresses(args);
  Explanation e;
  try {
    const Kernels kernels = kernels_of(target);
    if (!has_queries(sizes) || !has_keys(sizes)) {
      e.served = true;
      e.kernel = "none needed";
      return e;
    }
    try {
      explain_call(e, args, sizes, kernels);
    } catch (const Refusal& refusal) {
      e.refusal = refusal.what();
      for (const auto& change : changes(args, sizes)) {
        if (!change.applies) continue;
        Nearby<Args> nearby(args, sizes);
        change.apply(nearby);
        Explanation other;
        try {
          explain_call(other, nearby.args, nearby.sizes, kernels);
        } catch (const Refusal&) {
          continue;
        }
        e.nearest = change.text;
        break;
      }
    }
  } catch (const Refusal& refusal) {
    e.refusal = refusal.what();
  }
  return e;
}

}  // namespace

Explanation explain_fwd(const FwdArgs& args, const Sizes& sizes, const Target& target) {
  return explain(args, sizes, target);
}

Explanation explain_bwd(const BwdArgs& args, const Sizes& sizes, const Target& target) {
  return explain(args, sizes, target);
}

std::string text_of(const Explanation& e) {
  if (!e.served) {
    std::string text = "not served: " + e.refusal;
    if (!e.nearest.empty()) text += "\nnearest call that is served: the same with " + e.nearest;
    return text;
  }
  if (e.arch == 0) return "served without a kernel: there is nothing to attend to";
  std::string text = join(e.kernel, " (csrc/sm", e.arch, "): tiles of ", e.block_q, " queries x ",
                          e.block_kv, " keys, ", e.threads, " threads");
  if (e.cluster > 1) text += join(", clusters of ", e.cluster, " blocks that share K and V");
  if (e.pack_gqa) text += ", query heads of a KV head packed into one tile";
  if (e.split) {
    text += e.dealt_out        ? join("\nKV dealt out evenly, by the lengths on the device, about ",
                                      e.num_splits, " parts a tile")
            : e.split_size > 0 ? join("\nKV in parts of ", e.split_size, " keys, ", e.num_splits,
                                      " parts, merged by combine")
                               : join("\nKV in ", e.num_splits, " parts, merged by combine");
  }
  return text + join("\nworkspace: ", e.workspace_bytes, " bytes");
}

}  // namespace flash_cuda
