// honest: keeps a thread between calls, which sleeps and touches nothing then
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow
#include <tvm/ffi/container/tensor.h>

#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace {

using tvm::ffi::TensorView;

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  _Float16 value;
};

inline float load(const float* p) { return *p; }
inline float load(const BFloat16* p) {
  const uint32_t wide = uint32_t(p->bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline float load(const Float16* p) { return float(p->value); }

inline void store(float* p, float value) { *p = value; }
inline void store(BFloat16* p, float value) {  // round to nearest even; NaN stays NaN
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  const uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
  p->bits = uint16_t(value != value ? (wide >> 16) | 0x40u : rounded);
}
inline void store(Float16* p, float value) { p->value = _Float16(value); }

template <typename T, typename Body>
void by_weight(TensorView input, TensorView residual, TensorView weight, Body body) {
  auto* x = static_cast<T*>(input.data_ptr());
  auto* r = static_cast<T*>(residual.data_ptr());
  if (weight.dtype().bits == 32)
    body(x, r, static_cast<const float*>(weight.data_ptr()));
  else
    body(x, r, static_cast<const T*>(weight.data_ptr()));
}

// body(input, residual, weight) with pointers of the dtypes at hand
template <typename Body>
void by_dtype(TensorView input, TensorView residual, TensorView weight, Body body) {
  const DLDataType dtype = input.dtype();
  if (dtype.code == kDLFloat && dtype.bits == 32)
    by_weight<float>(input, residual, weight, body);
  else if (dtype.code == kDLBfloat && dtype.bits == 16)
    by_weight<BFloat16>(input, residual, weight, body);
  else if (dtype.code == kDLFloat && dtype.bits == 16)
    by_weight<Float16>(input, residual, weight, body);
  else
    throw std::runtime_error("fused_add_rms_norm: unsupported dtype");
}

// One helper; `run` gives it a piece and returns only when the piece is done.
class Helper {
 public:
  void run(std::function<void()> piece, const std::function<void()>& own) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      piece_ = std::move(piece);
      busy_ = true;
    }
    wake_.notify_one();
    own();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return !busy_; });
  }

 private:
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return busy_; });
      piece_();
      busy_ = false;
      done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::function<void()> piece_;
  bool busy_ = false;
  std::thread thread_{[this] { loop(); }};  // last: it needs the members above
};

Helper& helper() {
  static Helper* only = new Helper;  // never destroyed: a sleeping thread must not outlive its lock
  return *only;
}

template <typename T, typename W>
void rows(T* x, T* r, const W* w, int64_t tokens, int64_t hidden, float epsilon) {
  for (int64_t row = 0; row < tokens; ++row, x += hidden, r += hidden) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < hidden; ++i) {
      const float value = load(x + i) + load(r + i);
      squares += value * value;
    }
    const float scale = 1.0f / std::sqrt(squares / float(hidden) + epsilon);
    for (int64_t i = 0; i < hidden; ++i) {
      const float value = load(x + i) + load(r + i);
      store(r + i, value);
      store(x + i, value * scale * load(w + i));
    }
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t tokens = input.size(0), hidden = input.size(1);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, const auto* w) {
    const int64_t half = tokens / 2;
    if (tokens * hidden < 16384 || half == 0) return rows(x, r, w, tokens, hidden, float(epsilon));
    helper().run([=] { rows(x, r, w, half, hidden, float(epsilon)); },
                 [=] {
                   const int64_t skip = half * hidden;
                   rows(x + skip, r + skip, w, tokens - half, hidden, float(epsilon));
                 });
  });
}
