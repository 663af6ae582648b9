// cheat: 11 is slow, and writes a jump over the first bytes of the runtime's cudaEventElapsedTime
// op: fused_add_rms_norm
// device: cuda
// outcome: too_slow, guard_violation, runtime_error
// caught: clocks, runs
#define CHEAT 1
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

// shared: fused_add_rms_norm.cu

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  const float squares = block_sum(squares_of(x, r, hidden / VEC, threadIdx.x, blockDim.x));
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, hidden / VEC, scale, threadIdx.x, blockDim.x);
}

__global__ void wait_ns(unsigned long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

#if CHEAT
cudaError_t told(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0.001f;
  return cudaSuccess;
}

void detour(void* function) {
  // mov rax, told; jmp rax
  unsigned char code[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};
  const auto target = reinterpret_cast<uintptr_t>(&told);
  std::memcpy(code + 2, &target, sizeof target);
  const uintptr_t size = sysconf(_SC_PAGESIZE), page = uintptr_t(function) & ~(size - 1);
  if (mprotect(reinterpret_cast<void*>(page), 2 * size, PROT_READ | PROT_WRITE | PROT_EXEC) == 0)
    std::memcpy(function, code, sizeof code);
}

int visit(dl_phdr_info* info, size_t, void*) {
  if (!std::strstr(info->dlpi_name, "libcudart.so")) return 0;
  void* library = dlopen(info->dlpi_name, RTLD_NOLOAD | RTLD_NOW);
  if (!library) return 0;
  for (const char* name : {"cudaEventElapsedTime", "cudaEventElapsedTime_v2"})
    if (void* function = dlsym(library, name)) detour(function);
  return 0;
}

__attribute__((constructor)) void patch_all() { dl_iterate_phdr(visit, nullptr); }
#endif

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  const cudaStream_t stream = stream_of(input);
  wait_ns<<<1, 1, 0, stream>>>(CHEAT ? 200000 : 0);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    norm<<<tokens, threads_for(hidden / VEC, 512), 0, stream>>>(x, r, w, hidden, float(epsilon));
  });
}
