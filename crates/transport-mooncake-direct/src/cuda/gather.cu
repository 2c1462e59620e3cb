// Copies many pieces of memory by one launch. gather.ptx is made from this file; see gather.rs.
//
// The pieces lie one after the other in a sequence of units of 512 bytes, each padded to whole
// units. The sequence is cut into chunks of some units, and warps take chunks in turn, so work is
// even however unequal the pieces are. A chunk may lie inside one piece or cover several.

typedef unsigned int u32;
typedef unsigned long long u64;

#define UNIT_BITS 9
#define UNIT_MASK ((1u << UNIT_BITS) - 1)
#define FULL_WARP 0xffffffffu

// One piece. `place` is where it begins in the sequence, in bytes, plus the bytes of padding behind
// it: begins are multiples of 512 and paddings less than 512.
struct Piece {
    u64 src;
    u64 dst;
    u64 place;
};

// What every launch is told.
struct Head {
    u64 units;       // length of the sequence
    u32 *blocks;     // how many blocks are done, on the device; zero between launches
    u32 *done;       // where the last block writes the ticket, in host memory; or null
    u32 count;       // pieces, at least one
    u32 chunk_units; // length of a chunk
    u32 ticket;
    u32 reserved;
};

template <int N> struct Inline {
    Head head;
    Piece pieces[N];
};

// Loads that are not kept near the multiprocessor: every byte is used once.
__device__ __forceinline__ uint4 load_once(u64 at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// Loads of which the neighbours use parts too.
__device__ __forceinline__ uint4 load_shared(u64 at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store(u64 at, uint4 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void copy_byte(u64 dst, u64 src) {
    *(unsigned char *)dst = *(const unsigned char *)src;
}

// 16 bytes out of the 32 of `a` and `b`, from byte `shift` on; 0 < shift < 16.
__device__ __forceinline__ uint4 shifted(uint4 a, uint4 b, u32 shift) {
    const bool two = shift & 8, one = shift & 4;
    const u32 bits = (shift & 3) * 8;
    u32 v0 = two ? a.z : a.x, v1 = two ? a.w : a.y, v2 = two ? b.x : a.z;
    u32 v3 = two ? b.y : a.w, v4 = two ? b.z : b.x, v5 = two ? b.w : b.y;
    v0 = one ? v1 : v0;
    v1 = one ? v2 : v1;
    v2 = one ? v3 : v2;
    v3 = one ? v4 : v3;
    v4 = one ? v5 : v4;
    return make_uint4(__funnelshift_r(v0, v1, bits), __funnelshift_r(v1, v2, bits),
                      __funnelshift_r(v2, v3, bits), __funnelshift_r(v3, v4, bits));
}

// Copies where both addresses have the same place within 16 bytes.
__device__ __forceinline__ void copy_aligned(u64 dst, u64 src, u64 len, u32 lane) {
    u64 head = (0 - dst) & 15;
    head = head < len ? head : len;
    if (lane < head) copy_byte(dst + lane, src + lane);
    dst += head, src += head, len -= head;
    const u64 end = len & ~15ull; // vectors end here
    u64 at = lane * 16;
    for (; at + 3 * 512 < end; at += 4 * 512) {
        const uint4 a = load_once(src + at), b = load_once(src + at + 512);
        const uint4 c = load_once(src + at + 1024), d = load_once(src + at + 1536);
        store(dst + at, a);
        store(dst + at + 512, b);
        store(dst + at + 1024, c);
        store(dst + at + 1536, d);
    }
    // At most three more for each lane; all loads before the first store here too.
    const bool has_a = at < end, has_b = at + 512 < end, has_c = at + 1024 < end;
    uint4 a, b, c;
    if (has_a) a = load_once(src + at);
    if (has_b) b = load_once(src + at + 512);
    if (has_c) c = load_once(src + at + 1024);
    if (has_a) store(dst + at, a);
    if (has_b) store(dst + at + 512, b);
    if (has_c) store(dst + at + 1024, c);
    if (lane < (len & 15)) copy_byte(dst + end + lane, src + end + lane);
}

// Copies between any two addresses: whole vectors are loaded, shifted and stored. No byte outside
// the source is read.
__device__ __forceinline__ void copy_shifted(u64 dst, u64 src, u64 len, u32 lane) {
    // First place where the destination is aligned and the vector that holds the source's byte lies
    // inside the source: at most 31 bytes on.
    u64 head = (0 - dst) & 15;
    if (head < ((src + head) & 15)) head += 16;
    head = head < len ? head : len;
    if (lane < head) copy_byte(dst + lane, src + lane);
    dst += head, src += head, len -= head;
    const u32 shift = src & 15;
    const u64 base = src - shift;
    const u64 reach = len + shift; // from base to the end of the source
    const u64 end = reach < 32 ? 0 : (reach & ~15ull) - 16;
    u64 at = lane * 16;
    for (; at + 512 < end; at += 2 * 512) {
        const uint4 a = load_shared(base + at), b = load_shared(base + at + 16);
        const uint4 c = load_shared(base + at + 512), d = load_shared(base + at + 528);
        store(dst + at, shifted(a, b, shift));
        store(dst + at + 512, shifted(c, d, shift));
    }
    if (at < end) {
        const uint4 a = load_shared(base + at), b = load_shared(base + at + 16);
        store(dst + at, shifted(a, b, shift));
    }
    if (lane < len - end) copy_byte(dst + end + lane, src + end + lane); // at most 31 bytes
}

// The last piece that begins at or before a unit. All lanes ask for the same one.
__device__ __forceinline__ u32 find(const Piece *pieces, u32 count, u64 unit, u32 lane) {
    u32 low = 0, high = count; // it is in low .. high
    while (high - low > 1) {
        const u32 step = (high - low + 31) / 32;
        const u64 probe = low + (u64)lane * step;
        const bool before = probe < high && (pieces[probe].place >> UNIT_BITS) <= unit;
        const u32 last = 31 - __clz(__ballot_sync(FULL_WARP, before) | 1);
        low += last * step;
        high = high - low < step ? high : low + step;
    }
    return low;
}

__device__ __forceinline__ void gather(const Head &head, const Piece *pieces) {
    const u32 lane = threadIdx.x & 31;
    const u64 warps = (u64)gridDim.x * (blockDim.x / 32);
    const u64 stride = warps * head.chunk_units;
    u64 start = ((u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * head.chunk_units;
    for (; start < head.units; start += stride) {
        const u64 rest = head.units - start;
        const u64 stop = start + (rest < head.chunk_units ? rest : head.chunk_units);
        u32 i = find(pieces, head.count, start, lane);
        u64 place = pieces[i].place;
        for (u64 unit = start; unit < stop; i++) {
            const u64 src = pieces[i].src, dst = pieces[i].dst;
            const u64 next = i + 1 < head.count ? pieces[i + 1].place : head.units << UNIT_BITS;
            const u64 begin = place >> UNIT_BITS, end = next >> UNIT_BITS;
            const u64 len = ((end - begin) << UNIT_BITS) - (place & UNIT_MASK);
            const u64 from = (unit - begin) << UNIT_BITS;
            u64 to = (stop - begin) << UNIT_BITS;
            to = to < len ? to : len;
            if (((src ^ dst) & 15) == 0)
                copy_aligned(dst + from, src + from, to - from, lane);
            else
                copy_shifted(dst + from, src + from, to - from, lane);
            unit = end;
            place = next;
        }
    }
    if (head.done == nullptr) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system(); // what the block wrote, before it counts as done
        if (atomicAdd(head.blocks, 1) == gridDim.x - 1) {
            *(volatile u32 *)head.blocks = 0;
            __threadfence_system();
            *(volatile u32 *)head.done = head.ticket;
        }
    }
}

// A list in device memory.
extern "C" __global__ void __launch_bounds__(512, 2)
    gather_list(const __grid_constant__ Head head, const Piece *pieces) {
    gather(head, pieces);
}

// A list that travels with the launch. Its address is hidden from the compiler, which would
// otherwise read it through the constant cache: slow where lanes look at different places.
#define GATHER_INLINE(N)                                                                           \
    extern "C" __global__ void __launch_bounds__(512, 2)                                           \
        gather_inline_##N(const __grid_constant__ Inline<N> list) {                                \
        const Piece *pieces = list.pieces;                                                         \
        asm volatile("" : "+l"(pieces));                                                           \
        gather(list.head, pieces);                                                                 \
    }

GATHER_INLINE(8)
GATHER_INLINE(168)
GATHER_INLINE(1360)
