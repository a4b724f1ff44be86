// A gate and what it gates as one product, for a prompt's very many rows: y = act(x Wᵀ) ⊙ (x Vᵀ), W and V one behind the other in one matrix.
//
// Tiles of TALL rows need 0.7 of the copies that tiles of ROWS in turn do: power bounds a long prompt, and what is not moved costs none. Two
// programs, a cluster, have tiles side by side: each asks the copy engine for its own weights and for half of the rows of x, which arrive in
// both (multicast). Two groups of four warps have ROWS of a tile's rows each, in two halves of 64, over all of K in its order: the sums of a
// row do not depend on the others.
//
// A group multiplies its halves side by side but for the first two and the last two steps of a tile, which one half takes after the other:
// while the matrix units work on one, the results of the other leave, as far as the compiler lets them: it waits for all products after a
// third of the arithmetic. So there must be five steps.
//
// Columns that fill no pair of tiles any more get a pair of THIN columns each, dealt behind all others.
//
// Behind gated_end.cuh. Given from outside: COLUMNS, THIN (0: the last pair is a full one), STAGES, KIND, and mma(), the instructions for both.
#define TALL (2 * ROWS)
#define X_STAGE (2 * X_BYTES)
#define BAND 11  // rows of tiles: three of 8,448 rows, six of twice as many

struct Job { u16 *y; int tokens, outs, ins; };

// Pairs of tiles of one width, ``down`` · ``across`` of them from a column on; ``before`` are dealt first.
struct Deal {
  int down, across, column, outs, before;
  __device__ __forceinline__ int pairs() const { return down * across; }
  __device__ __forceinline__ int first() const {
    int clusters = gridDim.x / 2;
    return (blockIdx.x / 2 + clusters - before % clusters) % clusters;
  }
  __device__ __forceinline__ Place place(int pair) const {
    Place at = banded<BAND>(pair, down, across);
    return {at.row * TALL, column + (at.column * 2 + (int)(blockIdx.x % 2)) * outs};
  }
};

struct Ring {
  u32 x, w, full, empty;
  int s, phase;
  __device__ __forceinline__ void next() { if (++s == STAGES) { s = 0; phase ^= 1; } }
};

template <int N> __device__ __forceinline__ void bring(const Job &job, const Deal &deal, Ring &ring, const Map *x_map, const Map *w_map) {
  int rank = blockIdx.x % 2, steps = (job.ins + DEPTH - 1) / DEPTH;
  for (int pair = deal.first(); pair < deal.pairs(); pair += gridDim.x / 2) {
    Place at = deal.place(pair);
    for (int k = 0; k < steps; k++) {
      u32 bar = ring.full + 8 * ring.s, x = ring.x + ring.s * X_STAGE, w = ring.w + ring.s * W_BYTES;
      wait(ring.empty + 8 * ring.s, ring.phase ^ 1);  // in both programs
      expect(bar, X_STAGE + N * DEPTH * 2);  // what lies beyond a matrix arrives as zeros
      load_both(x + rank * X_BYTES, x_map, k * DEPTH, at.row + rank * ROWS, bar);
      load(w, w_map, k * DEPTH, at.column, bar);
      load(w + N * DEPTH, w_map, k * DEPTH, job.outs + at.column, bar);
      ring.next();
    }
  }
}

template <int SUMS> __device__ __forceinline__ void multiply(float (&c)[SUMS], u64 x, u64 w, int keep) {
#pragma unroll
  for (int i = 0; i < DEPTH / 16; i++) mma(c, x + 2 * i, w + 2 * i, keep + i);
}

// ``theirs``: where the other program of the cluster counts who has read a stage.
template <int N> __device__ __forceinline__ void take(const Job &job, const Deal &deal, Ring &ring, int group, u32 theirs) {
  int steps = (job.ins + DEPTH - 1) / DEPTH, thread = threadIdx.x % 128, row = group * ROWS + thread / 32 * 16 + thread % 32 / 4;
  auto x = [&](int stage, int half) { return described(ring.x + stage * X_STAGE + group * X_BYTES) + half * (X_BYTES / 32); };
  auto w = [&](int stage) { return described(ring.w + stage * W_BYTES); };
  auto arrived = [&] {
    int stage = ring.s;
    wait(ring.full + 8 * stage, ring.phase);
    ring.next();
    return stage;
  };
  auto release = [&](int stage) {  // it has only been read: nothing is to be released but the room
    if (thread == 0) arrive(ring.empty + 8 * stage);
    if (thread == 32) arrive_at(theirs + 8 * stage);
  };
  float c[2][N / 2];
  Place at = {-1, 0};
  auto leave = [&](int half) { finish(c[half], job.y, at.row + half * 64 + row, at.column, job.tokens, job.outs); };
  for (int pair = deal.first(); pair < deal.pairs(); pair += gridDim.x / 2) {
    int one = arrived();
    begin();
    multiply(c[0], x(one, 0), w(one), 0);
    int two = arrived();
    multiply(c[0], x(two, 0), w(two), 1);
    commit();
    if (at.row >= 0) leave(1);  // of the tile before
    hold(c[1]);
    begin();
    multiply(c[1], x(one, 1), w(one), 0);
    multiply(c[1], x(two, 1), w(two), 1);
    commit();
    int last = 0;
    for (int k = 2; k < steps - 2; k++) {
      int stage = arrived();
      begin();
      multiply(c[0], x(stage, 0), w(stage), 1);
      multiply(c[1], x(stage, 1), w(stage), 1);
      commit();
      finished<1>();
      if (k == 2) release(one), release(two); else release(last);
      last = stage;
    }
    one = arrived();
    begin();
    multiply(c[0], x(one, 0), w(one), 1);
    two = arrived();
    multiply(c[0], x(two, 0), w(two), 1);
    commit();
    finished<1>();
    release(last);
    begin();
    multiply(c[1], x(one, 1), w(one), 1);
    multiply(c[1], x(two, 1), w(two), 1);
    commit();
    finished<1>();
    hold(c[0]);
    at = deal.place(pair);
    leave(0);
    finished<0>();
    release(one), release(two);
    hold(c[1]);
  }
  if (at.row >= 0) leave(1);
}

extern "C" __global__ void __launch_bounds__(384, 1)
gated(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, const __grid_constant__ Map thin_map,
      u16 *y, int tokens, int outs, int ins) {
  extern __shared__ unsigned char raw[];
  u32 base = (shared(raw) + 1023) & ~1023u, w_at = base + STAGES * X_STAGE, full = w_at + STAGES * W_BYTES;
  Ring ring = {base, w_at, full, full + 8 * STAGES, 0, 0};
  int group = threadIdx.x / 128, down = (tokens + TALL - 1) / TALL, across = (outs + (THIN ? 0 : 2 * OUTS - 1)) / (2 * OUTS);
  Job job = {y, tokens, outs, ins};
  Deal wide = {down, across, 0, OUTS, 0}, thin = {down, 1, across * 2 * OUTS, THIN / 2, down * across};
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) { make(ring.full + 8 * s, 1); make(ring.empty + 8 * s, 4); }  // both groups of both programs read x
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  together();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      bring<COLUMNS>(job, wide, ring, &x_map, &w_map);
      if constexpr (THIN > 0) bring<THIN>(job, thin, ring, &x_map, &thin_map);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    u32 theirs = of_program(ring.empty, blockIdx.x % 2 ^ 1);
    take<COLUMNS>(job, wide, ring, group - 1, theirs);
    if constexpr (THIN > 0) take<THIN>(job, thin, ring, group - 1, theirs);
  }
  __syncwarp();
  together();  // who has ended may still be written to
}
