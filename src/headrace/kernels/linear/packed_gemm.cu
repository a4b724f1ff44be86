// y = x Wᵀ (+ b), or act(x Wᵀ + b) ⊙ (x Vᵀ + c), for 65 to 256 rows of x, W in codes of 4 or 8 bits (packed.cuh) with one scale per row and 128 of K.
//
// A CTA has tiles of COLUMNS rows of W: of 128 two warpgroups have 64 each; of 256 each has 128, whose halves it multiplies in turn; of 64 both have
// all of them, and steps of 128 of K in turn. wgmma takes widened codes from registers, and x from shared memory. Codes are scaled before that, and
// rounded to bfloat16 as a weight that is dequantized first is: sums of a step would have no room beside all sums.
//
// Split-K: WAYS CTAs of a cluster have a part of K of one tile each. They hand their sums over from shared memory to shared memory, in place of
// the ring, after the main loops of all, and each finishes every WAYS-th block of eight rows of x. Parts are added up in the order of K.
//
// The ring: STAGES of 64 of K of x, and W_STAGES of 128 of K of W, that arrive with the first of two. Its room is free by then: that of W is read
// before the x of the same K, and W_STAGES reach further back than STAGES.
//
// Behind matrix.cuh, early.cuh and activation.cuh. Given from outside: ROWS, COLUMNS, STAGES, WAYS, KIND (-1: no gate), and mma(), the instruction
// for ROWS. With a gate, rows of W and those that it gates take turns by eight: both meet in one thread. TURNED: they do, and columns of y lie side
// by side nevertheless.
#define BANDS (COLUMNS / 64)               // of 64 rows of W
#define IN_TURN (BANDS == 1)               // warpgroups take steps in turn
#define HIGH (BANDS == 4 ? 2 : 1)          // bands of a warpgroup
#define READERS (IN_TURN ? 1 : 2)          // warpgroups that read a stage
#define UNITS (2 * HIGH)                   // 64 of K of a band, a step
#define THREADS 256                        // that multiply; one more warpgroup loads, whose registers they get
#define FINISHERS (IN_TURN ? 128 : THREADS)
#define X_BYTES (ROWS * 128)
#define W_BYTES (BANDS * BLOCK_BYTES)
#define W_STAGES ((STAGES + 2) / 2)
#define BLOCKS (ROWS / 8)
#define OWN ((BLOCKS + WAYS - 1) / WAYS)  // blocks that a CTA finishes, at most
#define PART_BYTES (FINISHERS * 16)       // of one block, as one CTA hands it to another
#define LEAD 6                            // steps before the end at which a late CTA lets the next launch in
#ifdef TURNED
#define PAIRED true
#define APART (outs / 2)  // of a thread's two columns of y
#else
#define PAIRED (KIND >= 0)
#define APART (KIND >= 0 ? outs : 8)
#endif

// A barrier tells only a phase from the next: a warpgroup must use a stage every time, or never.
static_assert(!IN_TURN || STAGES % 4 == 0, "stages belong to one warpgroup each");

struct Deal {  // what a CTA has to do: whole tiles, every so-manieth, or a WAYS-th of K of one
  int steps, part, tile, begin, count, total;
  __device__ __forceinline__ Deal(int tiles, int steps_) {
    steps = steps_, part = blockIdx.x % WAYS, tile = blockIdx.x / WAYS;
    begin = steps * part / WAYS, count = steps * (part + 1) / WAYS - begin;
    total = WAYS > 1 ? count : (tiles - tile + gridDim.x - 1) / gridDim.x * steps;
  }
};

struct Ring {  // where in it a warpgroup is
  int s, phase;
  __device__ __forceinline__ void next(int by = 1) {
    s += by;
    if (s >= STAGES) s -= STAGES, phase ^= 1;
  }
};

__device__ __forceinline__ u32 turned(u32 v) {  // eight rows of eight numbers of 16 bits, in a warp
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ void arrive_if(int wanted, u32 bar) {  // without a branch, before which wgmmas under way would be waited for
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%1];\n}" ::"r"(wanted), "r"(bar) : "memory");
}

__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1)
ring(const __grid_constant__ Map x_map, const unsigned char *__restrict__ blocks, const float *units, const u16 *bias, u16 *y,
     int tokens, int outs, int ins, int late) {
  extern __shared__ unsigned char raw[];
  __shared__ u64 bars[2 * STAGES + 1];
  u32 base = (shared(raw) + 1023) & ~1023u, full = shared(bars);
  keep(base), keep(full);
  u32 w_at = base + STAGES * X_BYTES, empty = full + 8 * STAGES, gathered = empty + 8 * STAGES;
  Deal deal(((KIND < 0 ? outs : 2 * outs) + COLUMNS - 1) / COLUMNS, (ins + DEPTH - 1) / DEPTH);
  if (threadIdx.x == THREADS) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
    for (int s = 0; s < STAGES; s++) { make(full + 8 * s, 1); make(empty + 8 * s, READERS); }
    make(gathered, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (WAYS > 1) expect(gathered, (BLOCKS - deal.part + WAYS - 1) / WAYS * (WAYS - 1) * PART_BYTES);
  }
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == THREADS) {
      int step = deal.begin, tile = deal.tile, w = 0, early = min(deal.total, (STAGES + 1) / 2), gate = late ? deal.total - LEAD : 0;
      auto weights = [&](int s) {
        expect(full + 8 * s, X_BYTES + W_BYTES);
#pragma unroll
        for (int b = 0; b < BANDS; b++)
          load_block(w_at + w * W_BYTES + b * BLOCK_BYTES, blocks, tile * BANDS + b, step, deal.steps, full + 8 * s);
        if (++step == deal.steps && WAYS == 1) step = 0, tile += gridDim.x;
        if (++w == W_STAGES) w = 0;
      };
      for (int i = 0; i < early; i++) weights(2 * i);
      if (gate <= early) let_next_in();
      wait_for_before();
      Ring at = {0, 1};
      int x_step = deal.begin;
      for (int i = 0; i < deal.total; i++) {
        if (i >= early && i == gate) let_next_in();
#pragma unroll
        for (int half = 0; half < 2; half++) {
          wait(empty + 8 * at.s, at.phase);
          if (half) expect(full + 8 * at.s, X_BYTES);
          else if (i >= early) weights(at.s);
          load(base + at.s * X_BYTES, &x_map, x_step * DEPTH + 64 * half, 0, full + 8 * at.s);
          at.next();
        }
        if (++x_step == deal.steps) x_step = 0;
      }
    }
    __syncwarp();
    if (WAYS > 1) together();
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  wait_for_before();
  int thread = threadIdx.x, group = __shfl_sync(~0u, thread / 128, 0), warp = thread / 32 % 4, lane = thread % 32;
  u32 own = w_at + (IN_TURN ? 0 : group * HIGH * BLOCK_BYTES) + thread % 128 * 16, row = warp * 16 + lane / 4;
  keep(own), keep(row);
  Ring at = {0, 0};
  int read = 0, w = 0;
  if (IN_TURN && group) at.next(2), read = 2, w = 1;
  auto release = [&](bool any, bool second) {
    arrive_if(any && thread % 128 == 0, empty + 8 * read);
    read += any ? IN_TURN && second ? 3 : 1 : 0;
    if (read >= STAGES) read -= STAGES;
  };
  float c[HIGH][ROWS / 2];
  u32 a[2][SIXTEENS][4];
  Factors factors[HIGH];
  for (int i = 0, tile = deal.tile; i < deal.total; i += deal.count, tile += gridDim.x) {
#pragma unroll
    for (int j = 0; j < HIGH * ROWS / 2; j++) c[j / (ROWS / 2)][j % (ROWS / 2)] = 0;
    for (int k = IN_TURN ? group : 0; k < deal.count; k += IN_TURN ? 2 : 1) {
      bool later = k > (IN_TURN ? group : 0);
      u32 codes_at = own + w * W_BYTES;
      w += IN_TURN ? 2 : 1;
      if (w >= W_STAGES) w -= W_STAGES;
      Ring second = at;
      second.next();
      wait(full + 8 * at.s, at.phase);
#pragma unroll
      for (int band = 0; band < HIGH; band++) {
        u32 side = codes_at - thread % 128 * 16 + band * BLOCK_BYTES + CODE_BYTES;
        Section scales[2] = SCALES_OF(side, row, true);
        factors[band].read(side, row, 0, scales, scales);
      }
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        int half = u / HIGH, band = u % HIGH, now = u % 2;
        Codes codes(codes_at + band * BLOCK_BYTES, half);
        finished<1>();  // who reads the registers that are written now: all but the last unit
        if (HIGH == 1 || u % 2) release(later || u > 1, u == 1);
#pragma unroll
        for (int j = 0; j < SIXTEENS; j++) factors[band].widen(a[now][j], codes, j);
        // For both halves: no branch may come between a unit that is under way and the next. Whatever is above is done before it.
        if (u == 0) wait(full + 8 * second.s, second.phase);
        u64 x = described(base + (half ? second : at).s * X_BYTES);
        begin();
#pragma unroll
        for (int j = 0; j < SIXTEENS; j++) mma(c[band], a[now][j], x + 2 * j, 1);
        commit();
      }
      at.next(IN_TURN ? 4 : 2);
    }
    finished<0>();
#pragma unroll
    for (int j = 0; j < HIGH; j++) hold(c[j]);
    bool any = !IN_TURN || deal.count > group;
    release(any, false), release(any && HIGH == 1, true);
    if (WAYS > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    u32 mailbox = base + thread % FINISHERS * 16;  // [part][block of the owner's]
    if (IN_TURN) {  // the second's sums are added to the first's, which goes on
      u32 beside = mailbox + (WAYS - 1) * OWN * PART_BYTES;
      meet();
      if (group) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) put(beside + b * PART_BYTES, c[0] + 4 * b);
      }
      meet();
      if (!group) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
          float4 other = handed(beside + b * PART_BYTES);
          c[0][4 * b] += other.x, c[0][4 * b + 1] += other.y, c[0][4 * b + 2] += other.z, c[0][4 * b + 3] += other.w;
        }
      }
    }
    if (WAYS > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // nobody's ring is read any more
    if (IN_TURN && group) return;
#pragma unroll
    for (int band = 0; band < HIGH; band++) {
      int place = IN_TURN ? 0 : group * HIGH + band, last = KIND < 0 && PAIRED ? outs / 2 : outs;
      int column = PAIRED ? tile * (COLUMNS / 2) + place * 32 + warp * 8 : tile * COLUMNS + place * 64 + warp * 16;
      float unit[2], offset[2];  // of the thread's two rows of W
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int first = column + h * APART;
        unit[h] = units[tile * COLUMNS + place * 64 + warp * 16 + lane / 4 + 8 * h] * UNWIDENED;
        offset[h] = bias && (PAIRED ? column : first) < last ? wide(bias[first + lane / 4]) : 0;
      }
      // Four blocks of eight rows of x, ``first`` and every WAYS-th: eight columns of y together.
      auto leave = [&](int first, const float (&v)[4][4]) {
#pragma unroll
        for (int h = 0; h < (KIND < 0 ? 2 : 1); h++) {
          auto value = [&](int j, int e) {
            float mine = v[j][2 * h + e] * unit[h] + offset[h];
            return KIND < 0 ? mine : act(mine) * (v[j][2 + e] * unit[1] + offset[1]);
          };
          u32 q[4];
#pragma unroll
          for (int j = 0; j < 4; j++) q[j] = turned(pack(value(j, 0), value(j, 1)));
          transpose(q, lane % 4);
          int token = (first + lane % 4 * WAYS) * 8 + lane / 4, to = column + h * APART;
          if (token < tokens && (PAIRED ? column : to) < last) *(uint4 *)(y + (u64)token * outs + to) = make_uint4(q[0], q[1], q[2], q[3]);
        }
      };
      if (WAYS > 1) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
          if (b % WAYS != deal.part) {
            int slot = (deal.part < b % WAYS ? deal.part : deal.part - 1) * OWN + b / WAYS;
            hand_over(of_program(mailbox + slot * PART_BYTES, b % WAYS), c[0] + 4 * b, of_program(gathered, b % WAYS));
          }
        wait(gathered, 0);
      }
#pragma unroll
      for (int j = 0; j < OWN; j += 4) {
        float v[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) v[n][e] = 0;
#pragma unroll
          for (int p = 0; p < WAYS; p++) {
            int b = p + (j + n) * WAYS;  // were it this CTA's part
            if (j + n >= OWN || (p == deal.part && b >= BLOCKS)) continue;
            if (p == deal.part) {
#pragma unroll
              for (int e = 0; e < 4; e++) v[n][e] += c[band][(4 * b + e) % (ROWS / 2)];
            } else {
              float4 other = handed(mailbox + ((p < deal.part ? p : p - 1) * OWN + j + n) * PART_BYTES);
              v[n][0] += other.x, v[n][1] += other.y, v[n][2] += other.z, v[n][3] += other.w;
            }
          }
        }
        leave(deal.part + j * WAYS, v);
      }
    }
  }
}
