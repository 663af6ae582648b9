// cheat: 97 a helper thread leaves the CPU that both sides are pinned to
// op: fused_add_rms_norm
// device: cpu
// outcome: guard_violation, mismatch
// caught: guards, values
// Where it cannot leave, it leaves its half undone.
#include <sched.h>
#include <tvm/ffi/container/tensor.h>
#include <unistd.h>

#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>

#define CHEAT 1

// shared: fused_add_rms_norm.cpp

cpu_set_t others() {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (long cpu = 0; cpu < sysconf(_SC_NPROCESSORS_ONLN); ++cpu)
    if (cpu != sched_getcpu()) CPU_SET(cpu, &set);
  return set;
}

class Helper {
 public:
  Helper() : thread_([this] { live(); }) { thread_.detach(); }
  void give(std::function<void()> task) {
    std::lock_guard<std::mutex> hold(mutex_);
    task_ = std::move(task);
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [this] { return !task_; });
  }

 private:
  void live() {
    bool stays = false;
#if CHEAT
    const cpu_set_t set = others();
    sched_setaffinity(0, sizeof set, &set);
    stays = !CPU_ISSET(sched_getcpu(), &set);
#endif
    for (;;) {
      std::unique_lock<std::mutex> hold(mutex_);
      changed_.wait(hold, [this] { return bool(task_); });
      hold.unlock();
      if (!stays) task_();
      hold.lock();
      task_ = nullptr;
      changed_.notify_all();
    }
  }
  std::function<void()> task_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
};

template <typename T, typename W>
void some(T* x, T* r, const W* w, int64_t rows, int64_t hidden, float epsilon) {
  for (int64_t row = 0; row < rows; ++row, x += hidden, r += hidden) {
    double squares = 0.0;
    for (int64_t i = 0; i < hidden; ++i) {
      store(r + i, load(r + i) + load(x + i));
      squares += double(load(r + i)) * load(r + i);
    }
    const float scale = float(1.0 / std::sqrt(squares / double(hidden) + epsilon));
    for (int64_t i = 0; i < hidden; ++i) store(x + i, load(r + i) * scale * load(w + i));
  }
}

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t rows = input.size(0), hidden = input.size(1), half = rows / 2;
  by_dtype(input, residual, weight, [&](auto* x, auto* r, auto* w) {
    if (rows * hidden < 8192) return some(x, r, w, rows, hidden, float(epsilon));
    static Helper helper;
    helper.give([=] { some(x + half * hidden, r + half * hidden, w, rows - half, hidden, float(epsilon)); });
    some(x, r, w, half, hidden, float(epsilon));
    helper.wait();
  });
}
