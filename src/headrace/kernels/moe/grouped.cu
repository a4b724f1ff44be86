// A product of many tokens by their experts, for prompts: of each expert's pairs (a token and one of its choices) by that expert's weights.
//
//   GATED:  y[place] = act(gate[e] x) ⊙ (up[e] x), x = x[pair / TOP_K]; places of one expert side by side, in the order of ``listed``
//   else:   y[pair] = down[e] x[place]
//
// Two groups of four warps take tiles of ROWS pairs in turn, each a whole one: while one finishes its tile, the other multiplies (ping-pong).
// Two programs, a cluster, take a unit of work together. If an expert has more than ROWS pairs left, they are the upper and the lower ROWS of
// them by the same weights, of which each asks the copy engine for half, which arrives in both (multicast); else they are the same pairs by
// weights side by side. How many pairs an expert has is known on the device alone, so each program counts units for itself.
//
// Rows of x lie anywhere: a group of four warps brings them, 16 bytes a copy, since the copy engine brings boxes alone. Places lie side by
// side, so it does bring those. Sums go over all of K in its order: a pair's do not depend on the others.
//
// Behind matrix.cuh, activation.cuh and gated_end.cuh. Given from outside: GATED, COLUMNS (rows of weights, a tile), STAGES, EXPERTS, TOP_K,
// INS, WIDTH (columns of y), KIND, and mma(), the instruction for COLUMNS.
#define SHARE (GATED ? COLUMNS / 2 : COLUMNS)  // columns of y, a tile
#define BEHIND (GATED ? WIDTH : COLUMNS / 2)   // rows of weights from a tile's first half to its second
#define STRIPS ((WIDTH + SHARE - 1) / SHARE)
#define STEPS (INS / DEPTH)
static_assert(INS % DEPTH == 0 && WIDTH % 8 == 0, "shapes this kernel is for");

struct Table { int ends[EXPERTS], before[EXPERTS], counts[EXPERTS]; };  // units to the end of an expert; pairs before it; its own
struct Unit { int expert, strip, place, rows, before; bool both; };     // ``place``: of the expert's pairs; ``before``: of those of others

__device__ __forceinline__ int whole(int count) { return count / (2 * ROWS) + (count % (2 * ROWS) > ROWS); }  // units of one strip for two programs
__device__ __forceinline__ void count_units(Table &table, const int *counts) {  // a warp
  int lane = threadIdx.x % 32;
  u64 before = 0;
  for (int first = 0; first < EXPERTS; first += 32) {
    int expert = first + lane, count = expert < EXPERTS ? counts[expert] : 0, rest = count - whole(count) * 2 * ROWS;
    u64 own = (u64)(whole(count) * STRIPS + (rest > 0 ? (STRIPS + 1) / 2 : 0)) << 32 | count, ends = own;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
      u64 other = __shfl_up_sync(~0u, ends, far);
      if (lane >= far) ends += other;
    }
    ends += before;
    if (expert < EXPERTS) table.ends[expert] = ends >> 32, table.before[expert] = (u32)(ends - own), table.counts[expert] = count;
    before = __shfl_sync(~0u, ends, 31);
  }
}

struct Walk {  // through units in their order
  const Table &table;
  int unit, by, expert;

  __device__ __forceinline__ bool more() {
    while (expert < EXPERTS && unit >= table.ends[expert]) expert++;
    return expert < EXPERTS;
  }
  __device__ __forceinline__ Unit take() {
    int count = table.counts[expert], blocks = whole(count), rank = blockIdx.x % 2, within = unit - (expert ? table.ends[expert - 1] : 0);
    unit += by;
    if (within < blocks * STRIPS) {
      int place = (within % blocks * 2 + rank) * ROWS;
      return {expert, within / blocks, place, min(ROWS, count - place), table.before[expert], true};
    }
    int strip = (within - blocks * STRIPS) * 2 + rank, place = blocks * 2 * ROWS;
    return {expert, min(strip, STRIPS - 1), place, strip < STRIPS ? count - place : 0, table.before[expert], false};
  }
};

__device__ __forceinline__ void turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group) : "memory"); }
__device__ __forceinline__ void pass_to(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(group) : "memory"); }
__device__ __forceinline__ void copy16(u32 to, const void *from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
struct Ring {
  u32 x, w, full, empty;
  int s, phase;
  __device__ __forceinline__ void next() { if (++s == STAGES) s = 0, phase ^= 1; }
};

__device__ __forceinline__ void bring_weights(const Ring &ring, const Map *map, const Unit &at, int k) {  // a thread
  u32 bar = ring.full + 8 * ring.s, w = ring.w + ring.s * W_BYTES, rank = blockIdx.x % 2;
  int row = at.expert * (GATED ? 2 * WIDTH : WIDTH) + at.strip * SHARE;
  if (at.both) {
    load_both(w + rank * (W_BYTES / 2), map, k * DEPTH, row + rank * BEHIND, bar);
  } else {
    load(w, map, k * DEPTH, row, bar);
    load(w + W_BYTES / 2, map, k * DEPTH, row + BEHIND, bar);
  }
}
#if GATED
__device__ __forceinline__ void bring(Ring ring, Walk walk, const Map *w_map, const u16 *x, int x_row, const int *listed, int room) {
  int thread = threadIdx.x;
  u32 to = ring.x + thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
  while (walk.more()) {
    Unit at = walk.take();
    const int *own = listed + (u64)at.expert * room;
    const u16 *from[8];
#pragma unroll
    for (int j = 0; j < 8; j++) from[j] = x + (u64)(own[min(at.place + thread / 8 + 16 * j, walk.table.counts[at.expert] - 1)] / TOP_K) * x_row + thread % 8 * 8;
#pragma unroll 1
    for (int k = 0; k < STEPS; k++) {
      wait(ring.empty + 8 * ring.s, ring.phase ^ 1);  // in both programs
      if (thread == 0) {
        expect(ring.full + 8 * ring.s, W_BYTES);
        bring_weights(ring, w_map, at, k);
      }
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j < 4 || at.rows > 64) copy16(to + ring.s * X_BYTES + j * 2048, from[j] + k * DEPTH);
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ring.full + 8 * ring.s) : "memory");
      ring.next();
    }
  }
}
#else
__device__ __forceinline__ void bring(Ring ring, Walk walk, const Map *w_map, const Map *x_map) {  // a thread
  while (walk.more()) {
    Unit at = walk.take();
    bool two = at.rows > 64;
#pragma unroll 1
    for (int k = 0; k < STEPS; k++) {
      u32 bar = ring.full + 8 * ring.s, x = ring.x + ring.s * X_BYTES;
      wait(ring.empty + 8 * ring.s, ring.phase ^ 1);  // in both programs
      expect(bar, W_BYTES + (two ? X_BYTES : X_BYTES / 2));  // what lies beyond a matrix arrives as zeros
      bring_weights(ring, w_map, at, k);
      load(x, x_map, k * DEPTH, at.before + at.place, bar);
      if (two) load(x + X_BYTES / 2, x_map, k * DEPTH, at.before + at.place + 64, bar);
      ring.next();
    }
  }
}
// 64 pairs of a group: as ``finish`` for a gate, to where each pair's row lies. ``own``: the tile's pairs.
__device__ __forceinline__ void spread(const float (&c)[COLUMNS / 2], u16 *y, const int *own, int row, int first, int rows) {
  int t = threadIdx.x % 4;
  u16 *to[2];
#pragma unroll
  for (int h = 0; h < 2; h++) to[h] = row + 8 * h < rows ? y + (u64)own[row + 8 * h] * WIDTH : nullptr;
#pragma unroll
  for (int g = 0; g < (COLUMNS / 8 + 3) / 4; g++) {  // of 32 columns
    int mine = g * 4 + t, column = first + 8 * mine;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 q[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int i = g * 4 + j < COLUMNS / 8 ? (g * 4 + j) * 4 + 2 * h : 0;
        q[j] = pack(c[i], c[i + 1]);
      }
      transpose(q, t);
      if (mine < COLUMNS / 8 && column < WIDTH && to[h]) *(uint4 *)(to[h] + column) = make_uint4(q[0], q[1], q[2], q[3]);
    }
  }
}
#endif

// A group's share of a tile: over all of K, one or both of its halves of 64 pairs.
template <int HALVES, class Release> __device__ __forceinline__ void multiply(float (&c)[2][COLUMNS / 2], Ring &ring, const Release &release) {
  int last = 0;
#pragma unroll 1
  for (int k = 0; k < STEPS; k++) {
    wait(ring.full + 8 * ring.s, ring.phase);
#if GATED
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what threads brought, and not the copy engine
#endif
    begin();
    u64 x = described(ring.x + ring.s * X_BYTES), w = described(ring.w + ring.s * W_BYTES);
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++) {
#pragma unroll
      for (int half = 0; half < HALVES; half++) mma(c[half], x + half * (X_BYTES / 32) + 2 * i, w + 2 * i, k + i);
    }
    commit();
    if (k) {
      finished<1>();
      release(last);
    }
    last = ring.s;
    ring.next();
  }
  finished<0>();
  release(last);
}

extern "C" __global__ void __launch_bounds__(384, 1)
grouped(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, const u16 *x, u16 *y, const int *counts, const int *listed, int x_row, int room) {
  extern __shared__ unsigned char raw[];
  __shared__ Table table;
  __shared__ u64 bars[2 * STAGES];
  u32 base = (shared(raw) + 1023) & ~1023u, full = shared(bars);
  Ring ring = {base, base + STAGES * X_BYTES, full, full + 8 * STAGES, 0, 0};
  int group = threadIdx.x / 128, thread = threadIdx.x % 128, clusters = gridDim.x / 2;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) { make(ring.full + 8 * s, GATED ? 129 : 1); make(ring.empty + 8 * s, 2); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (threadIdx.x / 32 == 1) count_units(table, counts);
  __syncthreads();
  together();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    Walk walk = {table, (int)blockIdx.x / 2, clusters, 0};
#if GATED
    bring(ring, walk, &w_map, x, x_row, listed, room);
#else
    if (thread == 0) bring(ring, walk, &w_map, &x_map);
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Walk walk = {table, (int)blockIdx.x / 2 + (group - 1) * clusters, 2 * clusters, 0};
    u32 theirs = of_program(ring.empty, blockIdx.x % 2 ^ 1);
    auto release = [&](int stage) {  // it has only been read: nothing is to be released but the room
      if (thread == 0) arrive(ring.empty + 8 * stage);
      if (thread == 32) arrive_at(theirs + 8 * stage);
    };
    auto skip = [&] {  // the stages of the other group's tile
      int at = ring.s + STEPS;
      ring.phase ^= at / STAGES & 1, ring.s = at % STAGES;
    };
    float c[2][COLUMNS / 2];
    if (group == 2) skip(), pass_to(1);  // the first turn is the first group's
    while (walk.more()) {
      Unit at = walk.take();
      turn(group);
      if (at.rows > 64) multiply<2>(c, ring, release);
      else multiply<1>(c, ring, release);
      pass_to(3 - group);
      skip();
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (at.rows <= half * 64) break;
        hold(c[half]);
        int row = half * 64 + thread / 32 * 16 + thread % 32 / 4;
#if GATED
        finish(c[half], y + (u64)(at.before + at.place) * WIDTH, row, at.strip * SHARE, at.rows, WIDTH);
#else
        spread(c[half], y, listed + (u64)at.expert * room + at.place, row, at.strip * SHARE, at.rows);
#endif
      }
    }
  }
  __syncwarp();
  together();  // who has ended may still be written to
}
