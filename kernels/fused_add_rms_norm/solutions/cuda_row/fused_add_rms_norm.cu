// Op: fused_add_rms_norm: residual += input; input = residual / sqrt(mean(residual^2) + epsilon) *
//   weight, in place; arithmetic in float32.
// Arguments: input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden], epsilon; T:
//   bfloat16 or float16 or float32; W: T or float32
// Writes: input, residual
// Needs: an NVIDIA GPU, measured on compute capability 9.0 (before that the wait is compiled out);
//   contiguous, 16-byte aligned, hidden a multiple of 8 and at most 16384, else it throws;
//   graph-safe.
// Idea: one block a row, 16-byte loads, the row in registers between the sum and the scaling, as in
//   flashinfer's norm.cuh. From 9.0 on the weight, which no kernel before writes, is read before
//   the wait for that kernel.
// Made by: hand.
// Figures: NVIDIA H200, geometric means, bench/results/h200-transformers: sweep bf16 1.11x against
//   flashinfer, 1.09x to 1.14x at tokens 1 to 128 (evaluate-cuda_row-bf16.json.xz); sweep
//   bf16-fp32-weight 1.80x against torch.compile, 1.39x to 2.01x at tokens 1 to 128
//   (evaluate-cuda_row-bf16-fp32-weight.json.xz).
// Digest: 42861d227fd6ebcb838178ef344dd5b1f73399e2d425c93d2d9797bb26c54437

// fused_add_rms_norm(input[T: tokens, hidden], residual[T: tokens, hidden], weight[W: hidden], epsilon)
// residual += input; input = residual * rsqrt(mean(residual^2) + epsilon) * weight; float32 arithmetic, in place.
// T: bfloat16, float16 or float32; W: T or float32. hidden: a multiple of 8, at most 16384.
// One block a row, 16-byte loads, the row in registers; programmatic dependent launch where the device has it
// (sm_90): the weight, which no earlier kernel writes, is read before waiting for the producer of input.
// Idea: flashinfer norm.cuh (one block a row, vectorised), with the weight prefetch of PDL-aware norms.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace {

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T item[N];
};

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
template <typename T>
__device__ inline T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) { return v; }
template <>
__device__ inline __half from_float<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

// PER_THREAD packs of VEC elements a thread; blockDim.x * PER_THREAD * VEC covers a row
template <typename T, typename W, int VEC, int PER_THREAD>
__global__ void fused_add_rms_norm_kernel(T* __restrict__ input, T* __restrict__ residual,
                                          const W* __restrict__ weight, int hidden, float epsilon) {
  const int packs = hidden / VEC;
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  float w[PER_THREAD][VEC], sum[PER_THREAD][VEC];
#pragma unroll
  for (int k = 0; k < PER_THREAD; ++k) {
    const int p = threadIdx.x + k * blockDim.x;
    if (p < packs) {
      const auto pack = reinterpret_cast<const Pack<W, VEC>*>(weight)[p];
#pragma unroll
      for (int i = 0; i < VEC; ++i) w[k][i] = to_float(pack.item[i]);
    }
  }
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < PER_THREAD; ++k) {
    const int p = threadIdx.x + k * blockDim.x;
    if (p < packs) {
      const auto a = reinterpret_cast<const Pack<T, VEC>*>(x)[p];
      const auto b = reinterpret_cast<const Pack<T, VEC>*>(r)[p];
      Pack<T, VEC> out;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const float total = to_float(a.item[i]) + to_float(b.item[i]);
        out.item[i] = from_float<T>(total);
        sum[k][i] = total;
        squares += total * total;
      }
      reinterpret_cast<Pack<T, VEC>*>(r)[p] = out;
    }
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, lane);
  __shared__ float partial[32];
  if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = squares;
  __syncthreads();
  const int warps = blockDim.x >> 5;
  squares = int(threadIdx.x & 31) < warps ? partial[threadIdx.x & 31] : 0.0f;
#pragma unroll
  for (int lane = 16; lane > 0; lane >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, lane);
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
#pragma unroll
  for (int k = 0; k < PER_THREAD; ++k) {
    const int p = threadIdx.x + k * blockDim.x;
    if (p < packs) {
      Pack<T, VEC> out;
#pragma unroll
      for (int i = 0; i < VEC; ++i) out.item[i] = from_float<T>(sum[k][i] * scale * w[k][i]);
      reinterpret_cast<Pack<T, VEC>*>(x)[p] = out;
    }
  }
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

template <typename T, typename W, int PER_THREAD>
void launch(T* x, T* r, const W* w, int tokens, int hidden, float epsilon, cudaStream_t stream) {
  constexpr int VEC = 16 / sizeof(T);
  const int packs = hidden / VEC;
  int threads = (packs + PER_THREAD - 1) / PER_THREAD;
  threads = (threads + 31) / 32 * 32;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(tokens);
  config.blockDim = dim3(threads);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t status =
      cudaLaunchKernelEx(&config, fused_add_rms_norm_kernel<T, W, VEC, PER_THREAD>, x, r, w, hidden, epsilon);
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

template <typename T, typename W>
void by_size(T* x, T* r, const W* w, int tokens, int hidden, float epsilon, cudaStream_t stream) {
  const int packs = hidden / int(16 / sizeof(T));
  if (packs <= 512)
    launch<T, W, 1>(x, r, w, tokens, hidden, epsilon, stream);
  else if (packs <= 1024)
    launch<T, W, 2>(x, r, w, tokens, hidden, epsilon, stream);
  else
    launch<T, W, 4>(x, r, w, tokens, hidden, epsilon, stream);
}

template <typename T>
void by_weight(tvm::ffi::TensorView input, tvm::ffi::TensorView residual, tvm::ffi::TensorView weight, float epsilon) {
  auto* x = static_cast<T*>(input.data_ptr());
  auto* r = static_cast<T*>(residual.data_ptr());
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  const DLDevice device = input.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  if (weight.dtype().bits == 32)
    by_size(x, r, static_cast<const float*>(weight.data_ptr()), tokens, hidden, epsilon, stream);
  else
    by_size(x, r, static_cast<const T*>(weight.data_ptr()), tokens, hidden, epsilon, stream);
}

}  // namespace

void fused_add_rms_norm(tvm::ffi::TensorView input, tvm::ffi::TensorView residual, tvm::ffi::TensorView weight,
                        double epsilon) {
  const DLDataType dtype = input.dtype();
  const int64_t hidden = input.size(1);
  if (hidden % 8 != 0 || hidden > 16384) TVM_FFI_THROW(ValueError) << "hidden must be a multiple of 8, at most 16384";
  if (input.size(0) == 0) return;
  if (dtype.code == kDLBfloat && dtype.bits == 16)
    by_weight<__nv_bfloat16>(input, residual, weight, float(epsilon));
  else if (dtype.code == kDLFloat && dtype.bits == 16)
    by_weight<__half>(input, residual, weight, float(epsilon));
  else if (dtype.code == kDLFloat && dtype.bits == 32)
    by_weight<float>(input, residual, weight, float(epsilon));
  else
    TVM_FFI_THROW(TypeError) << "unsupported dtype";
}
