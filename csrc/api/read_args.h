// The order of the arguments of each op, once, for every reader of arguments: the stack of an op
// (torch_tensors.h) and the arguments of a Python function (module.cpp). It is that of the
// schemas.
//
// A reader has tensor(name), optional_tensor(name), value<T>(name, default), optional<T>(name) and
// optional_dtype(name), each of which takes the next argument.
#pragma once

#include <optional>

#include "api/args.h"

namespace flash_cuda {

template <class Reader>
void read_options(Reader& in, FwdArgs& a) {
  const std::optional<double> scale = in.template optional<double>("softmax_scale");
  a.has_softmax_scale = scale.has_value();
  a.softmax_scale = scale.value_or(0.0);
  a.window_left = in.template value<int64_t>("window_left", -1);
  a.window_right = in.template value<int64_t>("window_right", -1);
  a.attention_chunk = in.template value<int64_t>("attention_chunk", 0);
  a.top_left = in.template value<bool>("top_left", false);
  a.softcap = in.template value<double>("softcap", 0.0);
  a.dropout_p = in.template value<double>("dropout_p", 0.0);
}

template <class Reader>
void read_hints(Reader& in, FwdArgs& a) {
  a.strict = in.template value<bool>("strict", false);
  a.max_seqlen_q = in.template optional<int64_t>("max_seqlen_q").value_or(kNotGiven);
  a.max_seqlen_k = in.template optional<int64_t>("max_seqlen_k").value_or(kNotGiven);
}

template <class Reader>
FwdArgs read_fwd(Reader& in) {
  FwdArgs a;
  a.q = in.tensor("q");
  a.k = in.tensor("k");
  a.v = in.tensor("v");
  a.bias = in.optional_tensor("bias");
  a.alibi_slopes = in.optional_tensor("alibi_slopes");
  a.sink = in.optional_tensor("sink");
  a.cu_seqlens_q = in.optional_tensor("cu_seqlens_q");
  a.cu_seqlens_k = in.optional_tensor("cu_seqlens_k");
  a.seqused_q = in.optional_tensor("seqused_q");
  a.seqused_k = in.optional_tensor("seqused_k");
  a.leftpad_k = in.optional_tensor("leftpad_k");
  a.block_table = in.optional_tensor("block_table");
  a.cache_batch_idx = in.optional_tensor("cache_batch_idx");
  a.qv = in.optional_tensor("qv");
  a.q_descale = in.optional_tensor("q_descale");
  a.k_descale = in.optional_tensor("k_descale");
  a.v_descale = in.optional_tensor("v_descale");
  a.rng_state = in.optional_tensor("rng_state");
  read_options(in, a);
  a.num_splits = in.template value<int64_t>("num_splits", 0);
  a.split_size = in.template value<int64_t>("split_size", 0);
  a.pack_gqa = in.template value<int64_t>("pack_gqa", -1);
  read_hints(in, a);
  return a;
}

template <class Reader>
FwdArgs read_fwd_dense(Reader& in) {
  FwdArgs a;
  a.q = in.tensor("q");
  a.k = in.tensor("k");
  a.v = in.tensor("v");
  const std::optional<double> scale = in.template optional<double>("softmax_scale");
  a.has_softmax_scale = scale.has_value();
  a.softmax_scale = scale.value_or(0.0);
  a.window_left = in.template value<int64_t>("window_left", -1);
  a.window_right = in.template value<int64_t>("window_right", -1);
  return a;
}

template <class Reader>
BwdArgs read_bwd(Reader& in) {
  BwdArgs b;
  FwdArgs& a = b.fwd;
  b.dout = in.tensor("dout");
  b.dlse = in.optional_tensor("dlse");
  a.q = in.tensor("q");
  a.k = in.tensor("k");
  a.v = in.tensor("v");
  b.out = in.tensor("out");
  b.lse = in.tensor("lse");
  a.bias = in.optional_tensor("bias");
  a.alibi_slopes = in.optional_tensor("alibi_slopes");
  a.sink = in.optional_tensor("sink");
  a.cu_seqlens_q = in.optional_tensor("cu_seqlens_q");
  a.cu_seqlens_k = in.optional_tensor("cu_seqlens_k");
  a.seqused_q = in.optional_tensor("seqused_q");
  a.seqused_k = in.optional_tensor("seqused_k");
  a.rng_state = in.optional_tensor("rng_state");
  read_options(in, a);
  read_hints(in, a);
  b.deterministic = in.template value<bool>("deterministic", false);
  b.wanted = in.template value<int64_t>("wanted", 7);
  return b;
}

template <class Reader>
CombineArgs read_combine(Reader& in) {
  CombineArgs a;
  a.out_partial = in.tensor("out_partial");
  a.lse_partial = in.tensor("lse_partial");
  const std::optional<ScalarType> dtype = in.optional_dtype("dtype");
  a.has_dtype = dtype.has_value();
  a.dtype = dtype.value_or(a.out_partial.dtype);
  return a;
}

template <class Reader>
KvAppendArgs read_kv_append(Reader& in) {
  KvAppendArgs a;
  a.k_cache = in.tensor("k_cache");
  a.v_cache = in.tensor("v_cache");
  a.k = in.tensor("k");
  a.v = in.tensor("v");
  a.cache_seqlens = in.tensor("cache_seqlens");
  a.block_table = in.optional_tensor("block_table");
  a.cache_batch_idx = in.optional_tensor("cache_batch_idx");
  a.rotary_cos = in.optional_tensor("rotary_cos");
  a.rotary_sin = in.optional_tensor("rotary_sin");
  a.rotary_interleaved = in.template value<bool>("rotary_interleaved", true);
  return a;
}

}  // namespace flash_cuda
