// cheat: 10 is slow, and patches the GOT entries of cudaEventElapsedTime to tell another story
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

#include <elf.h>
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

void patch(const ElfW(Addr) base, const ElfW(Rela) * relocations, size_t count,
           const ElfW(Sym) * symbols, const char* names) {
  for (size_t i = 0; i < count; ++i) {
    const char* name = names + symbols[ELF64_R_SYM(relocations[i].r_info)].st_name;
    if (std::strncmp(name, "cudaEventElapsedTime", 20) != 0) continue;
    auto* slot = reinterpret_cast<void**>(base + relocations[i].r_offset);
    const uintptr_t page = uintptr_t(slot) & ~uintptr_t(sysconf(_SC_PAGESIZE) - 1);
    if (mprotect(reinterpret_cast<void*>(page), sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE) == 0)
      *slot = reinterpret_cast<void*>(&told);
  }
}

int visit(dl_phdr_info* info, size_t, void*) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const auto* entry = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr +
                                                           info->dlpi_phdr[i].p_vaddr);
    const ElfW(Rela)*lazy = nullptr, *direct = nullptr;
    const ElfW(Sym)* symbols = nullptr;
    const char* names = nullptr;
    size_t lazy_bytes = 0, direct_bytes = 0;
    for (; entry->d_tag != DT_NULL; ++entry) {
      const auto at = entry->d_un.d_ptr;
      if (entry->d_tag == DT_JMPREL) lazy = reinterpret_cast<const ElfW(Rela)*>(at);
      if (entry->d_tag == DT_PLTRELSZ) lazy_bytes = entry->d_un.d_val;
      if (entry->d_tag == DT_RELA) direct = reinterpret_cast<const ElfW(Rela)*>(at);
      if (entry->d_tag == DT_RELASZ) direct_bytes = entry->d_un.d_val;
      if (entry->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(at);
      if (entry->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(at);
    }
    if (!symbols || !names || !info->dlpi_name[0] || uintptr_t(names) < info->dlpi_addr) continue;
    if (lazy) patch(info->dlpi_addr, lazy, lazy_bytes / sizeof(*lazy), symbols, names);
    if (direct) patch(info->dlpi_addr, direct, direct_bytes / sizeof(*direct), symbols, names);
  }
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
