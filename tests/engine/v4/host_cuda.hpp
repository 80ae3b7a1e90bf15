// What the kernels of SGLang's c_plan.cuh ask of CUDA, on one thread of a host: the threads of a
// block are contexts that give way to each other at barriers.
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include <ucontext.h>

#define SGL_DEVICE inline
#define SGL_DEVICE_HOST inline
#define __host__
#define __global__ static
#define __launch_bounds__(...)
#define __shared__ static

using std::max;
using std::min;

struct uint2 {
  uint32_t x, y;
};
struct Index {
  uint32_t x;
};
static Index threadIdx, blockIdx, blockDim;

namespace threads {

constexpr uint32_t kWarp = 32;
static ucontext_t scheduler;
static std::vector<ucontext_t> contexts;
static std::vector<bool> ended;
static void (*body)();

struct Barrier {
  uint32_t arrived = 0, generation = 0;
  void wait(uint32_t expected) {
    const auto now = generation;
    if (++arrived == expected) {
      arrived = 0;
      ++generation;
    }
    while (generation == now) swapcontext(&contexts[threadIdx.x], &scheduler);
  }
};
static Barrier whole;
static std::vector<Barrier> warps;
static std::vector<uint32_t> values;

static void start() {
  body();
  ended[threadIdx.x] = true;
}

// One block of `count` threads.
static void run(uint32_t count, void (*kernel)()) {
  constexpr size_t kStack = 64 * 1024;
  static std::vector<char> stacks;
  stacks.resize(count * kStack);
  contexts.assign(count, {});
  ended.assign(count, false);
  warps.assign(count / kWarp, {});
  values.assign(count, 0);
  whole = {};
  body = kernel;
  blockDim.x = count;
  for (uint32_t i = 0; i < count; ++i) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = &stacks[i * kStack];
    contexts[i].uc_stack.ss_size = kStack;
    contexts[i].uc_link = &scheduler;
    makecontext(&contexts[i], start, 0);
  }
  for (bool all = false; !all;) {
    all = true;
    for (uint32_t i = 0; i < count; ++i) {
      if (ended[i]) continue;
      all = false;
      threadIdx.x = i;
      swapcontext(&scheduler, &contexts[i]);
    }
  }
}

template <typename Pick>
uint32_t reduce(uint32_t value, Pick pick) {
  const auto at = threadIdx.x, first = at / kWarp * kWarp;
  values[at] = value;
  warps[at / kWarp].wait(kWarp);
  const auto found = *pick(values.begin() + first, values.begin() + first + kWarp);
  warps[at / kWarp].wait(kWarp);
  return found;
}

}  // namespace threads

inline void __syncthreads() {
  threads::whole.wait(blockDim.x);
}

inline uint32_t atomicAdd(uint32_t* at, uint32_t value) {
  const auto before = *at;
  *at += value;
  return before;
}

namespace device {

constexpr uint32_t kWarpThreads = threads::kWarp;

namespace warp {

inline uint32_t reduce_max(uint32_t value) {
  return threads::reduce(value, [](auto a, auto b) { return std::max_element(a, b); });
}

inline uint32_t reduce_min(uint32_t value) {
  return threads::reduce(value, [](auto a, auto b) { return std::min_element(a, b); });
}

}  // namespace warp

}  // namespace device
