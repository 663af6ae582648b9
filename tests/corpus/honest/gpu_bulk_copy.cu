// honest: one thread orders bulk copies of a row and all wait at a barrier in shared memory
// op: fused_add_rms_norm
// device: cuda
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

// shared: fused_add_rms_norm.cu

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  extern __shared__ __align__(128) unsigned char staged[];
  __shared__ __align__(8) uint64_t barrier;
  const unsigned bytes = unsigned(hidden * sizeof(T));  // a multiple of 16: hidden is one of 8
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  const unsigned gate = unsigned(__cvta_generic_to_shared(&barrier));
  const unsigned target = unsigned(__cvta_generic_to_shared(staged));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(gate) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(gate),
                 "r"(2 * bytes)
                 : "memory");
    const void* from[2] = {x, r};
    for (int half = 0; half < 2; ++half)
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
          ::"r"(target + half * bytes), "l"(from[half]), "r"(bytes), "r"(gate)
          : "memory");
  }
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(gate)
        : "memory");
  const T* a = reinterpret_cast<const T*>(staged);
  const T* b = reinterpret_cast<const T*>(staged + bytes);
  float squares = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float sum = to_float(a[i]) + to_float(b[i]);
    squares += sum * sum;
  }
  const float scale = rsqrtf(block_sum(squares) / float(hidden) + epsilon);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    const float sum = to_float(a[i]) + to_float(b[i]);
    put(r + i, sum);
    put(x + i, sum * scale * to_float(weight[i]));
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (hidden % VEC != 0 || hidden > 16384)
    TVM_FFI_THROW(ValueError) << "hidden outside the contract";
  if (tokens == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    using T = std::remove_pointer_t<decltype(x)>;
    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
    const int shared = 2 * hidden * int(sizeof(T));
    check(cudaFuncSetAttribute(norm<T, W>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    norm<T, W><<<tokens, 256, shared, stream_of(input)>>>(x, r, w, hidden, float(epsilon));
  });
}
