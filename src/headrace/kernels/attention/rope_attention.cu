// Decode attention of sequences with one query each, in one launch with what stands before it: rotary embedding of q and k, and the write
// of the newest key and value into the paged cache.
//
// Programs go through spans of one line of units, (sequence, KV head, UNIT keys), as kernels/attention/triton_plan.py deals them out; before its keys
// each pair of sequence and KV head has a unit without keys, since beginning and ending one takes time, too. Each warp owns
// KEYS keys of every unit: it copies them into a ring of its own, STAGES units ahead, and attends to them; nobody waits for another warp
// until a pair of sequence and KV head is done with. Keys of earlier steps are asked for before the kernel in front of this one has ended.
//
// NORMED: before they are turned, q and k of each head are divided by the root of their mean square, and multiplied by a weight.
//
// FRESH 0: q has been turned and the newest keys lie in the cache, as beside prompts, where one launch does that for all tokens: what is left
// is attention.
//
// Where the plan finds many sequences, all about as long, each warp has whole pairs to itself instead, and nobody waits for another at all.
// TEAM: warps that share a pair, a program's four or one; UNIT is so many times KEYS keys.
//
// S' = K Q' and O' += V' P': keys, or elements of a value, are the 16 rows of mma.m16n8k16, the heads of a group its 8 columns. So what
// belongs to a head (its peak, its mass, its sums) is in the same lanes throughout: lane (g, t) has heads 2 t and 2 t + 1.
//
// KV: keys and values are codes of 8 or 4 bits (KINDS of kernels/attention/kv_codes.py), which the copies leave as they are.
// A matrix load moves pairs of bytes where it moves elements of 16 bits; so of 16 elements (of 32, in 4 bits), lane t has 4 t to 4 t + 3 of
// a query (8 t to 8 t + 7), and lane g 2 g and 2 g + 1 of a result (4 g to 4 g + 3).
//
// Codes that are floats are widened to float16, which holds each of them. Codes that are whole numbers are multiplied as they are, by
// mma.m16n8k32: queries and weights become whole numbers of 16 bits for it, a product for each of their bytes. So no code is converted.

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int HQ = G * HK, HALF = D / 2, STEPS = D / 16;  // STEPS of a product over a head's elements
constexpr bool HALVES = KV == E4M3 || KV == E5M2;         // products are of float16
constexpr int ROW = KV == UINT4 ? D / 2 : KV ? D : 2 * D, CHUNKS = ROW / 16;  // bytes; 16 bytes each
constexpr int LINE = KV ? ROW : D;                        // of the cache, in what it holds
constexpr int OWN = KV == INT8 ? 2 : KV == UINT4 ? 4 : 0; // bytes a key has for scales of its own: the scale, then what code 0 means
constexpr int SCALES = OWN * KEYS;                        // bytes; the values' follow behind both slices
constexpr int SLICE = KEYS * ROW, STAGE = 2 * (SLICE + SCALES), RING = STAGES * STAGE;
constexpr int ENTRIES = BLOCK % KEYS ? KEYS / (CHUNKS == 2 ? 16 : 8) : 1;  // of the block table, for a warp's keys of a unit
constexpr int PITCH = D + 4;                              // of sums in shared memory: no two lanes of a store in one bank
constexpr int ROWS = 32 / CHUNKS, PIECE = ENTRIES == 1 ? KEYS : ROWS < 8 ? 8 : ROWS;  // rows a copy of all lanes has; rows of one block
static_assert(G <= 8 && (D == 64 || D == 128) && KEYS % (WHOLE_CODES ? 32 : 16) == 0 && BLOCK % 8 == 0 && (ENTRIES == 1 || BLOCK % PIECE == 0), "shapes this kernel is for");

template <bool> struct Element { typedef bf16 type; };
template <> struct Element<true> { typedef unsigned char type; };
typedef Element<KV != PLAIN>::type held;  // of the cache
#define NAN_ __int_as_float(0x7fc00000)

// What a program is to do, as kernels/attention/triton_plan.py lays it out.
struct __align__(16) Record { int begin, end, sequence, head, step, first_0, last_0, first_1, last_1, shared[5], context, alike; };

constexpr bool STAGED = KV == UINT4;  // angles wait in fewer registers

struct Params {
  bf16* qkv;                   // [rows, HQ + 2 HK, D], rows token_stride apart; not FRESH: only q is read
  bf16* out;                   // [rows, HQ, D]
  held* keys;                  // [blocks, HK, BLOCK, LINE], blocks and heads with strides; scales behind a head's codes, [BLOCK, OWN / 2], bfloat16
  held* values;                // the same
  const float* key_scales;     // [HK], that all tokens share: of floats in 8 bits alone
  const float* value_scales;   // the same
  const Record* plan;          // [programs]
  const int* context;          // [rows]; 0: a row of no sequence
  const int* table;            // [rows, table_stride]
  const long long* positions;  // [rows]; this and the next two for FRESH alone
  const long long* slots;      // [rows]; -1: nowhere
  const float* cos_sin;        // [positions, D]
  const bf16* q_norm;          // [D]; this and the next for NORMED alone
  const bf16* k_norm;          // [D]
  float* parts;                // [programs, 2, G, D]
  float* peaks;                // [programs, 2, G]
  int* tickets;                // [programs], zero between launches
  long long block_stride, head_stride;
  int token_stride, table_stride, rows;
  float scale;  // of scores, times log2 e
  float eps;    // of norms
  int early;    // it may begin before the kernel in front has ended
  int lets;     // the next may begin, too, once this one's queries are there
};

struct Shared {
  alignas(16) float sums[WARPS][G][PITCH];
  float peak[WARPS][8], mass[WARPS][8];
  int complete[2];
  int alone;  // whether all other parts of the pair that this program leaves unfinished are there
  alignas(16) float angles[WARPS][STAGED ? D : 1];  // of the pair that is turned
  u32 norms[NORMED ? D : 1];  // weights of q's, then of k's: in registers they would leave none
};
extern __shared__ __align__(1024) unsigned char memory[];
extern "C" __device__ const int shared_bytes = WARPS * RING + sizeof(Shared);

// --- instructions

__device__ __forceinline__ float exp2_(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
__device__ __forceinline__ float log2_(float v) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
__device__ __forceinline__ u32 factors(float first, float second) {  // as products want them
  u32 r;
  if (HALVES) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  else r = pack(first, second);
  return r;
}
#define MMA(type) \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (HALVES) MMA("f16"); else MMA("bf16");
}
// Four codes as two pairs: of neighbours, or CROSS, the first and the third.
template <bool CROSS> __device__ __forceinline__ void widen(u32& first, u32& second, u32 codes) {
  if (KV == E4M3) {
    if (CROSS) codes = __byte_perm(codes, 0, 0x3120);
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(first), "=r"(second) : "r"(codes));
  } else {  // the upper byte of a float16
    first = __byte_perm(codes, 0, CROSS ? 0x2404 : 0x1404);
    second = __byte_perm(codes, 0, CROSS ? 0x3414 : 0x3424);
  }
}
// Of whole numbers: codes, and of what they are multiplied by the lower bytes, or SIGNED, the upper ones.
#define MMA_WHOLE(codes, bytes) \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." codes "." bytes ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <bool SIGNED> __device__ __forceinline__ void mma_whole(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (KV == INT8) {
    if (SIGNED) MMA_WHOLE("s8", "s8"); else MMA_WHOLE("s8", "u8");
  } else {
    if (SIGNED) MMA_WHOLE("u8", "s8"); else MMA_WHOLE("u8", "u8");
  }
}
struct Bytes { u32 upper, lower; };  // of four numbers of 16 bits
__device__ __forceinline__ Bytes bytes_of(u32 first, u32 second) { return {__byte_perm(first, second, 0x7531), __byte_perm(first, second, 0x6420)}; }
// Two floats near 0 as whole numbers of 16 bits, ``by`` times as large. Unsigned: 2^23 is added, signed: half as much again.
__device__ __forceinline__ u32 rounded_pair(float first, float second, float by_first, float by_second, float place) {
  return __byte_perm(__float_as_uint(fmaf(first, by_first, place)), __float_as_uint(fmaf(second, by_second, place)), 0x5410);
}
__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ u64 first_to_go() {  // from the second-level cache: keys are read once, what others read again stays
  u64 r;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(r));
  return r;
}
// 16 bytes; of them, ``bytes`` are read, the others zero.
__device__ __forceinline__ void copy_async(u32 to, const void* from, int bytes, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" :: "r"(to), "l"(from), "r"(bytes), "l"(policy) : "memory");
}
__device__ __forceinline__ void store_shared(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" :: "r"(to), "r"(v) : "memory"); }
__device__ __forceinline__ void store_half(u32 to, u32 v) { asm volatile("st.shared.u16 [%0], %1;" :: "r"(to), "h"((bf16)v) : "memory"); }
__device__ __forceinline__ void store_byte(u32 to, u32 v) { asm volatile("st.shared.u8 [%0], %1;" :: "r"(to), "r"(v) : "memory"); }
__device__ __forceinline__ u32 scales_in(u32 at) {  // a key's, in shared memory: the scale in the lower half
  u32 v;
  if (OWN == 4) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  else asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ u32 word_at(const bf16* p) { return *reinterpret_cast<const u32*>(p); }
__device__ __forceinline__ void put_word(void* p, u32 v) { *reinterpret_cast<u32*>(p) = v; }
template <class T> __device__ __forceinline__ T from_l2(const T* p) { return __ldcg(p); }  // what other programs write
template <class T> __device__ __forceinline__ T given(const T* p) { return __ldg(p); }     // what nobody writes while layers follow each other
__device__ __forceinline__ void keep(int v) { asm volatile("" :: "r"(v) : "memory"); }  // so that it is loaded, into the first-level cache

// --- the line of units

// Step 0 of a pair has no keys. upcoming: the next sequence's context, asked for long before.
struct Place { int sequence, head, step, tiles, context, upcoming; };

template <int TEAM> __device__ __forceinline__ int first_key(const Place& at, int warp) { return (at.step - 1) * TEAM * KEYS + warp * KEYS; }

__device__ __forceinline__ int context_of(const Params& p, int sequence) { return sequence < p.rows ? given(p.context + sequence) : 0; }

template <int TEAM> __device__ __forceinline__ int tiles_of(int context) { return 1 + max((context + TEAM * KEYS - 1) / (TEAM * KEYS), 1); }

template <int TEAM> __device__ __forceinline__ void enter(Place& at, const Params& p, int context) {
  at.context = context;
  at.tiles = tiles_of<TEAM>(context);
  at.upcoming = context_of(p, at.sequence + 1);
}

// To the first unit of the next pair.
template <int TEAM> __device__ __forceinline__ void next_pair(Place& at, const Params& p) {
  at.step = 0;
  if (++at.head < HK) return;
  at.head = 0;
  ++at.sequence;
  enter<TEAM>(at, p, at.upcoming);
}

template <int TEAM> __device__ __forceinline__ void advance(Place& at, const Params& p) {
  if (++at.step == at.tiles) next_pair<TEAM>(at, p);
}

__device__ __forceinline__ long long position_of(const Params& p, int sequence) { return FRESH ? given(p.positions + sequence) : 0; }

// --- keys and values of earlier steps

struct Copies {  // what comes next into the ring
  Place at;
  int left;            // units
  int entry[ENTRIES];  // of the block table
  u64 policy;
};

template <int TEAM> __device__ __forceinline__ void look_up(Copies& c, const Params& p, int warp) {
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    int first = first_key<TEAM>(c.at, warp) + i * PIECE;
    c.entry[i] = c.left > 0 && first < c.at.context - FRESH ? given(p.table + (long long)c.at.sequence * p.table_stride + first / BLOCK) : 0;
  }
}

// Chunks of 16 bytes lie elsewhere in each row: no two that a matrix load reads in one bank.
__device__ __forceinline__ int moved(int row) { return CHUNKS == 2 ? row / 4 & 1 : CHUNKS == 4 ? row / 2 & 3 : row & 7; }

template <int TEAM> __device__ __forceinline__ void copy_unit(const Copies& c, const Params& p, u32 to, int warp, int lane) {
  if (c.left > 0) {
    int first = first_key<TEAM>(c.at, warp), row = lane / CHUNKS, chunk = lane % CHUNKS, left = c.at.context - FRESH - first;
    u32 mine = to + row * ROW + ((chunk ^ moved(row)) << 4);
#pragma unroll
    for (int piece = 0; piece < ENTRIES; ++piece) {
      int place = (first + piece * PIECE) % BLOCK;
      long long part = c.entry[piece] * p.block_stride + c.at.head * p.head_stride, from = part + (place + row) * LINE + chunk * (LINE / CHUNKS);
      const held *key = p.keys + from, *value = p.values + from;
#pragma unroll
      for (int i = 0; i < PIECE / ROWS; ++i) {
        int below = piece * PIECE + i * ROWS, bytes = below < left - row ? 16 : 0;
        u32 at = (mine ^ (moved(below) << 4)) + below * ROW;
        copy_async(at, key + i * ROWS * LINE, bytes, c.policy);
        copy_async(at + SLICE, value + i * ROWS * LINE, bytes, c.policy);
      }
      constexpr int COPIES = WHOLE_CODES ? PIECE * OWN / 16 : 1;
      if (WHOLE_CODES && lane < 2 * COPIES) {  // keys' scales, then values'
        const bool values = lane >= COPIES;
        const int begin = lane % COPIES * 16, bytes = min(max((left - piece * PIECE) * OWN - begin, 0), 16);
        const held* scales = (values ? p.values : p.keys) + part + BLOCK * LINE + place * OWN + begin;
        copy_async(to + 2 * SLICE + values * SCALES + piece * PIECE * OWN + begin, scales, bytes, c.policy);
      }
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// To the next unit that has keys.
__device__ __forceinline__ void settle_copies(Copies& c) {
  if (c.at.step == 0 && c.left > 0) { c.at.step = 1; --c.left; }
}

template <int TEAM> __device__ __forceinline__ void go_on(Copies& c, const Params& p, int warp) {
  if (--c.left > 0) advance<TEAM>(c.at, p);
  settle_copies(c);
  look_up<TEAM>(c, p, warp);
}

// The first units: their places in the block table are looked up at once, not one after the other.
template <int TEAM> __device__ __forceinline__ void find_first(Copies (&first)[STAGES], Copies& c, const Params& p, int warp) {
  settle_copies(c);
  look_up<TEAM>(c, p, warp);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    first[i] = c;
    go_on<TEAM>(c, p, warp);
  }
}

template <int TEAM> __device__ __forceinline__ void copy_first(const Copies (&first)[STAGES], const Params& p, u32 ring, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < STAGES; ++i) copy_unit<TEAM>(first[i], p, ring + i * STAGE, warp, lane);
}

// --- this step's query, key and value

struct Angle { float2 cos, sin; };  // of two elements

// Of a query, the lane's pair ``h`` of step ``s`` begins at ``mine_of(lane) + apart(s, h)``.
__device__ __forceinline__ int mine_of(int lane) { return lane % 4 * (KV == UINT4 ? 8 : KV ? 4 : 2); }
__device__ __forceinline__ constexpr int apart(int s, int h) { return KV == UINT4 ? s / 2 * 32 + s % 2 * 4 + 2 * h : 16 * s + (KV ? 2 : 8) * h; }

struct Angles {
  Angle query[STEPS / 2][2];  // of elements mine_of + apart(s, h) and the next
  float row[D / 32];          // STAGED: in their place, lane, lane + 32, … of all
  long long position;         // of the newest key
  long long upcoming;         // the next sequence's position
};

__device__ __forceinline__ Angle angle_at(const float* angles, int element) {
  return {given(reinterpret_cast<const float2*>(angles + element)), given(reinterpret_cast<const float2*>(angles + HALF + element))};
}

__device__ __forceinline__ void load_angles(Angles& a, const Params& p, int sequence, long long position, int lane) {
  if (FRESH) {
    const float* angles = p.cos_sin + position * D;
#pragma unroll
    for (int i = 0; i < (STAGED ? D / 32 : 0); ++i) a.row[i] = given(angles + lane + 32 * i);
#pragma unroll
    for (int s = 0; s < (STAGED ? 0 : STEPS / 2); ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) a.query[s][h] = angle_at(angles, apart(s, h) + mine_of(lane));
  }
  a.position = position;
  a.upcoming = sequence + 1 < p.rows ? position_of(p, sequence + 1) : 0;
}

__device__ __forceinline__ void turn(u32& first, u32& second, const Angle& a) {
  float x = low(first), y = high(first), u = low(second), v = high(second);
  first = pack(x * a.cos.x - u * a.sin.x, y * a.cos.y - v * a.sin.y);
  second = pack(u * a.cos.x + x * a.sin.x, v * a.cos.y + y * a.sin.y);
}

// The weights of norms, which nobody writes: each warp leaves all of them, and reads its own. ``element``: an even one.
__device__ __forceinline__ Shared& shared_of() { return *reinterpret_cast<Shared*>(memory + WARPS * RING); }

__device__ __forceinline__ void load_weights(const Params& p, int lane) {
  if (!NORMED) return;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    int element = 2 * (lane + 32 * i);
    shared_of().norms[element / 2] = word_at((element < D ? p.q_norm : p.k_norm) + element % D);
  }
  __syncwarp();
}
__device__ __forceinline__ u32 weight_of(bool key, int element) { return shared_of().norms[(key * D + element) / 2]; }

__device__ __forceinline__ float squared(u32 v) { return low(v) * low(v) + high(v) * high(v); }
__device__ __forceinline__ u32 normed(u32 v, u32 weight, float rstd) { return pack(low(v) * rstd * low(weight), high(v) * rstd * high(weight)); }
// ``sum``: this lane's share of a head that so many neighbours have.
template <int LANES> __device__ __forceinline__ float rstd_of(float sum, const Params& p) {
#pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return rsqrtf(sum / D + p.eps);
}

struct Newest {
  u32 query[STEPS][2];   // of head g, elements mine_of + apart(s, h) and the next; WHOLE_CODES: bytes, as whole_query has them
  float scale[2];        // of scores, of heads 2 t and 2 t + 1
  float total[2];        // UINT4: what a key of ones scores
  float shared[2];       // scales that all tokens share: of keys, and of values
  u32 key[2];            // elements 2 lane and the next of each half
  u32 value[D / 64];     // elements 2 (lane + 32 j) and the next
  Angle angle;           // of the key
  long long slot;        // of the cache; -1: nowhere
  bool owned;            // key and value are this warp's to place
};

// ``ends``: this program reaches the pair's last unit.
template <int TEAM>
__device__ __forceinline__ void load_newest(Newest& n, const Angles& a, const Params& p, const Place& at, bool ends, int warp, int lane) {
  const bf16* row = p.qkv + (long long)at.sequence * p.token_stride;
  const bf16* q = row + (at.head * G + lane / 4) * D + mine_of(lane);
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h) n.query[s][h] = G == 8 || lane / 4 < G ? word_at(q + apart(s, h)) : 0;
  n.shared[0] = HALVES ? given(p.key_scales + at.head) : 1.0f;
  n.shared[1] = HALVES ? given(p.value_scales + at.head) : 1.0f;
  n.owned = FRESH && ends && at.context > 0 && (at.context - 1) % (TEAM * KEYS) / KEYS == warp;
  if (n.owned) {
    const bf16* k = row + (HQ + at.head) * D;
    n.key[0] = word_at(k + 2 * lane % HALF);
    n.key[1] = word_at(k + HALF + 2 * lane % HALF);
#pragma unroll
    for (int j = 0; j < D / 64; ++j) n.value[j] = word_at(k + HK * D + 2 * (lane + 32 * j));
    n.slot = given(p.slots + at.sequence);
    n.angle = angle_at(p.cos_sin + a.position * D, 2 * lane % HALF);
  }
}

// In float16, by a power of 2 so that a head's largest element is 128 to 256: bfloat16 reaches further, in fewer digits.
__device__ __forceinline__ void halve_query(Newest& n, const Params& p, int lane) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * STEPS; ++i) most = fmaxf(most, fmaxf(fabsf(low(n.query[i / 2][i % 2])), fabsf(high(n.query[i / 2][i % 2]))));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  int exponent = min(max(__float_as_int(most) >> 23, 8), 253);
  float by = __int_as_float(261 - exponent << 23), back = __int_as_float(exponent - 7 << 23);
#pragma unroll
  for (int i = 0; i < 2 * STEPS; ++i) n.query[i / 2][i % 2] = factors(low(n.query[i / 2][i % 2]) * by, high(n.query[i / 2][i % 2]) * by);
#pragma unroll
  for (int e = 0; e < 2; ++e) n.scale[e] = p.scale * n.shared[0] * __shfl_sync(~0u, back, lane % 4 * 8 + 4 * e);
}

// As whole numbers of 16 bits, by a power of 2 so that a head's largest element is 2^14 to 2^15. Words of four elements' bytes: query[s][0]
// the upper ones, query[s][1] the lower ones; of 4 t to 4 t + 3, or UINT4, first of the even of eight, then of the odd.
__device__ __forceinline__ void whole_query(Newest& n, const Params& p, int lane) {
  u32 most = 0;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * STEPS; ++i) {
    u32 v = n.query[i / 2][i % 2];
    most = max(most, max(v << 16 & 0x7fffffff, v & 0x7fff0000));
    total += low(v) + high(v);
  }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    most = max(most, __shfl_xor_sync(~0u, most, lanes));
    total += __shfl_xor_sync(~0u, total, lanes);
  }
  const int exponent = min(max((int)(most >> 23), 15), 253);
  const float by = __int_as_float(268 - exponent << 23), back = most < 0x7f800000 ? __int_as_float(exponent - 14 << 23) : NAN_;
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    u32 pair[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) pair[h] = rounded_pair(low(n.query[s][h]), high(n.query[s][h]), by, by, 12582912.0f);
    Bytes bytes = bytes_of(pair[0], pair[1]);
    n.query[s][0] = bytes.upper;
    n.query[s][1] = bytes.lower;
  }
  if (KV == UINT4)
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      Bytes odd_even = bytes_of(n.query[i / 2 * 2][i % 2], n.query[i / 2 * 2 + 1][i % 2]);
      n.query[i / 2 * 2][i % 2] = odd_even.lower;
      n.query[i / 2 * 2 + 1][i % 2] = odd_even.upper;
    }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    n.scale[e] = p.scale * __shfl_sync(~0u, back, lane % 4 * 8 + 4 * e) * (KV == UINT4 ? 1.0f / 16.0f : 1.0f);
    n.total[e] = p.scale * __shfl_sync(~0u, total, lane % 4 * 8 + 4 * e);
  }
}

__device__ __forceinline__ void turn_query(Newest& n, const Angles& a, const Params& p, int lane) {
  if (NORMED) {
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) sum += squared(n.query[s][0]) + squared(n.query[s][1]);
    float rstd = rstd_of<4>(sum, p);
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) n.query[s][h] = normed(n.query[s][h], weight_of(false, apart(s, h) + mine_of(lane)), rstd);
  }
  if (FRESH) {
    float* row = shared_of().angles[threadIdx.x / 32];
#pragma unroll
    for (int i = 0; i < (STAGED ? D / 32 : 0); ++i) row[lane + 32 * i] = a.row[i];
    if (STAGED) __syncwarp();
#pragma unroll
    for (int s = 0; s < STEPS / 2; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* own = row + apart(s, h) + mine_of(lane);
        Angle staged = STAGED ? Angle{*reinterpret_cast<const float2*>(own), *reinterpret_cast<const float2*>(own + HALF)} : a.query[s][h];
        turn(n.query[s][h], n.query[s + STEPS / 2][h], staged);
      }
  }
  n.scale[0] = n.scale[1] = p.scale;
  if (HALVES) halve_query(n, p, lane);
  if (WHOLE_CODES) whole_query(n, p, lane);
}

__device__ __forceinline__ u32 word_in(u32 slice, int row, int word) { return slice + row * ROW + (((word / 4) ^ (row & 7)) << 4) + word % 4 * 4; }

// --- codes of the newest key and value

// Elements ``element`` and the next, of ``row`` of a slice and of a token of the cache.
__device__ __forceinline__ void place_codes(u32 codes, u32 slice, int row, held* token, int element, bool kept) {
  const int byte = KV == UINT4 ? element / 2 : element;
  const u32 at = slice + row * ROW + (((byte / 16) ^ moved(row)) << 4) + byte % 16;
  if (KV == UINT4) {
    store_byte(at, codes);
    if (kept) token[byte] = codes;
  } else {
    store_half(at, codes);
    if (kept) *reinterpret_cast<bf16*>(token + byte) = codes;
  }
}

__device__ __forceinline__ void place_scale(u32 scale, u32 to, held* token, bool kept) {
  if (KV == UINT4) {
    store_shared(to, scale);
    if (kept) put_word(token, scale);
  } else {
    store_half(to, scale);
    if (kept) *reinterpret_cast<bf16*>(token) = scale;
  }
}

__device__ __forceinline__ void place_coded(Newest& n, const Params& p, const Place& at, u32 slice, int lane) {
  const bool kept = n.slot >= 0;
  const int row = (at.context - 1) % KEYS, place = n.slot % BLOCK;
  const long long part = n.slot / BLOCK * p.block_stride + at.head * p.head_stride;
  Scale key = {n.shared[0]}, value = {n.shared[1]};
  if (WHOLE_CODES) {
    key = own_scale(n.key);
    value = own_scale(n.value);
    held* token = (lane ? p.values : p.keys) + part + BLOCK * LINE + place * OWN;
    if (lane < 2) place_scale(lane ? value.held : key.held, slice + 2 * SLICE + lane * SCALES + row * OWN, token, kept);
  }
  if (HALF == 64 || lane < HALF / 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) place_codes(coded(n.key[i], key), slice, row, p.keys + part + place * LINE, i * HALF + 2 * lane, kept);
#pragma unroll
  for (int j = 0; j < D / 64; ++j) place_codes(coded(n.value[j], value), slice + SLICE, row, p.values + part + place * LINE, 2 * (lane + 32 * j), kept);
}

// The newest key and value: among the others of this unit, and in the cache.
__device__ __forceinline__ void place_newest(Newest& n, const Params& p, const Place& at, u32 slice, int lane) {
  int row = (at.context - 1) % KEYS;
  long long to = n.slot / BLOCK * p.block_stride + at.head * p.head_stride + n.slot % BLOCK * D;
  if (NORMED) {
    float rstd = rstd_of<HALF / 2>(squared(n.key[0]) + squared(n.key[1]), p);
#pragma unroll
    for (int i = 0; i < 2; ++i) n.key[i] = normed(n.key[i], weight_of(true, i * HALF + 2 * lane % HALF), rstd);
  }
  turn(n.key[0], n.key[1], n.angle);
  if (KV) return place_coded(n, p, at, slice, lane);
  if (HALF == 64 || lane < HALF / 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_shared(word_in(slice, row, lane + i * (HALF / 2)), n.key[i]);
      if (n.slot >= 0) put_word(p.keys + to + i * HALF + 2 * lane, n.key[i]);
    }
  }
#pragma unroll
  for (int j = 0; j < D / 64; ++j) {
    store_shared(word_in(slice + SLICE, row, lane + 32 * j), n.value[j]);
    if (n.slot >= 0) put_word(p.values + to + 2 * (lane + 32 * j), n.value[j]);
  }
}

// --- attention

// Of heads 2 t and 2 t + 1. mass, least: this lane's share; least: UINT4, of what code 0 of values means. o[j]: elements element_of(j, g, 0)
// of both heads, then element_of(j, g, 1).
struct Softmax { float peak[2], mass[2], least[2]; float o[STEPS][4]; };

__device__ __forceinline__ int element_of(int j, int g, int second) {
  return KV == UINT4 ? j / 2 * 32 + j % 2 + 4 * g + 2 * second : 16 * j + (KV ? 2 * g + second : g + 8 * second);
}

__device__ __forceinline__ void clear(Softmax& a) {
  a.peak[0] = a.peak[1] = MINUS_INFINITY;
  a.mass[0] = a.mass[1] = a.least[0] = a.least[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < STEPS; ++j) a.o[j][0] = a.o[j][1] = a.o[j][2] = a.o[j][3] = 0.0f;
}

__device__ __forceinline__ float over_keys(float v) {  // the most of all lanes with this one's heads
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 4));
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 8));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 16));
}

// Scores of 16 keys, as two sums, so that half as many instructions wait for each other.
__device__ __forceinline__ void score(float (&c)[4], float (&other)[4], const u32 (&q)[STEPS][2], u32 key_at) {
#pragma unroll
  for (int s = 0; s < (KV ? STEPS / 2 : STEPS); ++s) {
    u32 k[4];
    load_matrices(k, key_at ^ (s << 5));
    if (KV) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 wide[4];
        widen<false>(wide[0], wide[2], k[2 * i]);
        widen<false>(wide[1], wide[3], k[2 * i + 1]);
        mma(i ? other : c, wide, q[2 * s + i][0], q[2 * s + i][1]);
      }
    } else {
      mma(s % 2 ? other : c, k, q[s][0], q[s][1]);
    }
  }
}

// Adds 16 values by their weights.
__device__ __forceinline__ void gather(float (&o)[STEPS][4], u32 early, u32 late, u32 value_at) {
#pragma unroll
  for (int j = 0; j < (KV ? STEPS / 2 : STEPS); ++j) {
    u32 v[4];
    load_transposed(v, value_at ^ (j << 5));
    if (KV) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 wide[4];
        widen<true>(wide[0], wide[1], v[2 * i]);
        widen<true>(wide[2], wide[3], v[2 * i + 1]);
        mma(o[2 * j + i], wide, early, late);
      }
    } else {
      mma(o[j], v, early, late);
    }
  }
}

__device__ __forceinline__ void attend_floats(Softmax& a, const Newest& n, u32 slice, int first, int context, int lane) {
  constexpr int TILES = KEYS / 16;
  constexpr float ROOM = HALVES ? 14.0f : 0.0f;  // weights are up to 2^14, so that float16 holds them down to 2^-38 of the largest
  const int row = KV ? lane % 16 : lane % 8 + lane / 16 * 8, chunk = KV ? lane / 16 : lane / 8 % 2;
  const u32 key_at = slice + lane % 16 * ROW + (((lane / 16) ^ moved(lane % 16)) << 4);
  const u32 value_at = slice + SLICE + row * ROW + ((chunk ^ moved(row)) << 4);
  float c[TILES][4] = {}, other[TILES][4] = {};
#pragma unroll
  for (int m = 0; m < TILES; ++m) score(c[m], other[m], n.query, key_at + m * 16 * ROW);
  float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int key = first + m * 16 + e / 2 * 8 + lane / 4;
      c[m][e] = key < context ? (c[m][e] + other[m][e]) * n.scale[e % 2] : MINUS_INFINITY;
      most[e % 2] = fmaxf(most[e % 2], c[m][e]);
    }
  float keep[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float peak = fmaxf(a.peak[e], over_keys(most[e]));
    keep[e] = exp2_(a.peak[e] - peak);  // the first key of a slice is one of the sequence: no peak is -inf from here on
    a.peak[e] = peak;
    a.mass[e] *= keep[e];
  }
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      c[m][e] = exp2_(c[m][e] - (a.peak[e % 2] - ROOM));
      a.mass[e % 2] += c[m][e];
    }
#pragma unroll
  for (int j = 0; j < STEPS; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) a.o[j][e] *= keep[e % 2];
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    u32 early = transposed(factors(c[m][0], c[m][1])), late = transposed(factors(c[m][2], c[m][3]));
    gather(a.o, early, late, value_at + m * 16 * ROW);
  }
}

// --- attention to whole numbers

// ``even`` may be ``codes``. The odd 16 times as large.
__device__ __forceinline__ void even_and_odd(u32 (&even)[4], u32 (&odd)[4], const u32 (&codes)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) { odd[i] = codes[i] & 0xf0f0f0f0; even[i] = codes[i] & 0x0f0f0f0f; }
}

__device__ __forceinline__ int joined(const int (&sums)[2][4], int e) { return sums[0][e] * 256 + sums[1][e]; }

// Scores of 16 keys, UINT4: 16 times as large; no sum reaches 2^31.
__device__ __forceinline__ void score_whole(float (&c)[4], const u32 (&q)[STEPS][2], u32 key_at) {
  int sums[2][4] = {}, odd_sums[2][4] = {};  // by upper bytes, and by lower ones
#pragma unroll
  for (int s = 0; s < ROW / 32; ++s) {
    u32 k[4];
    load_matrices(k, key_at ^ (s << 5));
    if (KV == UINT4) {
      u32 even[4], odd[4];
      even_and_odd(even, odd, k);
      mma_whole<true>(sums[0], even, q[4 * s][0], q[4 * s + 2][0]);
      mma_whole<false>(sums[1], even, q[4 * s][1], q[4 * s + 2][1]);
      mma_whole<true>(odd_sums[0], odd, q[4 * s + 1][0], q[4 * s + 3][0]);
      mma_whole<false>(odd_sums[1], odd, q[4 * s + 1][1], q[4 * s + 3][1]);
    } else {
      mma_whole<true>(sums[0], k, q[2 * s][0], q[2 * s + 1][0]);
      mma_whole<false>(sums[1], k, q[2 * s][1], q[2 * s + 1][1]);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) c[e] = __int2float_rn(KV == UINT4 ? joined(sums, e) * 16 + joined(odd_sums, e) : joined(sums, e));
}

// o = o keep + V' P' by; weights are unsigned.
template <int TILES>
__device__ __forceinline__ void gather_whole(float (&o)[STEPS][4], const float (&keep)[2], const float (&by)[2], const Bytes (&weights)[TILES], u32 value_at) {
  constexpr int EACH = KV == UINT4 ? 2 : 1, OF_LOAD = 2 * EACH;  // results of 16 elements: of 16 bytes, of a load
#pragma unroll
  for (int j = 0; j < ROW / 32; ++j) {
    int sums[OF_LOAD][2][4] = {};
#pragma unroll
    for (int m = 0; m < TILES; m += 2) {
      u32 v[4], w[4];
      load_transposed(v, (value_at ^ (j << 5)) + m * 16 * ROW);
      load_transposed(w, (value_at ^ (j << 5)) + (m + 1) * 16 * ROW);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Bytes early = bytes_of(v[2 * i], v[2 * i + 1]), late = bytes_of(w[2 * i], w[2 * i + 1]);
        u32 codes[2][4] = {{early.lower, early.upper, late.lower, late.upper}};
        if (KV == UINT4) even_and_odd(codes[0], codes[1], codes[0]);
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
          mma_whole<false>(sums[EACH * i + k][1], codes[k], weights[m].lower, weights[m + 1].lower);
          mma_whole<false>(sums[EACH * i + k][0], codes[k], weights[m].upper, weights[m + 1].upper);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < OF_LOAD; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = o[OF_LOAD * j + i][e];
        sum = fmaf(__int2float_rn(joined(sums[i], e)), i % EACH ? by[e % 2] / 16.0f : by[e % 2], sum * keep[e % 2]);
      }
  }
}

__device__ __forceinline__ void attend_whole(Softmax& a, const Newest& n, u32 slice, int first, int context, int lane) {
  constexpr int TILES = KEYS / 16;
  const u32 at = slice + lane % 16 * ROW + (((lane / 16) ^ moved(lane % 16)) << 4), scale_at = slice + 2 * SLICE + OWN * (lane / 4);
  float c[TILES][4], most[2] = {MINUS_INFINITY, MINUS_INFINITY};
  u32 scales[TILES][2], widest = 0;  // of values; finite, or 0 of what is not copied
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scales[m][h] = scales_in(scale_at + SCALES + OWN * (16 * m + 8 * h));
      widest = max(widest, scales[m][h] << 16);
    }
  widest = __reduce_max_sync(~0u, widest);
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    score_whole(c[m], n.query, at + m * 16 * ROW);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      u32 scale = scales_in(scale_at + OWN * (16 * m + e / 2 * 8));
      float lowest = KV == UINT4 ? high(scale) * n.total[e % 2] : 0.0f;
      c[m][e] = first + m * 16 + e / 2 * 8 + lane / 4 < context ? fmaf(c[m][e], n.scale[e % 2] * low(scale), lowest) : MINUS_INFINITY;
      most[e % 2] = fmaxf(most[e % 2], c[m][e]);
    }
  }
  // Weights: the largest of this unit, times the largest scale, is 2^15 to 2^16.
  const int exponent = min(max((int)(widest >> 23), 16), 253);
  const float up = __int_as_float(269 - exponent << 23), back = widest < 0x7f800000 ? __int_as_float(exponent - 15 << 23) : NAN_;
  float keep[2], by[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    most[e] = over_keys(most[e]);
    float peak = fmaxf(a.peak[e], most[e]), mass = 0.0f, least = 0.0f;
    keep[e] = exp2_(a.peak[e] - peak);  // the first key of a slice is one of the sequence: no peak is -inf from here on
    by[e] = exp2_(most[e] - peak);
    a.peak[e] = peak;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& weight = c[m][2 * h + e];
        weight = exp2_(weight - most[e]);
        mass += weight;
        if (KV == UINT4) least = fmaf(weight, high(scales[m][h]), least);
      }
    a.mass[e] = fmaf(mass, by[e], a.mass[e] * keep[e]);
    a.least[e] = fmaf(least, by[e], a.least[e] * keep[e]);
    by[e] *= back;
  }
  Bytes weights[TILES];
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    u32 pair[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float scale = low(scales[m][h]) * up;
      pair[h] = transposed(rounded_pair(c[m][2 * h], c[m][2 * h + 1], scale, scale, 8388608.0f));
    }
    weights[m] = bytes_of(pair[0], pair[1]);
  }
  gather_whole(a.o, keep, by, weights, at + SLICE);
}

__device__ __forceinline__ void attend(Softmax& a, const Newest& n, u32 slice, int first, int context, int lane) {
  if (WHOLE_CODES) attend_whole(a, n, slice, first, context, lane);
  else attend_floats(a, n, slice, first, context, lane);
}

// --- results

// What lanes have found of each head becomes one.
__device__ __forceinline__ void add_lanes(Softmax& a) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) {
      a.mass[e] += __shfl_xor_sync(~0u, a.mass[e], lanes);
      if (KV == UINT4) a.least[e] += __shfl_xor_sync(~0u, a.least[e], lanes);
    }
#pragma unroll
  for (int j = 0; j < (KV == UINT4 ? STEPS : 0); ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) a.o[j][e] += a.least[e % 2];
}

__device__ __forceinline__ float share(float peak, float most) { return peak == MINUS_INFINITY ? 0.0f : exp2_(peak - most); }

__device__ __forceinline__ void put_result(const Params& p, int sequence, int head, int member, int element, const float4& sum, float by) {
  uint2 both = {pack(sum.x * by, sum.y * by), pack(sum.z * by, sum.w * by)};
  *reinterpret_cast<uint2*>(p.out + ((long long)sequence * HQ + head * G + member) * D + element) = both;
}

__device__ __forceinline__ void add(float4& sum, const float4& part, float by) {
  sum.x += part.x * by; sum.y += part.y * by; sum.z += part.z * by; sum.w += part.w * by;
}

__device__ __forceinline__ int part_of(int program, int first) { return program * 2 + (program == first); }

// A result from ``own``, the part of program ``first``, and those of programs begin to last, in this order.
__device__ __forceinline__ void join_parts(const Params& p, int sequence, int head, int member, int element, const float4& own, float own_peak,
                                           int first, int begin, int last) {
  float most = own_peak;
#pragma unroll 4
  for (int program = begin; program <= last; ++program) most = fmaxf(most, from_l2(p.peaks + part_of(program, first) * G + member));
  float mass = share(own_peak, most);
  float4 sum = {own.x * mass, own.y * mass, own.z * mass, own.w * mass};
#pragma unroll 4
  for (int program = begin; program <= last; ++program) {
    int part = part_of(program, first);
    float by = share(from_l2(p.peaks + part * G + member), most);
    mass += by;
    add(sum, from_l2(reinterpret_cast<const float4*>(p.parts + ((long long)part * G + member) * D + element)), by);
  }
  put_result(p, sequence, head, member, element, sum, mass == 0.0f ? 0.0f : 1.0f / mass);
}

// What the warps found becomes one: the result, or a part of it in place ``part``. ``behind``: up to this program, others have left parts
// of the same pair, if any; they follow this one's. ``scale``: of values.
__device__ __forceinline__ void join_warps(Softmax& a, const Params& p, Shared& s, const Place& at, float scale, int part, int behind, int warp, int lane) {
  int g = lane / 4, t = lane % 4, program = blockIdx.x;
  add_lanes(a);
  __syncthreads();  // everybody has read what the pair before left here
  if (g == 0)
#pragma unroll
    for (int e = 0; e < 2; ++e) { s.peak[warp][2 * t + e] = a.peak[e]; s.mass[warp][2 * t + e] = a.mass[e]; }
#pragma unroll
  for (int j = 0; j < STEPS; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (2 * t + e % 2 < G) s.sums[warp][2 * t + e % 2][element_of(j, g, e / 2)] = a.o[j][e];
  __syncthreads();
  for (int i = threadIdx.x; i < G * D / 4; i += THREADS) {
    int member = i / (D / 4), element = i % (D / 4) * 4;
    float most = MINUS_INFINITY, mass = 0.0f;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) most = fmaxf(most, s.peak[w][member]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      float by = share(s.peak[w][member], most);
      mass += by * s.mass[w][member];
      add(sum, *reinterpret_cast<const float4*>(&s.sums[w][member][element]), by);
    }
    float by = mass == 0.0f ? 1.0f : scale / mass;
    if (part < 0) {
      put_result(p, at.sequence, at.head, member, element, sum, by);
      continue;
    }
    float4 own = {sum.x * by, sum.y * by, sum.z * by, sum.w * by};
    float peak = most + log2_(mass);
    if (behind > program) {
      join_parts(p, at.sequence, at.head, member, element, own, peak, program, program + 1, behind);
    } else {
      *reinterpret_cast<float4*>(p.parts + ((long long)part * G + member) * D + element) = own;
      if (element == 0) p.peaks[part * G + member] = peak;
    }
  }
}

// The result of a warp that had all keys of a pair: what belongs to a head goes from the lanes that have it to the lanes of a row.
__device__ __forceinline__ void put_alone(Softmax& a, const Params& p, const Place& at, float scale, int lane) {
  float by[2];
  add_lanes(a);
#pragma unroll
  for (int e = 0; e < 2; ++e) by[e] = a.mass[e] == 0.0f ? 1.0f : scale / a.mass[e];
  bf16* to = p.out + ((long long)at.sequence * HQ + at.head * G + lane / 4) * D + mine_of(lane);
  u32 words[STEPS][2];
#pragma unroll
  for (int i = 0; i < 2 * STEPS; ++i)
    words[i / 2][i % 2] = transposed(pack(a.o[i / 2][i % 2 * 2] * by[0], a.o[i / 2][i % 2 * 2 + 1] * by[1]));
#pragma unroll
  for (int i = 0; i < (KV ? STEPS : 0); ++i) {  // even elements beside odd ones
    u32 &even = words[KV == UINT4 ? i / 2 * 2 : i][KV == UINT4 ? i % 2 : 0], &odd = words[KV == UINT4 ? i / 2 * 2 + 1 : i][KV == UINT4 ? i % 2 : 1];
    u32 first = __byte_perm(even, odd, 0x5410);
    odd = __byte_perm(even, odd, 0x7632);
    even = first;
  }
  if (lane / 4 < G)
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) put_word(to + apart(i / 2, i % 2), words[i / 2][i % 2]);
}

__device__ __forceinline__ int arrive(int* ticket) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
  return before;
}

// The parts of a pair from all programs, once they are there.
__device__ __forceinline__ void join_all(const Params& p, int sequence, int head, int first, int last) {
  for (int i = threadIdx.x; i < G * D / 4; i += THREADS) {
    int member = i / (D / 4), element = i % (D / 4) * 4, part = part_of(first, first);
    float4 own = from_l2(reinterpret_cast<const float4*>(p.parts + ((long long)part * G + member) * D + element));
    join_parts(p, sequence, head, member, element, own, from_l2(p.peaks + part * G + member), first, first + 1, last);
  }
}

// What a warp or a team asks for before its first unit.
template <int TEAM>
__device__ __forceinline__ void ask_first(Copies& copies, Angles& angles, Newest& following, const Params& p, const Place& at,
                                          long long position, int units, u32 ring, int warp, int lane) {
  Copies first[STAGES];
  const bool ends = at.tiles - at.step <= units;
  copies.at = at;
  copies.left = units;
  copies.policy = first_to_go();
  find_first<TEAM>(first, copies, p, warp);
  if (p.early) copy_first<TEAM>(first, p, ring, warp, lane);
  load_angles(angles, p, at.sequence, position, lane);
  load_weights(p, lane);
  wait_for_before();
  if (p.lets) let_next_in();
  load_newest<TEAM>(following, angles, p, at, ends, warp, lane);
  if (!p.early) copy_first<TEAM>(first, p, ring, warp, lane);  // behind all those keys the query would come late
}

// A program's span of the line.
__device__ __forceinline__ void take_span(const Params& p, const Record& mine, int warp, int lane) {
  constexpr int TEAM = WARPS;
  Shared& s = shared_of();
  const u32 ring = (u32)__cvta_generic_to_shared(memory) + warp * RING;
  if (mine.begin >= mine.end) {
    if (p.lets) let_next_in();
    wait_for_before();
    return;
  }
  Place at = {mine.sequence, mine.head, mine.step};
  long long position = position_of(p, at.sequence);
  enter<TEAM>(at, p, mine.context);
  const Place begun = at;
  const int begin = mine.begin, end = mine.end;
  Copies copies;
  Angles angles;
  Newest newest, following;
  ask_first<TEAM>(copies, angles, following, p, at, position, end - begin, ring, warp, lane);
  u32 offset = 0;
  Softmax sums;
  Place ended = at;
  const bool continues = mine.first_0 <= mine.last_0, leaves = mine.first_1 <= mine.last_1;
  bool owing = false, alone = false;  // the ticket of the pair continued is still to be taken; s.alone
  int arrived = 0;                    // at the pair continued, before this program
  for (int unit = begin; unit < end; ++unit) {
    const bool opens = at.step == 0, last = at.step + 1 == at.tiles, stops = unit + 1 == end;
    if (owing) {  // as early as this, so that who waits for this part alone need not write its own
      __syncthreads();
      if (threadIdx.x == 0) arrived = arrive(p.tickets + mine.first_0);
      owing = false;
    }
    if (opens || unit == begin) {
      newest = following;
      turn_query(newest, angles, p, lane);
      clear(sums);
      int behind = unit + at.tiles - at.step;
      if (behind < end) {  // what the next pair needs is on its way during all of this one
        Place then = at;
        next_pair<TEAM>(then, p);
        if (then.sequence != at.sequence) load_angles(angles, p, then.sequence, angles.upcoming, lane);
        load_newest<TEAM>(following, angles, p, then, then.tiles <= end - behind, warp, lane);
      }
    }
    if (!opens) {
      asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
      __syncwarp();
      if (last && newest.owned) {
        place_newest(newest, p, at, ring + offset, lane);
        __syncwarp();
      }
      int first = first_key<TEAM>(at, warp);
      if (first < at.context) attend(sums, newest, ring + offset, first, at.context, lane);
      __syncwarp();
      copy_unit<TEAM>(copies, p, ring + offset, warp, lane);
      go_on<TEAM>(copies, p, warp);
      offset = offset + STAGE == RING ? 0 : offset + STAGE;
    }
    ended = at;
    advance<TEAM>(at, p);
    if (last || stops) {
      const bool whole = unit - ended.step >= begin;  // from its first unit on
      if (leaves && stops) {
        if (threadIdx.x == 0) {
          int there;
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(p.tickets + mine.first_1) : "memory");
          s.alone = there == mine.last_1 - mine.first_1;
          if (s.alone) p.tickets[mine.first_1] = 0;  // as the next launch wants it
        }
        __syncthreads();
        alone = s.alone;
      }
      join_warps(sums, p, s, ended, newest.shared[1], whole && last ? -1 : (int)blockIdx.x * 2 + whole, alone ? mine.last_1 : -1, warp, lane);
      owing = continues && !whole;
    }
  }
  // The pair continued and the pair left unfinished: whoever comes last to one adds it up.
  if (!continues && (!leaves || alone)) return;
  __syncthreads();  // parts of all threads before the tickets of one
  if (threadIdx.x == 0) {
    if (owing) arrived = arrive(p.tickets + mine.first_0);
    s.complete[0] = continues && arrived == mine.last_0 - mine.first_0;
    s.complete[1] = leaves && !alone && arrive(p.tickets + mine.first_1) == mine.last_1 - mine.first_1;
    if (s.complete[0]) p.tickets[mine.first_0] = 0;
    if (s.complete[1]) p.tickets[mine.first_1] = 0;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < 2; ++i)
    if (s.complete[i])
      join_all(p, i ? ended.sequence : begun.sequence, i ? ended.head : begun.head, i ? mine.first_1 : mine.first_0, i ? mine.last_1 : mine.last_0);
}

// Whole pairs, as many for each warp of the grid. ``at``: the first of ``pairs``.
__device__ __forceinline__ void take_pairs(const Params& p, Place at, int context, long long position, int pairs, u32 ring, int lane) {
  constexpr int TEAM = 1;
  enter<TEAM>(at, p, context);
  int units = at.tiles;
  for (int i = 1; i < pairs; ++i) units += tiles_of<TEAM>(context_of(p, at.sequence + (at.head + i) / HK));
  Copies copies;
  Angles angles;
  Newest newest, following;
  ask_first<TEAM>(copies, angles, following, p, at, position, units, ring, 0, lane);
  u32 offset = 0;
  for (; pairs > 0; --pairs) {
    Softmax sums;
    newest = following;
    turn_query(newest, angles, p, lane);
    clear(sums);
    if (pairs > 1) {
      Place then = at;
      next_pair<TEAM>(then, p);
      if (then.sequence != at.sequence) load_angles(angles, p, then.sequence, angles.upcoming, lane);
      load_newest<TEAM>(following, angles, p, then, true, 0, lane);
    }
    for (at.step = 1; at.step < at.tiles; ++at.step) {
      asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
      __syncwarp();
      if (at.step + 1 == at.tiles && newest.owned) {
        place_newest(newest, p, at, ring + offset, lane);
        __syncwarp();
      }
      int first = first_key<TEAM>(at, 0);
      if (first < at.context) attend(sums, newest, ring + offset, first, at.context, lane);
      __syncwarp();
      copy_unit<TEAM>(copies, p, ring + offset, 0, lane);
      go_on<TEAM>(copies, p, 0);
      offset = offset + STAGE == RING ? 0 : offset + STAGE;
    }
    put_alone(sums, p, at, newest.shared[1], lane);
    next_pair<TEAM>(at, p);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) rope_attention(const __grid_constant__ Params p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Record mine;
#pragma unroll
  for (int i = 0; i < 4; ++i) reinterpret_cast<int4*>(&mine)[i] = given(reinterpret_cast<const int4*>(p.plan + blockIdx.x) + i);
  // Neighbours on the line are on other processors. All is asked for at once, before it is known whether it is wanted.
  const int all = p.rows * HK, each = (all + gridDim.x * WARPS - 1) / (gridDim.x * WARPS);
  const int pair = (blockIdx.x + warp * gridDim.x) * each, pairs = min(each, all - pair);
  const int sequence = min(pair / HK, p.rows - 1), context = given(p.context + sequence);
  const long long position = position_of(p, sequence);
  const int entry = given(p.table + (long long)sequence * p.table_stride);
  if (!mine.alike) {
    take_span(p, mine, warp, lane);
  } else if (pairs > 0) {
    keep(entry);
    take_pairs(p, {sequence, pair % HK, 0}, context, position, pairs, (u32)__cvta_generic_to_shared(memory) + warp * RING, lane);
  } else {
    if (p.lets) let_next_in();
    wait_for_before();
  }
}
