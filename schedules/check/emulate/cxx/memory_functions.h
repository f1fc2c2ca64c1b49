// Cached loads and atomics. Threads switch only at synchronisations, so a plain read-modify-write is atomic.
#pragma once

template <class T> inline T __ldg(const T* address) { return *address; }
template <class T> inline T __ldca(const T* address) { return *address; }
template <class T> inline T __ldcg(const T* address) { return *address; }
template <class T> inline T __ldcs(const T* address) { return *address; }
template <class T> inline T __ldcv(const T* address) { return *address; }
template <class T> inline void __stcg(T* address, T value) { *address = value; }
template <class T> inline void __stcs(T* address, T value) { *address = value; }
template <class T> inline void __stwb(T* address, T value) { *address = value; }
template <class T> inline void __stwt(T* address, T value) { *address = value; }

namespace emu {
// Keeps the second parameter out of deduction: atomicAdd(unsigned*, int literal) has to work.
template <class T> struct Same { using type = T; };
template <class T> using Value = typename Same<T>::type;
}  // namespace emu

#define EMU_ATOMIC(name, expression)                         \
  template <class T>                                         \
  inline T name(T* address, emu::Value<T> value) {           \
    T old = *address;                                        \
    *address = static_cast<T>(expression);                   \
    return old;                                              \
  }
EMU_ATOMIC(atomicAdd, old + value)
EMU_ATOMIC(atomicSub, old - value)
EMU_ATOMIC(atomicExch, value)
EMU_ATOMIC(atomicMin, value < old ? value : old)
EMU_ATOMIC(atomicMax, value > old ? value : old)
EMU_ATOMIC(atomicAnd, old & value)
EMU_ATOMIC(atomicOr, old | value)
EMU_ATOMIC(atomicXor, old ^ value)
EMU_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
EMU_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef EMU_ATOMIC

template <class T>
inline T atomicCAS(T* address, emu::Value<T> compare, emu::Value<T> value) {
  T old = *address;
  if (old == static_cast<T>(compare)) *address = value;
  return old;
}
