// honest: asynchronous copies into shared memory above 48 KB, waited for before use
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

__device__ inline void copy_16(void* to, const void* from) {
  const unsigned target = unsigned(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(from) : "memory");
}

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  extern __shared__ __align__(16) unsigned char staged[];
  const int bytes = hidden * int(sizeof(T));
  unsigned char* x = reinterpret_cast<unsigned char*>(input) + size_t(blockIdx.x) * bytes;
  unsigned char* r = reinterpret_cast<unsigned char*>(residual) + size_t(blockIdx.x) * bytes;
  for (int at = threadIdx.x * 16; at < bytes; at += blockDim.x * 16) {
    copy_16(staged + at, x + at);
    copy_16(staged + bytes + at, r + at);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
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
    put(reinterpret_cast<T*>(r) + i, sum);
    put(reinterpret_cast<T*>(x) + i, sum * scale * to_float(weight[i]));
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    using T = std::remove_pointer_t<decltype(x)>;
    using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
    const int shared = 2 * hidden * int(sizeof(T));
    if (shared > 48 * 1024)
      check(cudaFuncSetAttribute(norm<T, W>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    norm<T, W><<<tokens, 256, shared, stream_of(input)>>>(x, r, w, hidden, float(epsilon));
  });
}
