// The parts of a CUDA build of torch that only C++ can provide: a device guard, and hooks that
// report eight devices. No kernel is in here. `guard.py` compiles this file.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

#include <deque>
#include <mutex>

using Guard = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }  // Python keeps that list
  int getNumGPUs() const override { return deviceCount(); }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  c10::DeviceIndex current_device() const override { return Guard().getDevice().index(); }
  c10::DeviceIndex getCurrentDevice() const override { return Guard().getDevice().index(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kCUDA, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({kCUDA, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

// Tensors may be freed where no Python code can run, for instance while an exception passes through
// torch. Freed capsules therefore queue up here until Python asks for them.
static std::mutex lock;
static std::deque<void*> freed;

extern "C" void rehearsal_free(void* capsule) {
  std::lock_guard<std::mutex> held(lock);
  freed.push_back(capsule);
}

extern "C" void* rehearsal_next_freed() {
  std::lock_guard<std::mutex> held(lock);
  if (freed.empty()) return nullptr;
  void* capsule = freed.front();
  freed.pop_front();
  return capsule;
}

// The current device of this thread; autograd's device threads set theirs through the guard.
extern "C" int rehearsal_get_device() { return Guard().getDevice().index(); }
extern "C" void rehearsal_set_device(int index) {
  Guard().setDevice({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)});
}
