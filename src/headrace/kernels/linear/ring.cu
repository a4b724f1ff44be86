// A product of up to 64 rows (of 8 bits, alone: to 128) with what stands around it in a layer; its first weights are under way before the kernel before it has ended.
//
//   y = act(s · x Wᵀ + b) ⊙ (s · x Vᵀ + c) + residual, scaled = y ⊙ g, squares: as kernels/linear/triton_flat.py has them
//
// One program a processor, with all of its shared memory: the next launch's takes its place as soon as it has ended, and fills its ring with
// weights while others of this launch still run; only then it waits (griddepcontrol) and asks for x. One thread asks the copy engine for
// DEPTH of K of TALL rows of W and of all of x; GROUPS times four warps multiply (wgmma), W as the tall side, the batch (ROWS) as the other.
//
// A program has whole tiles of TALL rows of W, or a WAYS-th of K of one: then those who share it are a cluster, hand their parts over from
// shared memory to shared memory, and each finishes every so-manieth eight rows of x. Parts are added up in the order of K.
//
// With a gate, a tile has 8 rows of W and the 8 of V that belong to them in turn: both meet in one thread.
//
// Weights of few bits (BITS) lie in blocks of 64 rows, as packed.cuh says, which multiplies them; with a gate their rows are dealt like that, too.
// Widening takes more than four warps: so TURNS groups of them may have the 64 rows of a tile together, and steps in turn; the first adds up.
//
// W and x of 8 bits (EIGHT 1: FP8, 2: int8) lie in pairs: DEPTH, ``ins`` and the copies count those. Their scales come in place of the squares
// (of x, of each row, already normed) and in ``units`` (of W, likewise); with BLOCKED of each step, that is of 128 of K, and of 128 rows of W.
// A row of y has ``stride`` columns; others may be another product's, if nothing is added or scaled.
//
// Behind matrix.cuh and early.cuh. Given from outside: ROWS, COLUMNS, STAGES, WAYS, KIND (-1: no gate), and mma(), the instruction for ROWS.
#define TALL COLUMNS
#define BANDS (COLUMNS / 64)
#ifndef TURNS
#define TURNS 1
#endif
#define GROUPS (TURNS > 1 ? TURNS : BANDS)
#define OUTS (KIND < 0 ? TALL : TALL / 2)  // columns of y, a tile
#ifdef TURNED
#define PAIRED true  // rows of W lie as a gate's do, and columns of y side by side nevertheless
#else
#define PAIRED (KIND >= 0)
#endif
#ifdef BITS
#define W_BYTES (BANDS * BLOCK_BYTES)
#else
#define DEPTH 64
#define W_BYTES (TALL * DEPTH * 2)
#endif
#define X_BYTES (ROWS * DEPTH * 2)
#define X_AT ((W_BYTES + 1023) / 1024 * 1024)
#define STAGE_BYTES (X_AT + X_BYTES)
#define THREADS (128 * GROUPS)  // that multiply; one more warp asks for copies
#define SLICES (THREADS / ROWS)
#define BLOCKS (ROWS / 8)  // of eight rows of x: a thread has four sums of each
#define OWN ((BLOCKS + WAYS - 1) / WAYS)  // blocks of a tile that a program finishes, at most
#define FINISHERS (TURNS > 1 ? 128 : THREADS)
#define PART_BYTES (FINISHERS * 16)      // of one block, as one program hands it to another
#define EARLY_PIECES 8         // of the squares, a thread
// Steps: how long before its last weights a late program lets the next launch in, and how many it asks for before it waits. More would
// stand in the way of what the kernel before still writes: its end was heard of 2 µs later.
#define LEAD 6

__device__ __forceinline__ void load_once(u32 to, const Map *map, int k, int row, u32 bar) {  // weights: nobody reads them again
  if (KIND < 0)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row), "l"(ONCE) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %5, %5, %4}], [%2], %6;" ::"r"(to), "l"(map), "r"(bar), "r"(k), "r"(row / 16), "r"(0), "l"(ONCE) : "memory");
}
#ifdef BITS
__device__ __forceinline__ void load_once(u32 to, const unsigned char *blocks, int step, int row, int steps, u32 bar) {
#pragma unroll
  for (int g = 0; g < BANDS; g++) load_block(to + g * BLOCK_BYTES, blocks, row / 64 + g, step, steps, bar);
}
#define WEIGHTS const unsigned char *__restrict__ blocks
#define UNIT , const float *units  // of each row of W as it lies: what it is multiplied by
#else
#define WEIGHTS const __grid_constant__ Map w_map
#ifdef EIGHT
#define UNIT , const float *units
#else
#define UNIT
#endif
#endif
#if defined(BITS) || (defined(EIGHT) && !defined(BLOCKED))
#define SCALED  // each row of W, behind the sums
#endif
#if defined(EIGHT) && EIGHT == 2
#define SUMS whole
#elif defined(BLOCKED)
#define SUMS part
#else
#define SUMS c
#endif
#ifdef BLOCKED
#define FRESH 1  // sums of one step at a time
#else
#define FRESH 0
#endif
template <int COUNT = THREADS> __device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory"); }
// A barrier tells only a phase from the next: a group must use a stage every time, or never.
// Who multiplies gives a stage back behind the wait for its next: it needs two.
static_assert(STAGES % TURNS == 0 && STAGES > TURNS, "stages belong to one group each");
#ifdef BY_WARP
#define READERS (4 * BANDS)  // who say so when they have read a stage
#else
#define READERS BANDS
#endif
__device__ __forceinline__ u16 narrow(float v) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
__device__ __forceinline__ float seen(const float *p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u16 seen(const u16 *p) {
  u16 v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}

struct Deal {  // what a program has to do: whole tiles, every so-manieth, or a WAYS-th of K of one
  int steps, tile, begin, count, total;
  __device__ __forceinline__ Deal(int tiles, int steps_) {
    steps = steps_;
    int part = blockIdx.x % WAYS;
    tile = blockIdx.x / WAYS, begin = steps * part / WAYS, count = steps * (part + 1) / WAYS - begin;
    total = WAYS > 1 ? (tile < tiles ? count : 0) : (tiles - tile + gridDim.x - 1) / gridDim.x * steps;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
ring(const __grid_constant__ Map x_map, WEIGHTS, const float *squares, const u16 *bias, const u16 *residual,
     const void *scale, int scale_bytes, u16 *y, u16 *scaled, float *sums, int pieces, int tokens, int outs, int stride, int ins, float eps, int late UNIT) {
  extern __shared__ unsigned char raw[];
  __shared__ float slices[THREADS], norm[ROWS], across[4 * GROUPS][ROWS];
  __shared__ u64 bars[2 * STAGES + 1];
  u32 base = (shared(raw) + 1023) & ~1023u, full = shared(bars);
  keep(base), keep(full);
  u32 empty = full + 8 * STAGES, gathered = empty + 8 * STAGES;
  Deal deal((outs + OUTS - 1) / OUTS, (ins + DEPTH - 1) / DEPTH);
  if (threadIdx.x == THREADS) {
#ifndef BITS
    asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
#endif
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
    for (int s = 0; s < STAGES; s++) { make(full + 8 * s, 1); make(empty + 8 * s, READERS); }
    if (WAYS > 1) make(gathered, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (WAYS > 1) expect(gathered, (BLOCKS - blockIdx.x % WAYS + WAYS - 1) / WAYS * (WAYS - 1) * PART_BYTES);
  }
  __syncthreads();
  if (WAYS > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");  // who wants to hand over parts waits for it
  if (threadIdx.x == THREADS) {
    int ahead = min(deal.total, STAGES), s = 0, phase = 0, step = deal.begin, row = deal.tile * TALL, gate = late ? deal.total - LEAD : 0;
    auto weights = [&](int s) {
      u32 to = base + s * STAGE_BYTES, bar = full + 8 * s;
      expect(bar, W_BYTES + X_BYTES);
#ifdef BITS
      load_once(to, blocks, step, row, deal.steps, bar);
#else
      load_once(to, &w_map, step * DEPTH, row, bar);
#endif
      if (WAYS == 1 && ++step == deal.steps) step = 0, row += gridDim.x * TALL;
      if (WAYS > 1) step++;
    };
    int x_step = deal.begin;
    auto inputs = [&](int s) {
#pragma unroll
      for (int k = 0; k < DEPTH; k += 64) load(base + s * STAGE_BYTES + X_AT + k * ROWS * 2, &x_map, x_step * DEPTH + k, 0, full + 8 * s);
      if (++x_step == deal.steps) x_step = 0;
    };
    int early = late ? min(ahead, LEAD) : ahead;
    for (int i = 0; i < early; i++) weights(i);
    if (gate <= ahead) let_next_in();
    wait_for_before();
    for (int i = 0; i < ahead; i++) {
      if (i >= early) weights(i);
      inputs(i);
    }
    for (int i = ahead; i < deal.total; i++) {
      wait(empty + 8 * s, phase);
      weights(s);
      inputs(s);
      if (i == gate) let_next_in();
      if (++s == STAGES) { s = 0; phase ^= 1; }
    }
  }
  if (threadIdx.x >= THREADS) {
    __syncwarp();
    if (WAYS > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }
  meet();  // the compiler knows then that warps are whole, and keeps what all of a warp share in registers of the warp
  wait_for_before();
  int thread = threadIdx.x, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32, pair = lane % 4 * 2;
  float early[EARLY_PIECES];
#pragma unroll
  for (int j = 0; j < EARLY_PIECES; j++) early[j] = 0;
  int mine = thread % ROWS, slice = thread / ROWS;
#ifdef BLOCKED
  const float *own_scales = squares;
  squares = nullptr;
#endif
  if (squares && slice < SLICES && mine < tokens) {  // used after the first tile: they come meanwhile
#pragma unroll
    for (int j = 0; j < EARLY_PIECES; j++)
      if (slice + j * SLICES < pieces) early[j] = seen(squares + (slice + j * SLICES) * tokens + mine);
  }
  int s = 0, phase = 0;
  auto first_row = [&](int tile) { return tile * TALL + (TURNS > 1 ? 0 : group * 64) + warp * 16 + lane / 4; };  // of W as it lies
  auto first_column = [&](int tile) {
    int row = first_row(tile);
    return PAIRED ? row / 16 * 8 + row % 8 : row;
  };
  int apart = KIND >= 0 ? 0 : PAIRED ? outs / 2 : 8, end = KIND < 0 && PAIRED ? outs / 2 : outs;  // of a thread's two columns of y; of the first
  float offset[2], factor[2];  // bias (with a gate: of both) and scale of a thread's two columns
#ifdef SCALED
  float unit[2];  // of a thread's two rows of W
#endif
  auto prepare = [&](int tile) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int first = first_column(tile), column = first + apart * h;
#ifdef BITS
      unit[h] = units[first_row(tile) + 8 * h] * UNWIDENED;
#elif defined(SCALED)
      unit[h] = first < end && column < outs ? units[column + (KIND < 0 ? 0 : h * outs)] : 0;
#endif
      offset[h] = bias && first < end && column < outs ? wide(bias[column + (KIND < 0 ? 0 : h * outs)]) : 0;
      factor[h] = !scale || first >= end || column >= outs ? 0 : scale_bytes == 4 ? ((const float *)scale)[column] : wide(((const u16 *)scale)[column]);
    }
  };
  // Everything behind the sums over K, of a block: ``v`` are rows pair and pair + 1 of x with a row of W, then with the one 8 further down.
  auto finish = [&](int tile, int block, float (&v)[4], u16 (&rest)[4]) {
    int first = first_column(tile);
    float sum[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < (KIND < 0 ? 2 : 1); h++) {
      int column = first + apart * h;
      bool inside = first < end && column < outs;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int token = block * 8 + pair + e;
        if (token >= tokens || !inside) continue;
#ifdef BLOCKED
        float by = 1, other = 1;
#else
        float by = squares ? norm[token] : 1, other = by;
#endif
#ifdef SCALED
        by *= unit[h], other *= unit[1];
#endif
        float total = v[2 * h + e] * by + offset[h];
        u64 to = (u64)token * outs + column;
        if (KIND >= 0) total = act(total) * (v[2 + e] * other + offset[1]);
        u16 rounded = narrow(total + wide(rest[2 * h + e]));
        y[(u64)token * stride + column] = rounded;
        if (scale) {
          float now = wide(rounded);
          scaled[to] = narrow(now * factor[h]);
          sum[e] += now * now;
        }
      }
    }
    if (scale) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int far = 4; far < 32; far *= 2) sum[e] += __shfl_xor_sync(~0u, sum[e], far);
        if (lane < 4) across[thread / 32][block * 8 + pair + e] = sum[e];
      }
    }
  };
  auto fetch = [&](int tile, int block, u16 (&rest)[4]) {  // the residual's part of it
    int first = first_column(tile);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = block * 8 + pair + i % 2, column = first + i / 2 * apart;
      rest[i] = residual && (KIND < 0 || i < 2) && token < tokens && first < end && column < outs ? seen(residual + (u64)token * outs + column) : 0;
    }
  };
  auto add_squares = [&](int tile, int part) {
    if (!scale) return;
    meet<FINISHERS>();
    if (thread < tokens && thread / 8 % WAYS == part) {
      float all = 0;
      for (int w = 0; w < FINISHERS / 32; w++) all += across[w][thread];
      sums[tile * tokens + thread] = all;
    }
    meet<FINISHERS>();
  };
  int own = blockIdx.x % WAYS;
  u16 rest[OWN][4];
  if (WAYS > 1) {
#pragma unroll
    for (int j = 0; j < OWN; j++) fetch(deal.tile, own + j * WAYS, rest[j]);
  }
  float c[ROWS / 2];
  for (int i = 0, tile = deal.tile; i < deal.total; i += deal.count, tile += gridDim.x) {
    prepare(tile);
#ifdef BITS
    Packed packed;
    u32 own_block = TURNS > 1 ? 0 : group * BLOCK_BYTES;
    keep(own_block);
#pragma unroll
    for (int j = 0; j < ROWS / 2; j++) c[j] = 0;
#endif
    int before = 0;
#ifdef BLOCKED
#pragma unroll
    for (int j = 0; j < ROWS / 2; j++) c[j] = 0;
    const float *of_block[2];  // the scales of W
#pragma unroll
    for (int h = 0; h < 2; h++) of_block[h] = units + (u64)((min(first_column(tile), outs - 1) + (KIND < 0 ? 0 : h * outs)) / 128) * deal.steps;
#endif
#if defined(EIGHT) && EIGHT == 2
    int whole[ROWS / 2];
#elif defined(BLOCKED)
    float part[ROWS / 2];
#endif
    if (TURNS > 1) s = group;
    for (int k = TURNS > 1 ? group : 0; k < deal.count; k += TURNS) {
#ifdef BLOCKED
      float by[2], own[ROWS / 4];  // come while the weights do
#pragma unroll
      for (int h = 0; h < 2; h++) by[h] = of_block[h][deal.begin + k];
#pragma unroll
      for (int j = 0; j < ROWS / 4; j++) own[j] = own_scales[(u64)min(j / 2 * 8 + pair + j % 2, tokens - 1) * deal.steps + deal.begin + k];
#endif
      wait(full + 8 * s, phase);
#ifdef BY_WARP
      packed.step(c, base + s * STAGE_BYTES + own_block, base + s * STAGE_BYTES + X_AT);
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * s);
#elif defined(BITS)
      packed.first(c, base + s * STAGE_BYTES + own_block, full + 8 * s, phase);
      if (k >= TURNS && thread % 128 == 0) arrive(empty + 8 * before);
      packed.second(c, base + s * STAGE_BYTES + own_block, base + s * STAGE_BYTES + X_AT);
      before = s;
#else
      begin();
      u64 x = described(base + s * STAGE_BYTES + X_AT), w = described(base + s * STAGE_BYTES + group * 8192);
#pragma unroll
      for (int j = 0; j < DEPTH / 16; j++) mma(SUMS, w + 2 * j, x + 2 * j, FRESH ? j : k + j);
      commit();
#ifdef BLOCKED
      finished<0>();
      hold(part);
#pragma unroll
      for (int j = 0; j < ROWS / 2; j++) c[j] += part[j] * (by[j / 2 % 2] * own[j / 4 * 2 + j % 2]);
#endif
      if (k) {
        finished<1>();
        if (thread % 128 == 0) arrive(empty + 8 * before);
      }
      before = s;
#endif
      s += TURNS;
      if (s >= STAGES) { s -= STAGES; phase ^= 1; }
    }
#ifdef BITS
    packed.take(c);
#ifndef BY_WARP
    if (TURNS == 1 && thread % 128 == 0) arrive(empty + 8 * before);
#endif
    if (TURNS > 1) {
      u32 beside = base + STAGES * STAGE_BYTES + (WAYS - 1) * OWN * PART_BYTES + thread % 128 * 16;
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
        if (group) put(beside + ((group - 1) * BLOCKS + b) * 2048, c + 4 * b);
      meet();
#pragma unroll
      for (int j = 0; j < (TURNS - 1) * BLOCKS; j++) {
        float4 other = handed(beside + j * 2048);
        float *sums = c + 4 * (j % BLOCKS);
        sums[0] += other.x, sums[1] += other.y, sums[2] += other.z, sums[3] += other.w;
      }
    }
#else
    finished<0>();
    if (thread % 128 == 0) arrive(empty + 8 * before);
    hold(SUMS);
#if defined(EIGHT) && EIGHT == 2
#pragma unroll
    for (int j = 0; j < ROWS / 2; j++) c[j] = whole[j];
#endif
#endif
    u32 mailbox = base + STAGES * STAGE_BYTES + thread * 16;  // [part][block of the owner's]
    if (WAYS > 1) {
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
        if (b % WAYS != own && (TURNS == 1 || !group)) {
          int at = (own < b % WAYS ? own : own - 1) * OWN + b / WAYS;
          hand_over(of_program(mailbox + at * PART_BYTES, b % WAYS), c + 4 * b, of_program(gathered, b % WAYS));
        }
    }
    if (squares && i == 0) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < EARLY_PIECES; j++) sum += early[j];
      if (slice < SLICES && mine < tokens)
        for (int piece = slice + EARLY_PIECES * SLICES; piece < pieces; piece += SLICES) sum += seen(squares + piece * tokens + mine);
      slices[thread] = sum;
      meet();
      if (thread < ROWS) {
        sum = 0;
        for (int j = 0; j < SLICES; j++) sum += slices[j * ROWS + thread];
#ifdef EIGHT
        norm[thread] = sum;
#else
        norm[thread] = rsqrtf(sum / ins + eps);
#endif
      }
      meet();
    }
    if (TURNS > 1 && group) return;
    if (WAYS == 1) {
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        u16 rest[4];
        float v[4] = {c[4 * b], c[4 * b + 1], c[4 * b + 2], c[4 * b + 3]};
        fetch(tile, b, rest);
        finish(tile, b, v, rest);
      }
      add_squares(tile, 0);
    } else if (own < BLOCKS) {  // each of those who share the tile finishes every so-manieth block
      wait(gathered, 0);
#pragma unroll
      for (int j = 0; j < OWN; j++) {
        int b = own + j * WAYS;
        if (b >= BLOCKS) break;
        float v[4] = {0, 0, 0, 0};
#pragma unroll
        for (int w = 0; w < WAYS; w++) {
          if (w == own) {
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] += w + j * WAYS < BLOCKS ? c[(4 * (w + j * WAYS) + e) % (ROWS / 2)] : 0;
          } else {
            float4 part = handed(mailbox + ((w < own ? w : w - 1) * OWN + j) * PART_BYTES);
            v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
          }
        }
        finish(tile, b, v, rest[j]);
      }
      add_squares(tile, own);
    }
  }
}
