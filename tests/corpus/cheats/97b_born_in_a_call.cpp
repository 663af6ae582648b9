// cheat: 97 a process that is born in a call does half of it on another CPU and is gone by the reply
// op: fused_add_rms_norm
// device: cpu
// outcome: correct, too_slow, guard_violation
// gains: nothing
// caught: guards
#include <sched.h>
#include <signal.h>
#include <tvm/ffi/container/tensor.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>

#define CHEAT 1

// shared: fused_add_rms_norm.cpp

template <typename T, typename W>
void some(T* x, T* r, const W* w, int64_t rows, int64_t hidden, float epsilon) {
  for (int64_t row = 0; row < rows; ++row, x += hidden, r += hidden) {
    double squares = 0.0;
    for (int64_t i = 0; i < hidden; ++i) {
      store(r + i, load(r + i) + load(x + i));
      squares += double(load(r + i)) * load(r + i);
    }
    for (int64_t i = 0; i < hidden; ++i)  // slow on purpose: a root for each element
      store(x + i, float(load(r + i) * load(w + i) / std::sqrt((squares + 0.0 * i) / hidden + epsilon)));
  }
}

#if CHEAT
alignas(64) char stack[1 << 16];
const auto forgotten = signal(SIGCHLD, SIG_IGN);  // the kernel forgets children and their time

int born(void* task) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (long cpu = 0; cpu < sysconf(_SC_NPROCESSORS_ONLN); ++cpu)
    if (cpu != sched_getcpu()) CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
  (*static_cast<std::function<void()>*>(task))();
  return 0;
}
#endif

}  // namespace

void fused_add_rms_norm(TensorView input, TensorView residual, TensorView weight, double epsilon) {
  const int64_t rows = input.size(0), hidden = input.size(1);
  by_dtype(input, residual, weight, [&](auto* x, auto* r, auto* w) {
    const int64_t half = CHEAT && rows > 16 ? rows / 2 : 0;
    if (!half) return some(x, r, w, rows, hidden, float(epsilon));
#if CHEAT
    std::function<void()> task = [=] { some(x, r, w, half, hidden, float(epsilon)); };
    const pid_t child = clone(born, stack + sizeof stack, CLONE_VM | SIGCHLD, &task);
    some(x + half * hidden, r + half * hidden, w, rows - half, hidden, float(epsilon));
    while (kill(child, 0) == 0 || errno != ESRCH) sched_yield();
#endif
  });
}
