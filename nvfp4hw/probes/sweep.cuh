// Every point of a set of curves through an instruction, compared with a model and recorded without loss.
//
// A curve is a function of a 32-bit point, for instance of every float32 pattern.  Codes are constant over long
// stretches, so the record is run lengths: a run starts at every point whose code differs from that of the point
// before it.  The device compares each point with its neighbour, so the record holds for any outputs whatever.
#pragma once

#include <algorithm>

#include "report.cuh"

struct Run {
  uint32_t curve, start, code;
};

struct Difference {
  uint32_t curve, point, found, expected;
};

struct Tally {
  Run* runs;
  Difference* differences;
  unsigned long long* counts;  // runs, differences
};

#ifdef __CUDACC__
constexpr unsigned long long RUNS_MAX = 1ull << 22;
#else
constexpr unsigned long long RUNS_MAX = 1ull << 16;
#endif
constexpr unsigned long long DIFFERENCES_KEPT = 64;
constexpr uint64_t PIECE = 64;  // consecutive points of one thread

// Points begin .. end - 1 of one curve.  `first`: where the curve starts; its first point always starts a run.
template <class Subject>
PORTABLE void walk(const Subject& subject, uint32_t curve, uint64_t first, uint64_t begin, uint64_t end, Tally tally) {
  uint32_t before = begin == first ? 0 : subject.found(curve, static_cast<uint32_t>(begin - 1));
  for (uint64_t point = begin; point < end; ++point) {
    const uint32_t x = static_cast<uint32_t>(point);
    const uint32_t found = subject.found(curve, x);
    const uint32_t expected = subject.expected(curve, x);
    if (point == first || found != before) {
      const unsigned long long slot = add_shared(tally.counts, 1);
      if (slot < RUNS_MAX) tally.runs[slot] = Run{curve, x, found};
    }
    if (found != expected) {
      const unsigned long long slot = add_shared(tally.counts + 1, 1);
      if (slot < DIFFERENCES_KEPT) tally.differences[slot] = Difference{curve, x, found, expected};
    }
    before = found;
  }
}

#ifdef __CUDACC__
template <class Subject>
__global__ void sweep_kernel(Subject subject, uint32_t curve, uint64_t first, uint64_t count, Tally tally) {
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  const uint64_t end = first + count;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i * PIECE < count; i += stride) {
    const uint64_t begin = first + i * PIECE;
    walk(subject, curve, first, begin, begin + PIECE < end ? begin + PIECE : end, tally);
  }
}
#endif

template <class Subject>
void sweep_curve(const Subject& subject, uint32_t curve, uint64_t first, uint64_t count, Tally tally) {
#ifdef __CUDACC__
  sweep_kernel<<<2048, 256>>>(subject, curve, first, count, tally);
  check(cudaGetLastError(), "launching the sweep");
  check(cudaDeviceSynchronize(), "the sweep");
#else
  walk(subject, curve, first, first, first + count, tally);
#endif
}

struct Counts {
  unsigned long long compared = 0, different = 0;
};

// All curves of a subject over points first .. first + count - 1, recorded in the file NAME.
template <class Subject>
Counts sweep(Report& report, const char* name, const Subject& subject, uint64_t first, uint64_t count) {
  std::vector<unsigned long long> counts(2, 0);
  std::vector<Run> runs(RUNS_MAX);
  std::vector<Difference> differences(DIFFERENCES_KEPT);
  const Tally tally{on_device(runs), on_device(differences), on_device(counts)};
  for (uint32_t curve = 0; curve < subject.curves(); ++curve) sweep_curve(subject, curve, first, count, tally);
  from_device(runs, tally.runs);
  from_device(differences, tally.differences);
  from_device(counts, tally.counts);

  report.say("sweep %s %u %llu %llu %llu", name, subject.curves(), static_cast<unsigned long long>(first),
             static_cast<unsigned long long>(count), counts[0]);
  runs.resize(std::min(counts[0], RUNS_MAX));
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
    return a.curve != b.curve ? a.curve < b.curve : a.start < b.start;
  });
  report.file(name, runs);
  differences.resize(std::min(counts[1], DIFFERENCES_KEPT));
  std::sort(differences.begin(), differences.end(), [](const Difference& a, const Difference& b) {
    return a.curve != b.curve ? a.curve < b.curve : a.point < b.point;
  });
  if (differences.size() > 8) differences.resize(8);
  for (const Difference& d : differences)
    report.say("counterexample %s curve %u point 0x%08X found 0x%X expected 0x%X", name, d.curve, d.point, d.found,
               d.expected);
  return Counts{count * subject.curves(), counts[1]};
}
