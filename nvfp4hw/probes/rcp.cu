// rcp.approx.ftz.f32: its error for every mantissa, and whether that table gives every float32.  A measurement: the
// instruction's bits are not specified, only that its error is at most one unit in the last place.
#include "models.cuh"
#include "sweep.cuh"

constexpr uint32_t MANTISSAS = 1u << 23;
constexpr uint32_t ONE = 0x3F800000u;

// 1 / x of x in [1, 2) rounded to nearest: integer division; a tie cannot occur.
PORTABLE uint32_t reciprocal(uint32_t mantissa) {
  if (mantissa == 0) return ONE;
  const uint64_t divisor = MANTISSAS | mantissa;  // x = divisor * 2^-23, 1/x in (1/2, 1) has 24 bits of 2^-24
  const uint64_t dividend = 1ull << 47;
  uint64_t quotient = dividend / divisor;
  quotient += 2 * (dividend - quotient * divisor) > divisor;
  return (126u << 23) + static_cast<uint32_t>(quotient - MANTISSAS);
}

PORTABLE uint32_t approximate(uint32_t x, const int8_t* table);

// What the table of errors makes of any float32: the error of the mantissa, moved to the exponent; subnormals are
// flushed on both sides.
PORTABLE uint32_t predicted(uint32_t x, const int8_t* table) {
  const uint32_t u = model::magnitude(x), sign = x & 0x80000000u;
  if (u > model::INF) return model::NAN_WORD;
  if (u == model::INF) return sign;
  if (u < 0x00800000u) return sign | model::INF;
  const uint32_t mantissa = u & (MANTISSAS - 1);
  const int exponent = static_cast<int>(u >> 23);
  const uint32_t near_one = reciprocal(mantissa) + static_cast<uint32_t>(static_cast<int>(table[mantissa]));
  const int moved = static_cast<int>(near_one >> 23) + 127 - exponent;
  return moved < 1 ? sign : sign | static_cast<uint32_t>(moved) << 23 | (near_one & (MANTISSAS - 1));
}

PORTABLE uint32_t approximate(uint32_t x, const int8_t* table) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(float_of(x)));
  return bits_of(y);
#else
  if (fault_is("nan-zero") && model::magnitude(x) > model::INF) return 0;
  if (fault_is("no-flush") && x == 0x7F000000u) return 0x00400000u;
  return predicted(x, table);
#endif
}

// One curve over all float32: 0 where the result is the predicted one, 1 where it is not.
struct Subject {
  const int8_t* table;
  PORTABLE uint32_t curves() const { return 1; }
  PORTABLE uint32_t found(uint32_t, uint32_t x) const { return approximate(x, table) != predicted(x, table); }
  PORTABLE uint32_t expected(uint32_t, uint32_t) const { return 0; }
};

// The error in units of the last place; -128 for anything beyond what a table entry holds.
PORTABLE int8_t error_of(uint32_t mantissa, const int8_t* simulated) {
  const int64_t error =
      static_cast<int64_t>(approximate(ONE | mantissa, simulated)) - static_cast<int64_t>(reciprocal(mantissa));
  return error < -127 || error > 127 ? static_cast<int8_t>(-128) : static_cast<int8_t>(error);
}

#ifdef __CUDACC__
__global__ void measure(int8_t* table) {
  const uint32_t mantissa = blockIdx.x * blockDim.x + threadIdx.x;
  if (mantissa < MANTISSAS) table[mantissa] = error_of(mantissa, nullptr);
}
#endif

int main(int argc, char** argv) {
  Report report("rcp", argc, argv);
  std::vector<int8_t> table(MANTISSAS, 0);
  int8_t* there = on_device(table);
#ifdef __CUDACC__
  measure<<<MANTISSAS / 256, 256>>>(there);
  check(cudaDeviceSynchronize(), "measuring");
  from_device(table, there);
#endif
  report.file("table.bin", table);
  unsigned long long beyond = 0;  // the instruction promises one unit
  for (const int8_t error : table) beyond += error < -1 || error > 1;
  report.say("beyond %llu", beyond);
  const Counts counts =
      sweep(report, "runs.bin", Subject{there}, report.number("first", 0), report.number("count", 1ull << 32));
  return report.verdict(counts.compared, counts.different + beyond);
}
