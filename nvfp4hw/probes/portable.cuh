// One source, two builds.  nvcc makes the probe; a plain C++ compiler (g++ -x c++) makes its simulation, in which
// every instruction under test is replaced by the integer model, with a fault planted on request.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __CUDACC__
#define PORTABLE __host__ __device__ inline
#else
#define PORTABLE inline
#endif

using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

// The fault of a simulation, "" for none.  Only host code reads it: `#ifdef __CUDA_ARCH__` keeps it off the device.
inline const char*& planted_fault() {
  static const char* name = "";
  return name;
}

inline bool fault_is(const char* name) { return std::strcmp(planted_fault(), name) == 0; }

PORTABLE float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

PORTABLE uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

PORTABLE int leading_zeros(uint64_t x) {  // of 64 bits, x != 0
#ifdef __CUDA_ARCH__
  return __clzll(static_cast<long long>(x));
#else
  int n = 0;
  for (uint64_t bit = 1ull << 63; !(x & bit); bit >>= 1) ++n;
  return n;
#endif
}

// Adds to a counter that all threads share; the value before.
PORTABLE unsigned long long add_shared(unsigned long long* counter, unsigned long long n) {
#ifdef __CUDA_ARCH__
  return atomicAdd(counter, n);
#else
  const unsigned long long before = *counter;
  *counter += n;
  return before;
#endif
}

// A bijection of 32 bits that takes neighbours far apart: what the other operands of an instruction hold.
PORTABLE uint32_t scattered(uint32_t x) { return x * 0x9E3779B1u + 0x7F4A7C15u; }

// The finaliser of MurmurHash3, the probes' source of reproducible words.
PORTABLE uint32_t hashed(uint32_t x) {
  x = (x ^ x >> 16) * 0x85EBCA6Bu;
  x = (x ^ x >> 13) * 0xC2B2AE35u;
  return x ^ x >> 16;
}
