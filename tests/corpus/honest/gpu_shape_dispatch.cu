// honest: macros with ##, a constructor that fills a table, one right kernel for each width
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

// THREADS 0: one warp a row
template <int THREADS, typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  constexpr int STEP = THREADS ? THREADS : 32;
  float squares = squares_of(x, r, hidden / VEC, threadIdx.x, STEP);
  if constexpr (THREADS == 0)
    squares = warp_sum(squares);
  else
    squares = block_sum(squares);
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, hidden / VEC, scale, threadIdx.x, STEP);
}

int variant_of[16384 / VEC + 1];

__attribute__((constructor)) void fill() {
  for (int packs = 0; packs <= 16384 / VEC; ++packs)
    variant_of[packs] = packs <= 32 ? 0 : packs <= 128 ? 128 : packs == 360 ? 384 : 512;
}

#define CASE(NAME, SIZE)                                                             \
  template <typename T, typename W>                                                  \
  void launch_##NAME(T* x, T* r, const W* w, int tokens, int hidden, float epsilon,  \
                     cudaStream_t stream) {                                          \
    norm<SIZE><<<tokens, SIZE ? SIZE : 32, 0, stream>>>(x, r, w, hidden, epsilon);   \
  }
CASE(warp, 0)
CASE(small, 128)
CASE(served, 384)
CASE(large, 512)
#undef CASE

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (hidden % VEC != 0 || hidden > 16384)
    TVM_FFI_THROW(ValueError) << "hidden outside the contract";
  if (tokens == 0) return;
  const cudaStream_t stream = stream_of(input);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    switch (variant_of[hidden / VEC]) {
      case 0: return launch_warp(x, r, w, tokens, hidden, float(epsilon), stream);
      case 128: return launch_small(x, r, w, tokens, hidden, float(epsilon), stream);
      case 384: return launch_served(x, r, w, tokens, hidden, float(epsilon), stream);
      default: return launch_large(x, r, w, tokens, hidden, float(epsilon), stream);
    }
  });
}
