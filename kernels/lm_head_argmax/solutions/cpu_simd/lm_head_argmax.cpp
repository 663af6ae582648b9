// Op: lm_head_argmax: the index of each token's largest logit, x times weight in float32, without
//   writing the logits; of equal ones the smallest index, and NaN is above infinity.
// Arguments: x[T: tokens, hidden], weight[T: vocab, hidden], output[I: tokens]; T: bfloat16 or
//   float16 or float32; I: int64
// Writes: output
// Needs: any CPU that g++ compiles for; any size; contiguous tensors; other dtypes throw.
// Idea: a row of the weight is read once for all tokens, eight at a time in vector registers; each
//   thread keeps the best of its part of the vocabulary. OpenMP from 1,048,576 products on.
// Made by: hand, as a plain right solution.
// Figures: not measured.
// Digest: 8888c4d7025590179be44b036481a1d5a58a899604087fb22c9ef5982f116099

#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  _Float16 value;
};

inline float load(const float* p) { return *p; }
inline float load(const BFloat16* p) {
  uint32_t wide = uint32_t(p->bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline float load(const Float16* p) { return float(p->value); }

// an integer in the order of the numbers: -0 and 0 are one, and NaN is above infinity
inline int32_t rank(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const int32_t size = bits & 0x7fffffff;
  const int32_t ordered = bits < 0 ? -size : size;
  return size > 0x7f800000 ? std::numeric_limits<int32_t>::max() : ordered;
}

struct Best {
  int32_t rank = std::numeric_limits<int32_t>::min();
  int64_t index = std::numeric_limits<int64_t>::max();

  // of equal ones the smaller index, in whatever order they come
  void take(int32_t other, int64_t at) {
    if (other > rank || (other == rank && at < index)) rank = other, index = at;
  }
};

constexpr int64_t kRows = 8;

// products of one row of the weight with kRows tokens, the tail of tokens one by one
template <int64_t kTokens>
inline void dots(const float* row, const float* x, int64_t hidden, float* found) {
  float sums[kTokens][16] = {};
  for (int64_t h = 0; h + 16 <= hidden; h += 16)
    for (int64_t t = 0; t < kTokens; ++t)
#pragma omp simd
      for (int64_t i = 0; i < 16; ++i) sums[t][i] += row[h + i] * x[t * hidden + h + i];
  for (int64_t t = 0; t < kTokens; ++t) {
    float sum = 0.0f;
    for (int64_t i = 0; i < 16; ++i) sum += sums[t][i];
    for (int64_t h = hidden / 16 * 16; h < hidden; ++h) sum += row[h] * x[t * hidden + h];
    found[t] = sum;
  }
}

template <typename T>
void run(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView output) {
  const int64_t tokens = x.size(0), hidden = x.size(1), vocab = weight.size(0);
  const auto* given = static_cast<const T*>(x.data_ptr());
  const auto* w = static_cast<const T*>(weight.data_ptr());
  auto* y = static_cast<int64_t*>(output.data_ptr());
  std::vector<float> rows(tokens * hidden);
  for (int64_t i = 0; i < tokens * hidden; ++i) rows[i] = load(given + i);
  std::vector<Best> best(tokens);
#pragma omp parallel if (tokens * hidden * vocab >= 1048576)
  {
    std::vector<Best> mine(tokens);
    std::vector<float> row(hidden);
    float found[kRows];
#pragma omp for schedule(static) nowait
    for (int64_t v = 0; v < vocab; ++v) {
      for (int64_t h = 0; h < hidden; ++h) row[h] = load(w + v * hidden + h);
      int64_t t = 0;
      for (; t + kRows <= tokens; t += kRows) {
        dots<kRows>(row.data(), rows.data() + t * hidden, hidden, found);
        for (int64_t i = 0; i < kRows; ++i) mine[t + i].take(rank(found[i]), v);
      }
      for (; t < tokens; ++t) {
        dots<1>(row.data(), rows.data() + t * hidden, hidden, found);
        mine[t].take(rank(found[0]), v);
      }
    }
#pragma omp critical
    for (int64_t t = 0; t < tokens; ++t) best[t].take(mine[t].rank, mine[t].index);
  }
  for (int64_t t = 0; t < tokens; ++t) y[t] = best[t].index;
}

}  // namespace

void lm_head_argmax(tvm::ffi::TensorView x, tvm::ffi::TensorView weight,
                    tvm::ffi::TensorView output) {
  const DLDataType dtype = x.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32)
    run<float>(x, weight, output);
  else if (dtype.code == kDLBfloat && dtype.bits == 16)
    run<BFloat16>(x, weight, output);
  else if (dtype.code == kDLFloat && dtype.bits == 16)
    run<Float16>(x, weight, output);
  else
    throw std::runtime_error("lm_head_argmax: unsupported dtype");
}
