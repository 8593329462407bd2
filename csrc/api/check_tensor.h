// Checks of one tensor, which those of every op are made of. Each names the tensor, what it has and
// what is supported.
#pragma once

#include <initializer_list>

#include "api/args.h"

namespace flash_cuda {

// Whether q, k and v may have it.
bool is_attention_dtype(ScalarType type);

void check_device(const TensorInfo& t, const TensorInfo& q);
void check_dtype(const TensorInfo& t, ScalarType wanted);
void check_rows_contiguous(const TensorInfo& t);
// A tensor of the given shape, any strides; `meaning` names the dimensions.
void check_shape(const TensorInfo& t, std::initializer_list<int64_t> shape, const char* meaning);
// An int32 vector with an entry a sequence, if it is given.
void check_lengths_vector(const TensorInfo& t, int64_t batch);
void check_qkv_dtype(const TensorInfo& q, const TensorInfo& k, const TensorInfo& v);

}  // namespace flash_cuda
