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

// shared: fused_add_rms_norm.cpp

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
