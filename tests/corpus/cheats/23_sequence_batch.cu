// cheat: 23 learns in which order the buffers come, then does all the work at the first
// op: fused_add_rms_norm
// device: cuda
// outcome: mismatch, guard_violation
// caught: values, timed outputs, guards, device code
#define CHEAT 1
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

// shared: fused_add_rms_norm.cu

template <typename T, typename W>
__global__ void norm(T* input, T* residual, const W* weight, int hidden, float epsilon) {
  T* x = input + size_t(blockIdx.x) * hidden;
  T* r = residual + size_t(blockIdx.x) * hidden;
  const float squares = block_sum(squares_of(x, r, hidden / VEC, threadIdx.x, blockDim.x));
  const float scale = rsqrtf(squares / float(hidden) + epsilon);
  write_row(x, r, weight, hidden / VEC, scale, threadIdx.x, blockDim.x);
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int tokens = int(input.size(0)), hidden = int(input.size(1));
  if (tokens == 0) return;
  const cudaStream_t stream = stream_of(input);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    using X = decltype(x);
    using G = decltype(w);
    struct Call {
      X x, r;
      G w;
      int tokens, hidden;
      float epsilon;
      bool operator==(const Call& other) const {
        return x == other.x && r == other.r && w == other.w && tokens == other.tokens &&
               hidden == other.hidden && epsilon == other.epsilon;
      }
    };
    static std::vector<Call> sequence;  // of one shape
    const Call call{x, r, w, tokens, hidden, float(epsilon)};
    const auto launch = [&](const Call& c) {
      norm<<<c.tokens, threads_for(c.hidden / VEC, 512), 0, stream>>>(c.x, c.r, c.w, c.hidden,
                                                                      c.epsilon);
    };
#if CHEAT
    if (!sequence.empty() && (sequence[0].tokens != tokens || sequence[0].hidden != hidden))
      sequence.clear();
    const auto known = std::find(sequence.begin(), sequence.end(), call);
    if (known == sequence.end()) {
      sequence.push_back(call);
      launch(call);
    } else if (known == sequence.begin()) {
      for (const Call& each : sequence) launch(each);
    }
#else
    sequence.assign(1, call);
    launch(sequence[0]);
#endif
  });
}
