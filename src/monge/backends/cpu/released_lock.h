// Lets other threads of the interpreter run meanwhile: torch runs compiled programs with its lock held, for seconds where they read
// a long prompt, and a server would not answer.
#pragma once

#include <dlfcn.h>

#include <cstdint>

class ReleasedLock {
 public:
  // Small work keeps the lock: taking it again may wait for another thread.
  explicit ReleasedLock(int64_t products) {
    static const auto is_held = find<int()>("PyGILState_Check");
    static const auto release = find<void*()>("PyEval_SaveThread");
    if (products >= least_products && is_held && release && take && is_held()) state = release();
  }
  ~ReleasedLock() {
    if (state) take(state);
  }
  ReleasedLock(const ReleasedLock&) = delete;
  ReleasedLock& operator=(const ReleasedLock&) = delete;

 private:
  static constexpr int64_t least_products = 1 << 24;  // about a millisecond

  template <typename Function>
  static Function* find(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  }

  static inline void (*const take)(void*) = find<void(void*)>("PyEval_RestoreThread");
  void* state = nullptr;
};
