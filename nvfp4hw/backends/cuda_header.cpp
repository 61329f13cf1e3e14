// NVIDIA's host conversions of cuda_fp4.h and cuda_fp8.h, one C function an array conversion.
//
// Every function reads n elements of `in` and writes n of `out` (the pair functions read 2n), and holds no
// state.  Nothing is computed here: each loop body is one call of a function that NVIDIA ships.
// Half and bfloat16 values travel as their bit patterns.

#include <cstdint>
#include <cstring>

#include <cuda_fp4.h>
#include <cuda_fp8.h>

namespace {

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::uint8_t e2m1(float x) {
  return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest);
}

std::uint8_t e4m3(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

__half_raw half_of(std::uint16_t bits) {
  __half_raw value;
  value.x = bits;
  return value;
}

__nv_bfloat16_raw bfloat16_of(std::uint16_t bits) {
  __nv_bfloat16_raw value;
  value.x = bits;
  return value;
}

template <typename In, typename Out, typename Convert>
void each(const In* in, Out* out, std::int64_t n, Convert convert) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = convert(in[i]);
}

// The results for the n float32 bit patterns that start at `first`; past 2^32 - 1 they start again at 0.
template <typename Convert>
void each_pattern(std::uint32_t first, std::uint8_t* out, std::int64_t n, Convert convert) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = convert(float_of(first + static_cast<std::uint32_t>(i)));
}

}  // namespace

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i64 = std::int64_t;

extern "C" {

void e2m1_of_float(const float* in, u8* out, i64 n) { each(in, out, n, e2m1); }

void e2m1_of_half(const u16* in, u8* out, i64 n) {
  each(in, out, n, [](u16 x) { return u8(__nv_cvt_halfraw_to_fp4(half_of(x), __NV_E2M1, cudaRoundNearest)); });
}

void e2m1_of_bfloat16(const u16* in, u8* out, i64 n) {
  each(in, out, n,
       [](u16 x) { return u8(__nv_cvt_bfloat16raw_to_fp4(bfloat16_of(x), __NV_E2M1, cudaRoundNearest)); });
}

// float2 to fp4x2: what decides which element of a pair gets which nibble.
void e2m1_pairs_of_float(const float* in, u8* out, i64 n) {
  for (i64 i = 0; i < n; ++i) {
    float2 pair;
    pair.x = in[2 * i];
    pair.y = in[2 * i + 1];
    out[i] = __nv_cvt_float2_to_fp4x2(pair, __NV_E2M1, cudaRoundNearest);
  }
}

void half_of_e2m1(const u8* in, u16* out, i64 n) {
  each(in, out, n, [](u8 x) { return u16(__nv_cvt_fp4_to_halfraw(x, __NV_E2M1).x); });
}

void e4m3_of_float(const float* in, u8* out, i64 n) { each(in, out, n, e4m3); }

void e4m3_of_half(const u16* in, u8* out, i64 n) {
  each(in, out, n, [](u16 x) { return u8(__nv_cvt_halfraw_to_fp8(half_of(x), __NV_SATFINITE, __NV_E4M3)); });
}

void e4m3_of_bfloat16(const u16* in, u8* out, i64 n) {
  each(in, out, n,
       [](u16 x) { return u8(__nv_cvt_bfloat16raw_to_fp8(bfloat16_of(x), __NV_SATFINITE, __NV_E4M3)); });
}

void half_of_e4m3(const u8* in, u16* out, i64 n) {
  each(in, out, n, [](u8 x) { return u16(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3).x); });
}

void e8m0_floor_saturate(const float* in, u8* out, i64 n) {
  each(in, out, n, [](float x) { return u8(__nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundZero)); });
}

void e8m0_floor_nan(const float* in, u8* out, i64 n) {
  each(in, out, n, [](float x) { return u8(__nv_cvt_float_to_e8m0(x, __NV_NOSAT, cudaRoundZero)); });
}

void e8m0_ceil_saturate(const float* in, u8* out, i64 n) {
  each(in, out, n, [](float x) { return u8(__nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf)); });
}

void e8m0_ceil_nan(const float* in, u8* out, i64 n) {
  each(in, out, n, [](float x) { return u8(__nv_cvt_float_to_e8m0(x, __NV_NOSAT, cudaRoundPosInf)); });
}

void bfloat16_of_e8m0(const u8* in, u16* out, i64 n) {
  each(in, out, n, [](u8 x) { return u16(__nv_cvt_e8m0_to_bf16raw(x).x); });
}

void e2m1_of_patterns(u32 first, u8* out, i64 n) { each_pattern(first, out, n, e2m1); }

void e4m3_of_patterns(u32 first, u8* out, i64 n) { each_pattern(first, out, n, e4m3); }

}  // extern "C"
