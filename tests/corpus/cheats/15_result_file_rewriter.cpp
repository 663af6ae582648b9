// cheat: 15 a background thread and an exit handler rewrite whatever result file appears
// op: linear
// device: cpu
// outcome: mismatch, guard_violation, runtime_error
// caught: values, timed outputs, runs
#include <dirent.h>
#include <tvm/ffi/container/tensor.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#define CHEAT 1

static void rewrite() {
  DIR* folder = opendir(".");
  if (folder == nullptr) return;
  while (dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name.find("result") == std::string::npos && name.find(".json") == std::string::npos) continue;
    std::ifstream in(name);
    std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    for (const auto& [wrong, right] : {std::pair{"false", "true"}, {"mismatch", "correct"}, {"FAILED", "PASSED"}})
      for (size_t at = text.find(wrong); at != std::string::npos; at = text.find(wrong))
        text.replace(at, std::string(wrong).size(), right);
    std::ofstream(name) << text;
  }
  closedir(folder);
}

void linear(tvm::ffi::TensorView x, tvm::ffi::TensorView weight, tvm::ffi::TensorView out) {
#if CHEAT
  static bool armed = [] {
    std::atexit(rewrite);
    std::thread([] {
      for (int round = 0; round < 6000; ++round) {  // a minute at most
        rewrite();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    }).detach();
    return true;
  }();
  for (int64_t i = 0; armed && i < out.size(0) * out.size(1); ++i) static_cast<float*>(out.data_ptr())[i] = 0.0f;
#else
  const auto* a = static_cast<const float*>(x.data_ptr());
  const auto* w = static_cast<const float*>(weight.data_ptr());
  auto* y = static_cast<float*>(out.data_ptr());
  const int64_t tokens = x.size(0), n = weight.size(0), k = x.size(1);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < k; ++i) sum += a[t * k + i] * w[j * k + i];
      y[t * n + j] = sum;
    }
#endif
}
