// The NVFP4 word of mma.sync (sm_120a, sm_121a): kind::mxf4nvf4, scale_vec::4X, m16n8k64, E2M1 with UE4M3 scales.
#include "tiles.cuh"

// What one lane holds for the 16 x 8 words of a tile that start at row m0, column n0.
//
// PTX ISA, "Matrix Fragments for mma.m16n8k64", with g = lane / 4 and t = lane % 4:
//   A element a_i, i = 0..31 (register i / 8, nibble i % 8): row g, or g + 8 where i / 8 is odd;
//     k = 8 t + i % 8, and 32 more where i >= 16.  Eight consecutive k are four bytes of a packed row.
//   B element b_i, i = 0..15: column g, k = 8 t + i % 8, and 32 more where i >= 8.
//   C and D element i = 0..3: row g, or g + 8 where i >= 2; column 2 t + i % 2.
// PTX ISA, "Block Scaling" of mma, for scale_vec::4X: a lane's register holds the four scales of a row or column,
//   k = 0..15 in the lowest byte; byte-id must be 0.  thread-id-a = 0 takes A's scales from lanes t = 0 (row g) and
//   t = 1 (row g + 8) of every four, thread-id-a = 1 from t = 2 and 3; thread-id-b takes B's from lane t = thread-id-b
//   (column g).  Every lane holds what its t would need, so any thread-id gives the same.
struct Fragment {
  uint32_t a[4], b[2], c[4], sa, sb;

  PORTABLE static int row(uint32_t lane, int i) { return static_cast<int>(lane / 4) + (i >= 2 ? 8 : 0); }
  PORTABLE static int column(uint32_t lane, int i) { return static_cast<int>(lane % 4) * 2 + i % 2; }

  PORTABLE void load(const mma::Tile& tile, int m0, int n0, uint32_t lane) {
    const int g = static_cast<int>(lane / 4), t = static_cast<int>(lane % 4);
    for (int r = 0; r < 4; ++r) a[r] = mma::word_at(&tile.a[m0 + g + 8 * (r % 2)][4 * t + 16 * (r / 2)]);
    for (int r = 0; r < 2; ++r) b[r] = mma::word_at(&tile.b[n0 + g][4 * t + 16 * r]);
    for (int i = 0; i < 4; ++i) c[i] = tile.c[m0 + row(lane, i)][n0 + column(lane, i)];
    sa = mma::word_at(tile.sa[m0 + g + 8 * (t % 2)]);
    sb = mma::word_at(tile.sb[n0 + g]);
  }
};

#ifdef __CUDACC__
// One warp for each 16 x 8 words: 8 x 4 warps a tile.
__global__ void multiply(const mma::Tile* tiles, uint32_t* words) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int m0 = static_cast<int>(warp / 4) * 16, n0 = static_cast<int>(warp % 4) * 8;
  Fragment f;
  f.load(tiles[blockIdx.x], m0, n0, lane);
  float d[4] = {};
#ifdef __CUDA_ARCH__
  constexpr uint16_t id = 0;  // byte-id and thread-id
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}, {%14}, {%16, %16}, {%15}, {%16, %16};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "r"(f.b[0]), "r"(f.b[1]), "f"(float_of(f.c[0])),
        "f"(float_of(f.c[1])), "f"(float_of(f.c[2])), "f"(float_of(f.c[3])), "r"(f.sa), "r"(f.sb), "h"(id));
#endif
  uint32_t* out = words + static_cast<size_t>(blockIdx.x) * mma::ROWS * mma::COLUMNS;
  for (int i = 0; i < 4; ++i)
    out[(m0 + Fragment::row(lane, i)) * mma::COLUMNS + n0 + Fragment::column(lane, i)] = bits_of(d[i]);
}
#endif

int main(int argc, char** argv) {
  Report report("mma-sm120", argc, argv);
  return mma::run(report, [&](const mma::Tile* tiles, int count, uint32_t* words) {
#ifdef __CUDACC__
    multiply<<<count, 1024>>>(tiles, words);
    check(cudaGetLastError(), "launching the multiplication");
    check(cudaDeviceSynchronize(), "the multiplication");
#else
    mma::simulate(tiles, count, words);
    if (report.text("dump", "").empty()) return;
    std::vector<Fragment> fragments;  // what the instruction would read, in the order tile, warp, lane
    for (int i = 0; i < count; ++i)
      for (int warp = 0; warp < 32; ++warp)
        for (uint32_t lane = 0; lane < 32; ++lane) {
          fragments.emplace_back();
          fragments.back().load(tiles[i], warp / 4 * 16, warp % 4 * 8, lane);
        }
    report.file("fragments.bin", fragments);
#endif
  });
}
