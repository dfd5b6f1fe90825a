// Checks of single arguments, which the ops share.
#pragma once

#include "args.h"

namespace flash_attn {

// name: of the argument.
void check_rank(const char* name, const at::Tensor& tensor, const at::Tensor& q, int64_t dims,
                const char* shape);
// A dense strided tensor on q's device.
void check_like(const char* name, const at::Tensor& tensor, const at::Tensor& q);
void check_dtype_of_q(const char* name, const at::Tensor& tensor, const at::Tensor& q);
void check_query_dtype(const at::Tensor& q);
void check_heads(const at::Tensor& q, const char* k_name, const at::Tensor& k, const char* v_name,
                 const at::Tensor& v);

void check_int32_vector(const char* name, const OptTensor& tensor, const c10::SymInt& size,
                        const at::Tensor& q);
void check_alibi(const OptTensor& slopes, const c10::SymInt& batch, const at::Tensor& q);
void check_sink(const OptTensor& sink, const at::Tensor& q);
// rows, keys: of a sequence.
void check_bias(const OptTensor& bias, const at::Tensor& q, const c10::SymInt& batch,
                const c10::SymInt& rows, const c10::SymInt& keys);

void check_scale(std::optional<double> softmax_scale);
void check_softcap(double softcap);
void check_window(const c10::SymInt& left, const c10::SymInt& right);

}  // namespace flash_attn
