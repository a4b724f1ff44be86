// A gate and what it gates as one product, for a prompt's many rows: y = act(x Wᵀ) ⊙ (x Vᵀ), W and V one behind the other in one matrix. Or
// (EIGHT 1: FP8, 2: int8) a product of numbers of 8 bits, whose scales come with what it is given.
//
// Two groups of four warps take tiles of ROWS rows in turn, each a whole one: while one finishes its tile, the other multiplies, so that the
// matrix units never wait for an activation (what CUTLASS calls ping-pong). Two programs, a cluster, have tiles below each other: each asks
// the copy engine for its own rows of x and for half of the weights, which arrive in both (multicast). Sums go over all of K in its order.
//
// Behind gated_end.cuh. Given from outside: COLUMNS, STAGES, KIND, and mma(), the instruction for COLUMNS.
#define BAND 8  // pairs of rows of tiles
#ifdef EIGHT
#define SCALES , const float *of_x, const float *of_w
#define SECOND (COLUMNS / 2)  // where the half of a tile's weights that is not gate begins
#else
#define SCALES
#define SECOND outs
#endif
#if defined(EIGHT) && EIGHT == 2
#define SUM int
#else
#define SUM float
#endif

__device__ __forceinline__ void turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group) : "memory"); }
__device__ __forceinline__ void pass_to(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(group) : "memory"); }

struct Deal {
  int down, tiles;  // pairs of rows of tiles; pairs of tiles
  __device__ __forceinline__ Deal(int tokens, int outs) {
    down = (tokens + 2 * ROWS - 1) / (2 * ROWS), tiles = down * ((outs + OUTS - 1) / OUTS);
  }
  __device__ __forceinline__ Place place(int tile) const {
    Place pair = banded<BAND>(tile, down, tiles / down);
    return {(pair.row * 2 + (int)(blockIdx.x % 2)) * ROWS, pair.column * OUTS};
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
gated(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, u16 *y, int tokens, int outs, int ins SCALES) {
  extern __shared__ unsigned char raw[];
  u32 base = (shared(raw) + 1023) & ~1023u;
  u32 x_at = base, w_at = base + STAGES * X_BYTES, full = w_at + STAGES * W_BYTES, empty = full + 8 * STAGES;
  int group = threadIdx.x / 128, steps = (ins + DEPTH - 1) / DEPTH, rank = blockIdx.x % 2, clusters = gridDim.x / 2;
  Deal deal(tokens, outs);
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) { make(full + 8 * s, 1); make(empty + 8 * s, 2); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  together();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      int s = 0, phase = 1;
      for (int tile = blockIdx.x / 2; tile < deal.tiles; tile += clusters) {
        Place at = deal.place(tile);
        int half = rank ? SECOND + at.column : at.column;  // of the weights: one brings gate, the other what it gates
        for (int k = 0; k < steps; k++) {
          u32 bar = full + 8 * s, x = x_at + s * X_BYTES, w = w_at + s * W_BYTES;
          wait(empty + 8 * s, phase);  // in both programs
          expect(bar, X_BYTES + W_BYTES);  // what lies beyond a matrix arrives as zeros
          load_both(w + rank * (W_BYTES / 2), &w_map, k * DEPTH, half, bar);
          load(x, &x_map, k * DEPTH, at.row, bar);
          load(x + X_BYTES / 2, &x_map, k * DEPTH, at.row + ROWS / 2, bar);
          if (++s == STAGES) { s = 0; phase ^= 1; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int s = 0, phase = 0, last = 0, thread = threadIdx.x % 128;
    u32 theirs = of_program(empty, rank ^ 1);
    auto release = [&](int stage) {  // it has only been read: nothing is to be released but the room
      if (thread == 0) arrive(empty + 8 * stage);
      if (thread == 32) arrive_at(theirs + 8 * stage);
    };
    auto skip = [&] {  // the stages of the other group's tile
      int at = s + steps;
      phase ^= at / STAGES & 1, s = at % STAGES;
    };
    SUM c[2][COLUMNS / 2];
    if (group == 2) skip(), pass_to(1);  // the first turn is the first group's
    for (int tile = blockIdx.x / 2 + (group - 1) * clusters; tile < deal.tiles; tile += 2 * clusters) {
      turn(group);
      for (int k = 0; k < steps; k++) {
        wait(full + 8 * s, phase);
        begin();
        u64 x = described(x_at + s * X_BYTES), w = described(w_at + s * W_BYTES);
#pragma unroll
        for (int i = 0; i < DEPTH / 16; i++) {
          mma(c[0], x + 2 * i, w + 2 * i, k + i);
          mma(c[1], x + X_BYTES / 32 + 2 * i, w + 2 * i, k + i);
        }
        commit();
        if (k) {
          finished<1>();
          release(last);
        }
        last = s;
        if (++s == STAGES) { s = 0; phase ^= 1; }
      }
      pass_to(3 - group);
      skip();
      finished<0>();
      release(last);
      Place at = deal.place(tile);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        hold(c[half]);
        int row = at.row + half * 64 + thread / 32 * 16 + thread % 32 / 4;
#ifdef EIGHT
        finish(c[half], of_x, of_w, y, row, at.column, tokens, outs);
#else
        finish(c[half], y, row, at.column, tokens, outs);
#endif
      }
    }
  }
  __syncwarp();
  together();  // who has ended may still be written to
}
