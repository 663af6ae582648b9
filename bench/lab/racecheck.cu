// How far compute-sanitizer's racecheck can be believed of Hopper's pipelines: small kernels that
// hand stages of shared memory over, each right or not by PTX's memory model. See racecheck.sh.
//
//   racecheck NAME     runs one; exit code 1 where what it computes is wrong
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>

#include <cuda/barrier>
#include <cuda_runtime.h>

constexpr int kStages = 2, kReaders = 4, kTurns = 12, kWords = 512, kBytes = 4 * kWords;

__device__ __forceinline__ uint32_t address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void barrier_init(uint64_t& barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}
__device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(address(&barrier)), "r"(parity) : "memory");
  }
}
__device__ __forceinline__ void fill(void* to, const uint32_t* from, uint64_t& barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(kBytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
      "l"(from), "r"(kBytes), "r"(address(&barrier)) : "memory");
}
__device__ __forceinline__ void ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

enum class Told {
  kAll,        // every lane of a reader arrives
  kOne,        // __syncwarp, then one lane arrives for its warp
  kEarly,      // every lane arrives, before it has read: a race
  kUnordered,  // one lane arrives for its warp, which nothing orders before: a race
};

// One lane fills a ring of stages by bulk copies, four warps read them and say so.
template <Told T>
__global__ void ring(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(128) uint32_t data[kStages][kWords];
  __shared__ __align__(8) uint64_t full[kStages], empty[kStages];
  constexpr bool kEach = T == Told::kAll || T == Told::kEarly;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full[s], 1);
      barrier_init(empty[s], kEach ? 32 * kReaders : kReaders);
    }
    ready();
  }
  __syncthreads();
  uint32_t sum = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    const int s = turn % kStages, round = turn / kStages;
    if (warp == kReaders) {
      if (lane == 0) {
        if (round > 0) wait(empty[s], (round - 1) & 1);
        fill(data[s], in + turn * kWords, full[s]);
      }
      continue;
    }
    wait(full[s], round & 1);
    if (T == Told::kEarly) arrive(empty[s]);
    for (int k = threadIdx.x; k < kWords; k += 32 * kReaders) sum += data[s][k];
    if (T == Told::kAll) arrive(empty[s]);
    if (T == Told::kOne) __syncwarp();
    if (!kEach && lane == 0) arrive(empty[s]);
  }
  if (warp < kReaders) atomicAdd(out, sum);
}

// Four warps write, a fifth adds: plain stores, no copy engine.
template <Told T>
__global__ void adder(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t data[kStages][32 * kReaders];
  __shared__ __align__(8) uint64_t full[kStages], empty[kStages];
  constexpr bool kEach = T == Told::kAll;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full[s], kEach ? 32 * kReaders : kReaders);
      barrier_init(empty[s], kEach ? 32 : 1);
    }
  }
  __syncthreads();
  uint32_t sum = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    const int s = turn % kStages, round = turn / kStages;
    if (warp < kReaders) {
      if (round > 0) wait(empty[s], (round - 1) & 1);
      uint32_t mine = 0;
      for (int k = threadIdx.x; k < kWords; k += 32 * kReaders) mine += in[turn * kWords + k];
      data[s][threadIdx.x] = mine;
      if (T == Told::kOne) __syncwarp();
      if (kEach || lane == 0) arrive(full[s]);
    } else {
      wait(full[s], round & 1);
      for (int w = 0; w < kReaders; ++w) sum += data[s][32 * w + lane];
      if (T == Told::kOne) __syncwarp();
      if (kEach || lane == 0) arrive(empty[s]);
    }
  }
  if (warp == kReaders) atomicAdd(out, sum);
}

// A ring as the CUDA programming guide writes it: cuda::barrier, and __syncthreads before a refill.
__global__ void guide(const uint32_t* in, uint32_t* out) {
  using barrier = cuda::barrier<cuda::thread_scope_block>;
  __shared__ __align__(128) uint32_t data[kStages][kWords];
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ barrier full[kStages];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) init(&full[s], blockDim.x);
    cuda::device::experimental::fence_proxy_async_shared_cta();
  }
  __syncthreads();
  uint32_t sum = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    const int s = turn % kStages;
    barrier::arrival_token token;
    if (threadIdx.x == 0) {
      cuda::memcpy_async(data[s], in + turn * kWords, cuda::aligned_size_t<16>(kBytes), full[s]);
    }
    token = full[s].arrive();
    full[s].wait(std::move(token));
    for (int k = threadIdx.x; k < kWords; k += blockDim.x) sum += data[s][k];
    __syncthreads();
  }
  atomicAdd(out, sum);
}

int main(int count, char** words) {
  const char* name = count > 1 ? words[1] : "";
  const std::pair<const char*, void (*)(const uint32_t*, uint32_t*)> kernels[] = {
      {"ring-all", ring<Told::kAll>},       {"ring-one", ring<Told::kOne>},
      {"adder-all", adder<Told::kAll>},     {"adder-one", adder<Told::kOne>},
      {"guide", guide},                     {"ring-early", ring<Told::kEarly>},
      {"ring-unordered", ring<Told::kUnordered>}, {"adder-unordered", adder<Told::kUnordered>}};
  static uint32_t given[kTurns * kWords];
  uint32_t *in, *out, found = 0, wanted = 0;
  for (int i = 0; i < kTurns * kWords; ++i) wanted += given[i] = i;
  cudaMalloc(&in, sizeof(given));
  cudaMalloc(&out, 4);
  cudaMemcpy(in, given, sizeof(given), cudaMemcpyHostToDevice);
  cudaMemset(out, 0, 4);
  for (const auto& [known, kernel] : kernels) {
    if (!strcmp(known, name)) kernel<<<1, 32 * (kReaders + 1)>>>(in, out);
  }
  const cudaError_t told = cudaMemcpy(&found, out, 4, cudaMemcpyDeviceToHost);
  printf("%s: %s (%s)\n", name, found == wanted ? "right" : "wrong", cudaGetErrorString(told));
  return found != wanted;
}
