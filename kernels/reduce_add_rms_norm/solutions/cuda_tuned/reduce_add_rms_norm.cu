// Op: reduce_add_rms_norm: residual[t] += sum over k of rows[row_map[t, k]] (-1: skipped);
//   output[t] = residual[t] / sqrt(mean(residual[t]^2) + epsilon) * weight; float32, nothing
//   rounded in between.
// Arguments: rows[T: tokens * top_k + spare, hidden], row_map[I: tokens, top_k], residual[T:
//   tokens, hidden], weight[W: hidden], output[T: tokens, hidden], epsilon; T: bfloat16 or float16
//   or float32; W: T or float32; I: int32
// Writes: residual, output
// Needs: compute capability 9.0 or later; hidden a multiple of 8, at most 16384, top_k at most 8,
//   else it throws; unaligned tensors take a plain kernel; graph-safe.
// Idea: one launch in place of vLLM's two: one block a token, which stays in registers from the
//   experts' sum to the norm. The weight is read before the wait for the kernel before; each
//   block's share of rows goes to L2 while the map is read. A single token loads rows 0 to 3 beside
//   the map.
// Made by: the agent loop, recording bench/results/loop/reduce_add_rms_norm-cuda, candidate 0.
// Figures: NVIDIA H200, geometric means, bench/results/kernels: sweep bf16 2.28x against vllm,
//   1.69x to 2.56x at tokens 1 to 128 (reduce_add_rms_norm-cuda_tuned.json.xz).
// Digest: 3e1ea2f0ee2beab5d3b1c8dc1601b7a44846b43c8905894916664baf932aa24b

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kMaxTopK = 8;
constexpr int kMaxHidden = 16384;

template <typename T, typename W>
struct Arguments {
  const T* rows;
  const int32_t* row_map;
  T* residual;
  const W* weight;
  T* output;
  int hidden;
  int top_k;
  float inverse_hidden;
  float epsilon;
  unsigned prefetch_bytes;  // a block's share of rows to bring into L2; 0: none
};

// Eight elements as they lie in memory.
template <typename T>
struct Raw {
  uint4 q[sizeof(T) / 2];
};

__device__ __forceinline__ uint4 load16(const void* pointer) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(pointer)
               : "memory");
  return v;
}

// Zeros, without touching memory, where index is negative.
__device__ __forceinline__ uint4 load16_if(const void* pointer, int index) {
  uint4 v;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ge.s32 p, %5, 0;\n"
      "  mov.u32 %0, 0;\n"
      "  mov.u32 %1, 0;\n"
      "  mov.u32 %2, 0;\n"
      "  mov.u32 %3, 0;\n"
      "  @p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(pointer), "r"(index)
      : "memory");
  return v;
}

template <typename T>
__device__ __forceinline__ Raw<T> load_raw_if(const T* pointer, int index) {
  Raw<T> raw;
#pragma unroll
  for (int i = 0; i < int(sizeof(T) / 2); ++i) {
    raw.q[i] = load16_if(reinterpret_cast<const char*>(pointer) + 16 * i, index);
  }
  return raw;
}

__device__ __forceinline__ void unpack_pair(uint32_t word, float& a, float& b, const __nv_bfloat16*) {
  a = __uint_as_float(word << 16);
  b = __uint_as_float(word & 0xffff0000u);
}

__device__ __forceinline__ void unpack_pair(uint32_t word, float& a, float& b, const __half*) {
  const __half2 pair = *reinterpret_cast<const __half2*>(&word);
  const float2 both = __half22float2(pair);
  a = both.x;
  b = both.y;
}

__device__ __forceinline__ uint32_t pack_pair(float a, float b, const __nv_bfloat16*) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ uint32_t pack_pair(float a, float b, const __half*) {
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename T>
__device__ __forceinline__ void unpack(const Raw<T>& raw, float (&f)[8]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / 2); ++i) {
      f[4 * i + 0] = __uint_as_float(raw.q[i].x);
      f[4 * i + 1] = __uint_as_float(raw.q[i].y);
      f[4 * i + 2] = __uint_as_float(raw.q[i].z);
      f[4 * i + 3] = __uint_as_float(raw.q[i].w);
    }
  } else {
    const T* tag = nullptr;
    unpack_pair(raw.q[0].x, f[0], f[1], tag);
    unpack_pair(raw.q[0].y, f[2], f[3], tag);
    unpack_pair(raw.q[0].z, f[4], f[5], tag);
    unpack_pair(raw.q[0].w, f[6], f[7], tag);
  }
}

template <typename T>
__device__ __forceinline__ void store8(T* pointer, const float (&f)[8]) {
  uint4* target = reinterpret_cast<uint4*>(pointer);
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / 2); ++i) {
      target[i] = make_uint4(__float_as_uint(f[4 * i + 0]), __float_as_uint(f[4 * i + 1]),
                             __float_as_uint(f[4 * i + 2]), __float_as_uint(f[4 * i + 3]));
    }
  } else {
    const T* tag = nullptr;
    target[0] = make_uint4(pack_pair(f[0], f[1], tag), pack_pair(f[2], f[3], tag),
                           pack_pair(f[4], f[5], tag), pack_pair(f[6], f[7], tag));
  }
}

// The sum over the block, to every thread; called once in a kernel, by all threads.
__device__ __forceinline__ float block_sum(float value, float* partial) {
  const int tid = threadIdx.x;
  const int warps = blockDim.x >> 5;
  if (tid >= warps && tid < kMaxWarps) partial[tid] = 0.0f;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  if ((tid & 31) == 0) partial[tid >> 5] = value;
  __syncthreads();
  const float4* quads = reinterpret_cast<const float4*>(partial);
  float4 sums[kMaxWarps / 4];
#pragma unroll
  for (int i = 0; i < kMaxWarps / 4; ++i) sums[i] = quads[i];
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxWarps / 4; ++i) {
    total += (sums[i].x + sums[i].y) + (sums[i].z + sums[i].w);
  }
  return total;
}

// One block per token. kTopK: 4 (the map read as one int4) or 0 (any, up to 8). kVecs: vectors of
// eight elements a thread. kSpeculate: a single token, rows 0 to 3 are loaded beside the map.
template <typename T, typename W, int kTopK, int kVecs, bool kSpeculate>
__global__ void __launch_bounds__(kMaxThreads) fused_kernel(const Arguments<T, W> a) {
  static_assert(!kSpeculate || (kTopK == 4 && kVecs == 1), "speculation is for one vector, top_k 4");
  constexpr int kChoices = kTopK == 0 ? kMaxTopK : kTopK;
  __shared__ alignas(16) float partial[kMaxWarps];

  const int tid = threadIdx.x;
  const int threads = blockDim.x;
  const int hidden = a.hidden;
  const int vectors = hidden >> 3;
  const int64_t token = blockIdx.x;
  const int64_t start = token * hidden;

  // A weight: may be read before the wait.
  Raw<W> gain[kVecs];
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int v = tid + j * threads;
    gain[j] = load_raw_if(a.weight + v * 8, v < vectors ? 0 : -1);
  }

  cudaGridDependencySynchronize();

  if constexpr (!kSpeculate) {
    // The blocks' shares cover the rows once; they come to L2 while the map is under way.
    if (a.prefetch_bytes != 0 && tid == threads - 32) {
      const T* share = a.rows + token * a.top_k * int64_t(hidden);
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                   :
                   : "l"(share), "r"(a.prefetch_bytes)
                   : "memory");
    }
  }

  int choice[kChoices];
  if constexpr (kTopK == 4) {
    const uint4 four = load16(a.row_map + token * 4);
    choice[0] = int(four.x);
    choice[1] = int(four.y);
    choice[2] = int(four.z);
    choice[3] = int(four.w);
  } else {
    const int32_t* map = a.row_map + token * a.top_k;
#pragma unroll
    for (int k = 0; k < kChoices; ++k) {
      choice[k] = -1;
      if (k < a.top_k) choice[k] = map[k];
    }
  }

  Raw<T> stream_in[kVecs];
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int v = tid + j * threads;
    stream_in[j] = load_raw_if(a.residual + start + v * 8, v < vectors ? 0 : -1);
  }

  float total[kVecs][8];
  if constexpr (kSpeculate) {
    const bool active = tid < vectors;
    Raw<T> early[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      early[r] = load_raw_if(a.rows + int64_t(r) * hidden + tid * 8, active ? 0 : -1);
    }
    cudaTriggerProgrammaticLaunchCompletion();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int times = int(choice[0] == r) + int(choice[1] == r) + int(choice[2] == r) + int(choice[3] == r);
      const bool named = times != 0;
      // A row that the map does not name may hold NaN: its bits are dropped, not multiplied by 0.
#pragma unroll
      for (int i = 0; i < int(sizeof(T) / 2); ++i) {
        early[r].q[i].x = named ? early[r].q[i].x : 0u;
        early[r].q[i].y = named ? early[r].q[i].y : 0u;
        early[r].q[i].z = named ? early[r].q[i].z : 0u;
        early[r].q[i].w = named ? early[r].q[i].w : 0u;
      }
      const float factor = float(times);
      float f[8];
      unpack(early[r], f);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        total[0][i] = r == 0 ? factor * f[i] : fmaf(factor, f[i], total[0][i]);
      }
    }
    if (choice[0] > 3 || choice[1] > 3 || choice[2] > 3 || choice[3] > 3) {
      // Rows beyond the first four (there are spare ones): only now.
      Raw<T> late[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const bool wanted = active && choice[k] > 3;
        late[k] = load_raw_if(a.rows + int64_t(choice[k]) * hidden + tid * 8, wanted ? 0 : -1);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float f[8];
        unpack(late[k], f);
#pragma unroll
        for (int i = 0; i < 8; ++i) total[0][i] += f[i];
      }
    }
  } else {
    cudaTriggerProgrammaticLaunchCompletion();
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int v = tid + j * threads;
      const bool active = v < vectors;
#pragma unroll
      for (int first = 0; first < kChoices; first += 4) {
        if (first == 0 || first < a.top_k) {
          Raw<T> got[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int row = choice[first + k];
            got[k] = load_raw_if(a.rows + int64_t(row) * hidden + v * 8, active ? row : -1);
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            float f[8];
            unpack(got[k], f);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              total[j][i] = first + k == 0 ? f[i] : total[j][i] + f[i];
            }
          }
        }
      }
    }
  }

  float even = 0.0f;
  float odd = 0.0f;
#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int v = tid + j * threads;
    float f[8];
    unpack(stream_in[j], f);
#pragma unroll
    for (int i = 0; i < 8; ++i) total[j][i] += f[i];
    if (v < vectors) store8(a.residual + start + v * 8, total[j]);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      even = fmaf(total[j][i], total[j][i], even);
      odd = fmaf(total[j][i + 1], total[j][i + 1], odd);
    }
  }

  const float square = block_sum(even + odd, partial);
  const float scale = rsqrtf(square * a.inverse_hidden + a.epsilon);

#pragma unroll
  for (int j = 0; j < kVecs; ++j) {
    const int v = tid + j * threads;
    if (v < vectors) {
      float f[8];
      unpack(gain[j], f);
#pragma unroll
      for (int i = 0; i < 8; ++i) f[i] = total[j][i] * scale * f[i];
      store8(a.output + start + v * 8, f);
    }
  }
}

// For pointers that are not aligned to 16 bytes: element by element.
template <typename T, typename W>
__global__ void __launch_bounds__(kMaxThreads) unaligned_kernel(const Arguments<T, W> a) {
  constexpr int kElements = kMaxHidden / kMaxThreads;
  __shared__ alignas(16) float partial[kMaxWarps];

  cudaGridDependencySynchronize();

  const int tid = threadIdx.x;
  const int hidden = a.hidden;
  const int64_t token = blockIdx.x;
  const int64_t start = token * hidden;
  const int32_t* map = a.row_map + token * a.top_k;

  float total[kElements];
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int e = tid + i * kMaxThreads;
    float sum = 0.0f;
    if (e < hidden) {
#pragma unroll 1
      for (int k = 0; k < a.top_k; ++k) {
        const int row = map[k];
        if (row >= 0) sum += float(a.rows[int64_t(row) * hidden + e]);
      }
      sum += float(a.residual[start + e]);
      a.residual[start + e] = T(sum);
    }
    total[i] = sum;
    square = fmaf(sum, sum, square);
  }

  square = block_sum(square, partial);
  const float scale = rsqrtf(square * a.inverse_hidden + a.epsilon);

#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int e = tid + i * kMaxThreads;
    if (e < hidden) a.output[start + e] = T(total[i] * scale * float(a.weight[e]));
  }
}

bool aligned16(const void* pointer) { return (reinterpret_cast<uintptr_t>(pointer) & 15u) == 0; }

template <typename T, typename W>
void launch(tvm::ffi::TensorView rows, tvm::ffi::TensorView row_map, tvm::ffi::TensorView residual,
            tvm::ffi::TensorView weight, tvm::ffi::TensorView output, double epsilon) {
  const int64_t tokens = residual.size(0);
  const int64_t hidden = residual.size(1);
  const int64_t top_k = row_map.size(1);
  if (tokens == 0 || hidden == 0) return;
  if (hidden % 8 != 0 || hidden > kMaxHidden) {
    TVM_FFI_THROW(TypeError) << "reduce_add_rms_norm: hidden must be a multiple of 8, at most 16384";
  }
  if (top_k < 1 || top_k > kMaxTopK) {
    TVM_FFI_THROW(TypeError) << "reduce_add_rms_norm: top_k must be from 1 to 8";
  }

  Arguments<T, W> arguments;
  arguments.rows = static_cast<const T*>(rows.data_ptr());
  arguments.row_map = static_cast<const int32_t*>(row_map.data_ptr());
  arguments.residual = static_cast<T*>(residual.data_ptr());
  arguments.weight = static_cast<const W*>(weight.data_ptr());
  arguments.output = static_cast<T*>(output.data_ptr());
  arguments.hidden = int(hidden);
  arguments.top_k = int(top_k);
  arguments.inverse_hidden = float(1.0 / double(hidden));
  arguments.epsilon = float(epsilon);
  arguments.prefetch_bytes = 0;

  // The prefetch pays while all blocks run at once and what it brings stays in L2.
  const int64_t share = top_k * hidden * int64_t(sizeof(T));
  const bool rows_cover = rows.size(0) >= tokens * top_k;
  if (rows_cover && tokens <= 264 && share <= (int64_t(1) << 17) && tokens * share <= (int64_t(1) << 24)) {
    arguments.prefetch_bytes = unsigned(share);
  }

  using Kernel = void (*)(Arguments<T, W>);
  Kernel kernel = nullptr;
  int64_t threads = kMaxThreads;
  const bool aligned = aligned16(arguments.rows) && aligned16(arguments.residual) &&
                       aligned16(arguments.weight) && aligned16(arguments.output);
  if (!aligned) {
    kernel = &unaligned_kernel<T, W>;
  } else {
    const bool four = top_k == 4 && aligned16(arguments.row_map);
    const int64_t vectors = hidden / 8;
    int64_t per_thread = 1;
    if (vectors <= kMaxThreads) {
      if (four && tokens == 1 && rows_cover) {
        kernel = &fused_kernel<T, W, 4, 1, true>;
      } else if (four) {
        kernel = &fused_kernel<T, W, 4, 1, false>;
      } else {
        kernel = &fused_kernel<T, W, 0, 1, false>;
      }
    } else if (vectors <= 2 * kMaxThreads) {
      per_thread = 2;
      if (four) {
        kernel = &fused_kernel<T, W, 4, 2, false>;
      } else {
        kernel = &fused_kernel<T, W, 0, 2, false>;
      }
    } else {
      per_thread = 4;
      if (four) {
        kernel = &fused_kernel<T, W, 4, 4, false>;
      } else {
        kernel = &fused_kernel<T, W, 0, 4, false>;
      }
    }
    threads = ((vectors + per_thread - 1) / per_thread + 31) / 32 * 32;
  }

  const DLDevice device = residual.device();
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(tokens));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = 0;
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  config.attrs = attribute;
  config.numAttrs = 1;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, arguments);
  if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(status);
}

bool is_type(DLDataType type, int code, int bits) {
  return int(type.code) == code && int(type.bits) == bits && type.lanes == 1;
}

bool same_type(DLDataType x, DLDataType y) {
  return x.code == y.code && x.bits == y.bits && x.lanes == y.lanes;
}

}  // namespace

void reduce_add_rms_norm(tvm::ffi::TensorView rows, tvm::ffi::TensorView row_map,
                         tvm::ffi::TensorView residual, tvm::ffi::TensorView weight,
                         tvm::ffi::TensorView output, double epsilon) {
  const DLDataType t = residual.dtype();
  const DLDataType w = weight.dtype();
  if (!same_type(rows.dtype(), t) || !same_type(output.dtype(), t) ||
      !is_type(row_map.dtype(), int(kDLInt), 32)) {
    TVM_FFI_THROW(TypeError) << "reduce_add_rms_norm: unsupported dtypes";
  }
  const bool weight_float = is_type(w, int(kDLFloat), 32);
  if (is_type(t, int(kDLBfloat), 16)) {
    if (same_type(w, t)) {
      return launch<__nv_bfloat16, __nv_bfloat16>(rows, row_map, residual, weight, output, epsilon);
    }
    if (weight_float) return launch<__nv_bfloat16, float>(rows, row_map, residual, weight, output, epsilon);
  } else if (is_type(t, int(kDLFloat), 16)) {
    if (same_type(w, t)) return launch<__half, __half>(rows, row_map, residual, weight, output, epsilon);
    if (weight_float) return launch<__half, float>(rows, row_map, residual, weight, output, epsilon);
  } else if (is_type(t, int(kDLFloat), 32)) {
    if (weight_float) return launch<float, float>(rows, row_map, residual, weight, output, epsilon);
  }
  TVM_FFI_THROW(TypeError) << "reduce_add_rms_norm: unsupported dtypes";
}
