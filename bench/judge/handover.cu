// What racecheck should find nothing in: a control for it (see sanitizer.py).
//
// Warps hand a buffer over through mbarriers as Hopper's kernels do: each lane writes, __syncwarp,
// then one lane arrives for its warp; who waits for the barrier reads, __syncwarp, and one lane
// arrives for the way back. By PTX's memory model that is no race: bar.warp.sync orders the lanes'
// accesses before the arrival, which releases them, and the wait acquires. Checks its own sums.
#include <cstdint>
#include <stdexcept>

#include <cuda_runtime.h>

namespace handover {

constexpr int kStages = 2, kWriters = 4, kTurns = 16;

__device__ __forceinline__ uint32_t address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

__global__ void hand_over(uint32_t* sums) {
  __shared__ uint32_t data[kStages][kWriters * 32];
  __shared__ __align__(8) uint64_t full[kStages], empty[kStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init(address(&full[stage]), kWriters);
      init(address(&empty[stage]), 1);
    }
  }
  __syncthreads();
  uint32_t sum = 0;
  for (int turn = 0; turn < kTurns; ++turn) {
    const int stage = turn % kStages, round = turn / kStages;
    if (warp < kWriters) {
      if (round > 0) wait(address(&empty[stage]), (round - 1) & 1);
      __syncwarp();
      data[stage][threadIdx.x] = turn + threadIdx.x;
      __syncwarp();
      if (lane == 0) arrive(address(&full[stage]));
    } else {
      wait(address(&full[stage]), round & 1);
      __syncwarp();
      for (int writer = 0; writer < kWriters; ++writer) sum += data[stage][writer * 32 + lane];
      __syncwarp();
      if (lane == 0) arrive(address(&empty[stage]));
    }
  }
  if (warp == kWriters) sums[lane] = sum;
}

}  // namespace handover

void ENTRY() {
  using namespace handover;
  uint32_t* sums = nullptr;
  uint32_t found[32];
  if (cudaMalloc(&sums, sizeof(found)) != cudaSuccess) throw std::runtime_error("no memory");
  hand_over<<<1, 32 * (kWriters + 1)>>>(sums);
  const cudaError_t told = cudaMemcpy(found, sums, sizeof(found), cudaMemcpyDeviceToHost);
  cudaFree(sums);
  if (told != cudaSuccess) throw std::runtime_error(cudaGetErrorString(told));
  for (int lane = 0; lane < 32; ++lane) {
    uint32_t wanted = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int writer = 0; writer < kWriters; ++writer) wanted += turn + writer * 32 + lane;
    }
    if (found[lane] != wanted) throw std::runtime_error("the control's sums are wrong");
  }
}
