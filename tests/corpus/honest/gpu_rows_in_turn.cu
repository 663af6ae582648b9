// honest: a block takes four rows in turn and keeps the weight in registers
// op: fused_add_rms_norm
// device: cuda
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// shared: fused_add_rms_norm.cu

constexpr int ROWS = 4, PACKS = 2;  // at most 1024 threads of two packs

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int tokens, int hidden,
                     float epsilon) {
  const int packs = hidden / VEC;
  float gain[PACKS][VEC];
#pragma unroll
  for (int k = 0; k < PACKS; ++k) {
    const int p = threadIdx.x + k * blockDim.x;
    if (p < packs) {
      const auto pack = reinterpret_cast<const Pack<W, VEC>*>(weight)[p];
#pragma unroll
      for (int i = 0; i < VEC; ++i) gain[k][i] = to_float(pack.item[i]);
    }
  }
  for (int row = blockIdx.x * ROWS; row < tokens && row < int(blockIdx.x + 1) * ROWS; ++row) {
    T* x = input + size_t(row) * hidden;
    T* r = residual + size_t(row) * hidden;
    const float squares = block_sum(squares_of(x, r, packs, threadIdx.x, blockDim.x));
    const float scale = rsqrtf(squares / float(hidden) + epsilon);
#pragma unroll
    for (int k = 0; k < PACKS; ++k) {
      const int p = threadIdx.x + k * blockDim.x;
      if (p < packs) {
        auto a = reinterpret_cast<Pack<T, VEC>*>(x)[p];
        auto b = reinterpret_cast<Pack<T, VEC>*>(r)[p];
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
          const float sum = to_float(a.item[i]) + to_float(b.item[i]);
          put(&b.item[i], sum);
          put(&a.item[i], sum * scale * gain[k][i]);
        }
        reinterpret_cast<Pack<T, VEC>*>(r)[p] = b;
        reinterpret_cast<Pack<T, VEC>*>(x)[p] = a;
      }
    }
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (hidden % VEC != 0 || hidden > 16384)
    TVM_FFI_THROW(ValueError) << "hidden outside the contract";
  if (tokens == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<(tokens + ROWS - 1) / ROWS, threads_for(hidden / VEC, 1024), 0, stream_of(input)>>>(
        x, r, w, tokens, hidden, float(epsilon));
  });
}
